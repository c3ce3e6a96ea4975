"""Clients that disconnect, stall, flood or never read: other clients are not affected, and no state is left."""

import asyncio
import contextlib
import json
import random
import socket
import statistics
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.processes import DEADLINE_S, wait_until
from tests.cluster.worker import WorkerProcess
from tests.integration.faults.injection import CHAT, Reset, open_files, resident_mb, serving

pytestmark = pytest.mark.integration

PACED = ("--speedup-ratio", "1")
CLIENTS = 1000
AT_ONCE = 100
SEED = 20
FREED_S = 0.1  # Median over `LEAVES` of the time from the client's close to the engine's release of the request.
LEAVES = 5
UNREAD_MB = 64  # Memory limit for one client that never reads, with all buffers in transit.


def request(**fields: object) -> bytes:
    body = json.dumps({**CHAT, "max_tokens": 2000, "ignore_eos": True, "stream": True, **fields}).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def is_quiet(cluster: Cluster, worker: WorkerProcess) -> bool:
    return cluster.metric("dynamo_frontend_inflight_requests") == 0 and worker.is_idle


def answers_at_once(cluster: Cluster) -> None:
    begun = time.monotonic()
    assert cluster.post(CHAT).status_code == 200
    assert time.monotonic() - begun < 2


# Cancellation ----------------------------------------------------------------------------------------------------------


def time_to_cancel(worker: WorkerProcess, leave: Callable[[], object]) -> float:
    """Return the seconds from the client's disconnect to its detection by the worker."""
    name = "dynamo_component_cancellation_total"
    before = worker.metric(name)
    begun = time.monotonic()
    leave()
    while worker.metric(name) == before:
        assert time.monotonic() < begun + DEADLINE_S, "the worker never heard of it"
    return time.monotonic() - begun


def test_disconnect_in_any_phase_cancels_the_request_at_the_worker(tmp_path: Path) -> None:
    with serving(tmp_path) as cluster:
        # One slot; a prompt takes 16.7 ms / 0.05 = 330 ms, a token 5.7 ms.
        worker = WorkerProcess(
            cluster, "--speedup-ratio", "0.05", "--decode-speedup-ratio", "20", "--max-num-seqs", "1"
        )
        seconds: dict[str, list[float]] = {"queued": [], "prefilling": [], "decoding": []}
        for _ in range(LEAVES):
            decoding = cluster.connect(request().partition(b"\r\n\r\n")[2])
            assert b"200 OK" in decoding.recv(65536)
            queued = cluster.connect(request().partition(b"\r\n\r\n")[2])
            wait_until(lambda: worker.inflight == 2, "it never reached the worker")
            seconds["queued"].append(time_to_cancel(worker, queued.close))
            seconds["decoding"].append(time_to_cancel(worker, decoding.close))
            prefilling = cluster.connect(request().partition(b"\r\n\r\n")[2])
            wait_until(lambda: worker.inflight == 1, "it never reached the worker")
            seconds["prefilling"].append(time_to_cancel(worker, prefilling.close))
            wait_until(lambda: is_quiet(cluster, worker), "the engine goes on")
        for phase, times in seconds.items():
            print(f"cancelled while {phase}: median {statistics.median(times) * 1000:.1f} ms, at most {max(times) * 1000:.1f} ms")  # fmt: skip
        assert max(map(statistics.median, seconds.values())) < FREED_S


def test_disconnected_client_frees_the_prefill_engine(tmp_path: Path) -> None:
    with serving(tmp_path) as cluster:
        # One slot; a prompt takes 16.7 ms / 0.01 = 1.7 s.
        prefill = WorkerProcess(
            cluster, "--disaggregation-mode", "prefill", "--speedup-ratio", "0.01", "--max-num-seqs", "1"
        )
        decode = WorkerProcess(cluster, "--disaggregation-mode", "decode", "--speedup-ratio", "0")
        wait_until(lambda: cluster.post(CHAT).status_code == 200, "the roles do not work together")
        before = decode.metric("dynamo_component_requests_total")
        seconds: dict[str, list[float]] = {"queued": [], "running": []}
        for _ in range(LEAVES):
            running = cluster.connect(request().partition(b"\r\n\r\n")[2])
            wait_until(lambda: prefill.inflight == 1, "it never reached the worker")
            queued = cluster.connect(request().partition(b"\r\n\r\n")[2])
            wait_until(lambda: prefill.inflight == 2, "it never reached the worker")
            seconds["queued"].append(time_to_free(prefill, queued.close))
            seconds["running"].append(time_to_free(prefill, running.close))
            wait_until(lambda: is_quiet(cluster, prefill), "the engine goes on")
        print({phase: f"{statistics.median(times) * 1000:.1f} ms" for phase, times in seconds.items()})
        assert max(map(statistics.median, seconds.values())) < FREED_S
        assert decode.metric("dynamo_component_requests_total") == before, (
            "a decode worker was sent a cancelled request"
        )


def time_to_free(worker: WorkerProcess, leave: Callable[[], object]) -> float:
    """Return the seconds from the client's disconnect until the worker has one request less."""
    before, begun = worker.inflight, time.monotonic()
    leave()
    while worker.inflight >= before:
        assert time.monotonic() < begun + DEADLINE_S, "the request goes on"
    return time.monotonic() - begun


def test_connection_reset_in_a_stream_cancels_the_request(tmp_path: Path) -> None:
    with serving(tmp_path) as cluster:
        worker = WorkerProcess(cluster, *PACED, "--max-num-seqs", "1")
        clients = [cluster.connect(request().partition(b"\r\n\r\n")[2]) for _ in range(3)]
        wait_until(lambda: worker.inflight == 3, "they never reached the worker")
        wait_until(lambda: cluster.metric("dynamo_frontend_queued_requests") == 2, "none of them has begun")
        for client in reversed(clients):
            Reset(client)
        wait_until(lambda: is_quiet(cluster, worker), "something is left over")
        assert worker.metric("dynamo_component_cancellation_total") == 3
        answers_at_once(cluster)


# A thousand clients
# ----------------------------------------------------------------------------------------------------


async def connect_and_leave(port: int, dice: random.Random) -> None:
    """Run one client that disconnects at a random point in a random way."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = request(max_tokens=dice.choice((5, 50, 2000)), stream=dice.random() < 0.8)
    phase = dice.choice(("connected", "half the head", "half the body", "sent", "first token", "in the middle"))
    try:
        if phase == "half the head":
            writer.write(data[: dice.randrange(1, data.index(b"\r\n\r\n"))])
        elif phase == "half the body":
            writer.write(data[: dice.randrange(data.index(b"\r\n\r\n") + 4, len(data) - 1)])
        elif phase != "connected":
            writer.write(data)
        if phase in {"first token", "in the middle"} and b'"stream": true' in data:
            tail, pieces = b"", 1 if phase == "first token" else dice.randrange(2, 20)
            while pieces and tail != b"0\r\n\r\n":
                tail, pieces = (tail + await reader.read(65536))[-5:], pieces - 1
        await asyncio.sleep(dice.random() * 0.03)
        if dice.random() < 0.5:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    finally:
        writer.close()


async def workers_start_and_stop(port: int) -> None:
    space = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with space:
            await connect_and_leave(port, random.Random(f"{SEED} {number}"))

    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(one(number) for number in range(CLIENTS)))


def test_thousand_disconnected_clients_leave_no_state(tmp_path: Path) -> None:
    with serving(tmp_path) as cluster:
        worker = WorkerProcess(cluster, *PACED)
        answers_at_once(cluster)
        wait_until(lambda: is_quiet(cluster, worker), "it does not come to rest")
        pids = (cluster.frontend.pid, worker.process.pid)
        before = [open_files(pid) for pid in pids]

        begun_at = time.monotonic()
        asyncio.run(workers_start_and_stop(cluster.port))
        left_at = time.monotonic()
        answers_at_once(cluster)
        wait_until(lambda: is_quiet(cluster, worker), "something is left over")
        quiet_s = time.monotonic() - left_at
        wait_until(lambda: [open_files(pid) for pid in pids] <= before, "connections are left open")
        cancelled = worker.metric("dynamo_component_cancellation_total")
        print(f"{CLIENTS} clients left within {left_at - begun_at:.1f} s: "
              f"{cancelled:.0f} cancelled at the worker, all quiet {quiet_s:.2f} s after the last")  # fmt: skip
        assert cancelled > CLIENTS / 10, "they did not leave in the middle"
        assert cluster.metric("dynamo_frontend_queued_requests") == 0
        assert worker.metric("dynamo_work_handler_pool_active_tasks") == 0
        assert worker.metric("dynamo_work_handler_queue_depth") == 0
        assert worker.metric("vllm:kv_cache_usage_perc") == 0
        assert cluster.post({**CHAT, "max_tokens": 20}).json()["usage"]["completion_tokens"] == 20


# Idle clients -----------------------------------------------------------------------------------------


def read_all(client: socket.socket) -> bytes:
    received = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while data := client.recv(1 << 20):
            received += data
    return bytes(received)


def is_cut(client: socket.socket) -> bool:
    """Return whether the connection is closed; a client that had begun a request received the reason."""
    client.settimeout(DEADLINE_S)
    try:
        while client.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def test_incomplete_requests_are_closed_and_do_not_delay_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_HTTP_REQUEST_ARRIVAL_TIMEOUT_SECS", "1")
    with serving(tmp_path) as cluster:
        worker = WorkerProcess(cluster, *PACED)
        answers_at_once(cluster)
        before = open_files(cluster.frontend.pid)
        data = request()
        silent, halves, dribbling = [], [], []
        for _ in range(50):
            silent.append(socket.create_connection(("127.0.0.1", cluster.port), timeout=DEADLINE_S))
            halves.append(socket.create_connection(("127.0.0.1", cluster.port), timeout=DEADLINE_S))
            halves[-1].sendall(data[:-20])
            dribbling.append(socket.create_connection(("127.0.0.1", cluster.port), timeout=DEADLINE_S))
            dribbling[-1].sendall(b"POST /v1/chat/completions HTTP/1.1\r\n")
        everyone = silent + halves + dribbling
        wait_until(lambda: open_files(cluster.frontend.pid) >= before + len(everyone), "they never arrived")
        answers_at_once(cluster)

        def all_cut() -> bool:
            for number, client in enumerate(dribbling):
                try:
                    client.sendall(b"x-header-%d: y\r\n" % number)
                except OSError:
                    continue
            return open_files(cluster.frontend.pid) <= before

        wait_until(all_cut, "they are waited for")
        assert all(is_cut(client) for client in everyone)
        for client in everyone:
            client.close()
        assert worker.metric("dynamo_component_requests_total") == 2
        answers_at_once(cluster)


def test_client_that_never_reads_is_disconnected_with_bounded_memory(tmp_path: Path) -> None:
    with serving(tmp_path) as cluster:
        worker = WorkerProcess(cluster, "--speedup-ratio", "2")
        # 128 events of 200 bytes in each step of 3 ms.
        body = {"model": "m", "prompt": ["x"] * 128, "max_tokens": 1900, "stream": True, "ignore_eos": True}
        content = json.dumps(body).encode()
        answers_at_once(cluster)
        before_mb = resident_mb(cluster.frontend.pid)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", cluster.port))
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content)
        )
        peak_mb = 0.0

        def is_noticed() -> bool:
            nonlocal peak_mb
            peak_mb = max(peak_mb, resident_mb(cluster.frontend.pid) - before_mb)
            return cluster.metric("dynamo_frontend_model_cancellation_total", endpoint="completions") == 1

        wait_until(is_noticed, "it is written to for ever")
        print(f"a client that never reads: the frontend grew by at most {peak_mb:.1f} MB before it was cut")
        assert peak_mb < UNREAD_MB
        wait_until(lambda: is_quiet(cluster, worker), "the engine goes on")
        client.setblocking(True)
        assert not read_all(client).endswith(b"0\r\n\r\n"), "it was not cut"
        client.close()
        answers_at_once(cluster)
