"""Resets and stalls of the network between frontend and worker, and garbage from other clients to every port."""

import random
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.processes import DEADLINE_S, wait_until
from tests.cluster.worker import WorkerProcess
from tests.integration.faults.injection import CHAT, Proxy, RequestThread, RunningStream, failures, serving

from dynamo.runtime.request_plane import frame

pytestmark = pytest.mark.integration

PACED = ("--speedup-ratio", "1")
SLOW = ("--speedup-ratio", "0.1")  # 700 tokens take 40 s, in which another worker starts on a busy machine too.
SEED = 11


@contextmanager
def behind_proxy(cluster: Cluster, *flags: str) -> Iterator[tuple[WorkerProcess, Proxy]]:
    """Run a worker that the frontend reaches through a proxy, over one open connection."""
    proxy = Proxy(cluster)
    try:
        worker = WorkerProcess(cluster, *(flags or PACED), **proxy.variables)
        assert cluster.post(CHAT).status_code == 200
        assert proxy.connections == 1
        yield worker, proxy
    finally:
        proxy.close()


def test_connection_reset_between_frontend_and_worker_loses_no_token(tmp_path: Path) -> None:
    with serving(tmp_path, "--migration-limit", "3") as cluster, behind_proxy(cluster, *SLOW) as (worker, proxy):
        stream = RequestThread(cluster, max_tokens=700)
        wait_until(lambda: stream.has_begun, "the stream never began")
        spare = WorkerProcess(cluster, "--speedup-ratio", "20")
        assert not stream.is_over
        reset_at = time.monotonic()
        proxy.reset()
        assert failures([stream]) == []
        silence_s = stream.silence_after_s(reset_at)
        print(f"reset between frontend and worker: silent for {silence_s * 1000:.0f} ms")
        assert silence_s < 2
        assert cluster.metric("dynamo_frontend_model_migration_total", migration_type="ongoing_request") == 1
        assert worker.metric("dynamo_component_cancellation_total") == 1
        wait_until(lambda: worker.is_idle and spare.is_idle, "something is left over")


def test_requests_return_to_the_only_worker_after_a_connection_reset(tmp_path: Path) -> None:
    with serving(tmp_path, "--migration-limit", "3") as cluster, behind_proxy(cluster) as (worker, proxy):
        streams = [RequestThread(cluster, max_tokens=1000) for _ in range(3)]  # Six seconds
        wait_until(lambda: all(one.has_begun for one in streams), "not all streams began")
        proxy.reset()
        assert failures(streams) == []
        print(f"sole worker reset: silent for {max(one.silence_s for one in streams) * 1000:.0f} ms")
        moved = cluster.metric("dynamo_frontend_model_migration_total", migration_type="ongoing_request")
        assert moved == len(streams)
        wait_until(lambda: worker.is_idle, "something is left over")


def test_stalled_connection_does_not_delay_later_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_TCP_REQUEST_TIMEOUT", "2")
    monkeypatch.setenv("DYN_RUNTIME_INHIBITED_DURATION_SECS", "4")
    with serving(tmp_path, "--migration-limit", "3") as cluster, behind_proxy(cluster) as (far, proxy):
        near = WorkerProcess(cluster, *PACED)
        proxy.stall()
        first = [RequestThread(cluster) for _ in range(2)]
        assert failures(first) == []
        proxy.verify_stall()
        later = [RequestThread(cluster) for _ in range(6)]
        assert failures(later) == []
        print(f"stalled way: first pieces after {max(one.silence_s for one in first):.2f} s, "
              f"later ones after {max(one.silence_s for one in later):.2f} s")  # fmt: skip
        assert max(one.silence_s for one in later) < 2
        proxy.heal()
        before = far.metric("dynamo_component_requests_total")
        wait_until(
            lambda: cluster.post(CHAT).status_code == 200 and far.metric("dynamo_component_requests_total") > before,
            "it is never asked again",
        )
        wait_until(lambda: far.is_idle and near.is_idle, "something is left over")


def send(address: tuple[str, int], data: bytes) -> bytes:
    """Return the bytes that a client receives until the connection is closed or a second has passed."""
    received = b""
    with socket.create_connection(address, timeout=DEADLINE_S) as unknown_client:
        try:
            unknown_client.sendall(data)
            unknown_client.settimeout(1)
            while piece := unknown_client.recv(65536):
                received += piece
        except (TimeoutError, ConnectionError):
            pass
    return received


def is_more(worker: WorkerProcess, name: str, before: float) -> bool:
    return worker.metric(name) > before


def garbage(dice: random.Random) -> dict[str, bytes]:
    return {
        "a TLS greeting": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + dice.randbytes(500),
        "an HTTP request": b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        "noise": b"\xff" + dice.randbytes(4000),
        "almost our greeting": frame.HELLO[:-1] + b"\xee" + bytes(100),
        "a frame that is too long": frame.HELLO + struct.pack(">I", 0xFFFF_FFFF) + bytes(1000),
        "a frame of no kind": frame.HELLO + frame.frame(99, b"1234"),
        "a head that cannot be read": frame.HELLO + frame.request_frame(1, b"\xc1\xc1", b""),
    }


def test_malformed_data_on_a_worker_port_is_counted_and_affects_no_request(tmp_path: Path) -> None:
    with serving(tmp_path) as cluster:
        worker = WorkerProcess(cluster, *PACED)
        stream = RunningStream(cluster, max_tokens=450)
        dice = random.Random(SEED)
        errors = "dynamo_transport_tcp_errors_total"
        for name, data in garbage(dice).items():
            before = worker.metric(errors)
            stream.begin()
            send(worker.address, data)
            wait_until(partial(is_more, worker, errors, before), f"{name} was not counted")
        stream.begin()
        for _ in range(200):
            with socket.create_connection(worker.address) as unknown_client:
                unknown_client.sendall(frame.HELLO[:-1] + dice.randbytes(200))
        assert failures(stream.requested) == []
        assert stream.silence_s < 2
        assert cluster.post(CHAT).status_code == 200
        warnings = [line for line in worker.log.read_text().splitlines() if " WARN " in line]
        assert warnings
        assert all("127.0.0.1:" in line for line in warnings), "who was it?"
        assert len(warnings) < 60, "two hundred strangers, two hundred lines"


def test_malformed_data_on_the_frontend_port_is_refused_and_affects_no_request(tmp_path: Path) -> None:
    with serving(tmp_path) as cluster:
        worker = WorkerProcess(cluster, *PACED)
        stream = RunningStream(cluster, max_tokens=450)
        dice, address = random.Random(SEED), ("127.0.0.1", cluster.port)
        for data in (
            b"\x16\x03\x01" + dice.randbytes(500),
            b"\xff" + dice.randbytes(4000),
            b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
        ):
            stream.begin()
            received = send(address, data)
            assert received.startswith(b"HTTP/1.1 400 "), received
            assert b'"error":{' in received
        huge = send(address, b"GET / HTTP/1.1\r\n" + b"x-header: " + b"y" * (4 << 20))
        assert not huge.startswith(b"HTTP/1.1 200")
        with (
            pytest.raises((ssl.SSLError, ConnectionError)),
            socket.create_connection(address, timeout=DEADLINE_S) as unknown_client,
        ):
            ssl._create_unverified_context().wrap_socket(unknown_client)
        stream.begin()
        for _ in range(200):
            with socket.create_connection(address) as unknown_client:
                unknown_client.sendall(dice.randbytes(200))
        assert failures(stream.requested) == []
        assert stream.silence_s < 2
        assert cluster.post(CHAT).status_code == 200
        assert worker.metric("dynamo_component_requests_total") == len(stream.requested) + 1
