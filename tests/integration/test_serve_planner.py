"""`dynamo serve --planner`: real worker processes start and stop with the load, and no request fails."""

import asyncio
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.cluster.processes import wait_until
from tests.integration.test_serve import Server

pytestmark = pytest.mark.integration

SCALING_S = 60.0
SETTINGS = """{"optimization_target": "load", "load_adjustment_interval_seconds": 1,
 "decode_scale_up_kv_rate": 60, "decode_scale_down_kv_rate": 10,
 "prefill_scale_up_queue_tokens": 2000, "prefill_scale_down_queue_tokens": 100}"""
"""Thresholds that one busy worker of `MOCKER` exceeds, with a decision each second."""
MOCKER = ("--engine", "mocker", "--num-gpu-blocks-override", "128", "--block-size", "16", "--max-num-seqs", "8")


@pytest.fixture
def server(tmp_path: Path) -> Any:
    server = Server(tmp_path, *MOCKER, "--planner", SETTINGS, "--max-workers", "3", "--migration-limit", "3")
    try:
        yield server.ready()
    finally:
        server.close()


def planner(server: Server) -> dict[str, Any]:
    answer = httpx.get(f"{server.url}/v1/planner", timeout=SCALING_S)
    assert answer.status_code == 200, answer.text
    (found,) = answer.json()["planners"]
    return dict(found)


def workers(server: Server) -> int:
    instances = httpx.get(f"{server.url}/health", timeout=SCALING_S).json()["instances"]
    return sum(instance["endpoint"] == "generate" for instance in instances)


async def load(url: str, until: asyncio.Event, words: int = 120, max_tokens: int = 40) -> list[int]:
    """Keep 40 chats in progress until the event; return their statuses."""
    statuses: list[int] = []

    async def chats(client: httpx.AsyncClient, number: int) -> None:
        turn = 0
        while not until.is_set():
            turn += 1
            text = f"{number} {turn} " + "word " * words
            answer = await client.post(
                f"{url}/v1/chat/completions",
                json={"model": "demo_model", "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens},
            )
            statuses.append(answer.status_code)

    async with httpx.AsyncClient(timeout=SCALING_S) as client:
        await asyncio.gather(*(chats(client, number) for number in range(40)))
    return statuses


async def until_workers(server: Server, wanted: int) -> None:
    deadline = time.monotonic() + SCALING_S
    while (found := await asyncio.to_thread(workers, server)) != wanted:
        assert time.monotonic() < deadline, f"{found} workers, not {wanted}:\n{server.text()}\n{planner(server)}"
        await asyncio.sleep(0.2)


def test_workers_follow_the_load_up_and_down_and_no_request_fails(server: Server) -> None:
    async def scenario() -> list[int]:
        enough = asyncio.Event()
        loading = asyncio.create_task(load(server.url, enough))
        await until_workers(server, 3)
        enough.set()
        statuses = await loading
        await until_workers(server, 1)
        return statuses

    statuses = asyncio.run(scenario())
    assert len(statuses) > 40
    assert set(statuses) == {200}
    assert re.search(r"Scaling from 1 to 2 workers: the load exceeds", server.text()), server.text()
    server.until("Scaling from 2 to 1 worker: fewer workers")  # The line follows the stop of the worker.
    shown = planner(server)
    assert shown["limits"]["max_gpu_budget"] == 3
    assert {one["outcome"] for one in shown["decisions"] if "scale_to" in one} >= {"accepted"}


def test_killed_worker_is_restarted_and_its_requests_migrate(server: Server) -> None:
    async def scenario() -> list[int]:
        enough = asyncio.Event()
        loading = asyncio.create_task(load(server.url, enough))
        await until_workers(server, 2)
        os.kill(pid_of_worker(server), signal.SIGKILL)
        await asyncio.to_thread(server.until, "was killed by SIGKILL; restarting it")
        await until_workers(server, 3)
        enough.set()
        return await loading

    assert set(asyncio.run(scenario())) == {200}


def test_requests_in_the_routers_queue_add_a_worker(tmp_path: Path) -> None:
    """The worker has room for 8,192 tokens and holds three prompts of 420 at most; the others wait in the router."""
    settings = """{"optimization_target": "load", "load_adjustment_interval_seconds": 1,
     "decode_scale_up_kv_rate": 80, "decode_scale_down_kv_rate": 1,
     "prefill_scale_up_queue_tokens": 4000, "prefill_scale_down_queue_tokens": 100}"""
    flags = ("--engine", "mocker", "--num-gpu-blocks-override", "512", "--block-size", "16", "--speedup-ratio", "0.2")
    flags += ("--max-num-batched-tokens", "512")
    server = Server(tmp_path, *flags, "--router-mode", "kv", "--planner", settings, "--max-workers", "2")
    try:
        server.ready()

        async def scenario() -> list[int]:
            enough = asyncio.Event()
            loading = asyncio.create_task(load(server.url, enough, words=400, max_tokens=2))
            await until_workers(server, 2)
            enough.set()
            return await loading

        assert set(asyncio.run(scenario())) == {200}
        server.until("Scaling from 1 to 2 workers: the load exceeds")
    finally:
        server.close()


def pid_of_worker(server: Server) -> int:
    """Return the process id of a child that is a mocker."""
    found = pid_of(server, "dynamo.mocker")
    assert found is not None
    return found


def pid_of(server: Server, module: str) -> int | None:
    """Return the process id of a child that runs a module; None while there is none."""
    return next((pid for pid, command in server.children().items() if module in command), None)


def test_killed_planner_is_restarted_for_the_namespace_of_the_workers(tmp_path: Path) -> None:
    server = Server(tmp_path, *MOCKER, "--namespace", "blue", "--planner", SETTINGS, "--max-workers", "2")
    try:
        url = f"{server.ready().url}/v1/planner"
        wait_until(
            lambda: httpx.get(url, timeout=SCALING_S).status_code == 200, "the planner never registered", SCALING_S
        )
        assert planner(server)["namespace"] == "blue"
        first, mocker = pid_of(server, "dynamo.planner"), pid_of_worker(server)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        server.until("planner was killed by SIGKILL; restarting it")

        def has_returned() -> bool:
            found = httpx.get(url, timeout=SCALING_S).json().get("planners", [])
            is_there = any(one.get("ticks") is not None for one in found)
            return is_there and pid_of(server, "dynamo.planner") not in (None, first)

        wait_until(has_returned, "the planner did not return", SCALING_S)
        assert pid_of_worker(server) == mocker
    finally:
        server.close()


def test_graph_ends_with_all_of_its_workers(server: Server) -> None:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    assert len(children) == 3  # Worker, frontend and planner.
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(SCALING_S) == 0
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "a process outlived its graph")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--planner"], "error: --max-workers: missing; required with --planner"),
        (["--max-workers", "2"], "error: --max-workers 2: requires --planner"),
        (
            ["--planner", "--max-workers", "0"],
            "error: --max-workers 0: must be from 1, the workers of the start, to 64",
        ),
        (["--planner", '{"ttft": -1}', "--max-workers", "2"], "error: --planner: ttft_ms: -1"),
        (["--planner", "absent.yaml", "--max-workers", "2"], "error: --planner: "),
    ],
)
def test_invalid_setting_is_an_error_of_one_line(tmp_path: Path, argv: list[str], message: str) -> None:
    server = Server(tmp_path, "--engine", "mocker", *argv)
    assert server.process.wait(SCALING_S) == 2
    lines = server.text().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(message)


def test_planner_route_without_planner_returns_how_to_start_one(tmp_path: Path) -> None:
    server = Server(tmp_path, "--engine", "mocker")
    try:
        answer = httpx.get(f"{server.ready().url}/v1/planner")
        assert answer.status_code == 404
        assert "dynamo serve --planner" in answer.json()["error"]["message"]
    finally:
        server.close()
