"""Clients that disconnect, stall, flood or never read: other clients are not affected, and no state is left."""

import asyncio
import contextlib
import json
import random
import socket
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

FIRST_TOKENS = "vllm:time_to_first_token_seconds_count"


def cancels(worker: WorkerProcess, leave: Callable[[], object]) -> None:
    """Disconnect a client and wait until the worker has one cancelled request more."""
    name = "dynamo_component_cancellation_total"
    before = worker.metric(name)
    leave()
    wait_until(lambda: worker.metric(name) > before, "the worker never heard of it")


def test_disconnect_in_any_phase_cancels_the_request_at_the_worker(tmp_path: Path) -> None:
    with serving(tmp_path) as cluster:
        # One slot; a prompt takes 16.7 ms / 0.005 = 3.3 s, 2000 tokens of 5.7 ms take 11 s.
        worker = WorkerProcess(
            cluster, "--speedup-ratio", "0.005", "--decode-speedup-ratio", "200", "--max-num-seqs", "1"
        )
        decoding = cluster.connect(request().partition(b"\r\n\r\n")[2])
        wait_until(lambda: worker.metric(FIRST_TOKENS) == 1, "it never began")
        queued = cluster.connect(request().partition(b"\r\n\r\n")[2])
        wait_until(lambda: worker.inflight == 2, "it never reached the worker")
        cancels(worker, queued.close)
        assert worker.inflight == 1, "it was cancelled only after the request before it"
        cancels(worker, decoding.close)
        wait_until(lambda: is_quiet(cluster, worker), "the engine goes on")
        prefilling = cluster.connect(request().partition(b"\r\n\r\n")[2])
        wait_until(lambda: worker.inflight == 1, "it never reached the worker")
        cancels(worker, prefilling.close)
        assert worker.metric(FIRST_TOKENS) == 1, "it was cancelled only after its prefill"
        wait_until(lambda: is_quiet(cluster, worker), "the engine goes on")


def test_disconnected_client_frees_the_prefill_engine(tmp_path: Path) -> None:
    with serving(tmp_path) as cluster:
        # One slot; a prompt takes 16.7 ms / 0.004 = 4.2 s.
        prefill = WorkerProcess(
            cluster, "--disaggregation-mode", "prefill", "--speedup-ratio", "0.004", "--max-num-seqs", "1"
        )
        decode = WorkerProcess(cluster, "--disaggregation-mode", "decode", "--speedup-ratio", "0")
        wait_until(lambda: cluster.post(CHAT).status_code == 200, "the roles do not work together")
        before, prefilled = decode.metric("dynamo_component_requests_total"), prefill.metric(FIRST_TOKENS)
        assert prefilled > 0
        running = cluster.connect(request().partition(b"\r\n\r\n")[2])
        wait_until(lambda: prefill.inflight == 1, "it never reached the worker")
        queued = cluster.connect(request().partition(b"\r\n\r\n")[2])
        wait_until(lambda: prefill.inflight == 2, "it never reached the worker")
        cancels(prefill, queued.close)
        cancels(prefill, running.close)
        assert prefill.inflight == 0
        assert prefill.metric(FIRST_TOKENS) == prefilled, "they were cancelled only after a prefill"
        wait_until(lambda: is_quiet(cluster, prefill), "the engine goes on")
        assert decode.metric("dynamo_component_requests_total") == before, (
            "a decode worker was sent a cancelled request"
        )


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

    async with asyncio.timeout(3 * DEADLINE_S):
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
        assert cluster.post(CHAT).status_code == 200
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
