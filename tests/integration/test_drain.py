"""Drain and resume of a worker process over its system port: requests in flight complete, and it serves again."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.ports import free_port

from dynamo.core.errors import WorkerUnavailable
from dynamo.protocols.engine import PreprocessedRequest, SamplingOptions, StopConditions
from dynamo.runtime.client import Client
from dynamo.runtime.distributed import DistributedRuntime

pytestmark = pytest.mark.integration

TIMEOUT_S = 60.0  # For operations that take a second on an idle machine.


def http(path: str, method: str = "GET") -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(f"http://127.0.0.1:{os.environ['DYN_SYSTEM_PORT']}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


async def control(name: str, method: str = "POST") -> dict[str, Any]:
    status, answer = await asyncio.to_thread(http, f"/engine/{name}", method)
    assert status == 200, answer
    return answer


async def until(is_true: Callable[[], Awaitable[bool]]) -> None:
    """Poll another process until a condition holds."""
    async with asyncio.timeout(TIMEOUT_S):
        while not await is_true():  # noqa: ASYNC110 - another process sets no event of ours
            await asyncio.sleep(0.02)


async def until_state(state: str) -> dict[str, Any]:
    async def is_there() -> bool:
        try:
            return bool((await control("status", "GET"))["state"] == state)
        except urllib.error.URLError:  # The system port is not open yet.
            return False

    await until(is_there)
    return await control("status", "GET")


async def until_seen(client: Client, ids: set[int]) -> None:
    async def is_seen() -> bool:
        return set(client.instance_ids()) == ids

    await until(is_seen)


async def send_request(client: Client, max_tokens: int, first: asyncio.Event | None = None) -> int:
    stop = StopConditions(max_tokens=max_tokens, ignore_eos=True)
    request = PreprocessedRequest("m", [5, 6, 7], stop, SamplingOptions(temperature=0.0))
    count = 0
    async with asyncio.timeout(TIMEOUT_S):
        async for item in await client.generate(request, annotated=False):
            count += len(item["token_ids"])
            if first is not None:
                first.set()
    return count


@contextlib.asynccontextmanager
async def worker(*command: str, instances: int = 1) -> AsyncIterator[Client]:
    process = subprocess.Popen([sys.executable, "-m", *command, "--discovery-backend=file"])  # noqa: ASYNC220
    runtime = DistributedRuntime()
    try:
        client = await runtime.endpoint("dynamo.backend.generate").client()

        async def is_up() -> bool:
            assert process.poll() is None, "the worker ended"
            return len(client.instance_ids()) == instances

        await until(is_up)
        await until_state("serving")
        yield client
    finally:
        process.kill()
        process.wait()
        await runtime.shutdown()


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path / "kv"))
    monkeypatch.setenv("DYN_LOG", "warn")
    for name in ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setenv("DYN_SYSTEM_PORT", str(free_port()))


@pytest.mark.parametrize(
    ("command", "instances", "tokens"),
    [
        (("dynamo.mocker", "--model-name=m", "--num-workers=2"), 2, 120),
        (("dynamo.cpu", "--model-name=m"), 1, 100),
    ],
)
async def test_running_requests_finish_and_a_resumed_worker_serves(
    command: tuple[str, ...], instances: int, tokens: int
) -> None:
    async with worker(*command, instances=instances) as client:
        first = asyncio.Event()
        running = asyncio.create_task(send_request(client, tokens, first))
        await asyncio.wait_for(first.wait(), TIMEOUT_S)
        ids = set(client.instance_ids())

        answer = await control("drain")
        assert (answer["state"], answer["discovery_registered"]) in [("draining", False), ("drained", False)]
        assert await running == tokens
        drained = await until_state("drained")
        assert (drained["inflight_requests"], drained["safe_to_delete"]) == (0, True)
        assert (await asyncio.to_thread(http, "/health"))[0] == 503
        await until_seen(client, set())
        with pytest.raises(WorkerUnavailable):
            await send_request(client, 1)

        assert (await control("resume"))["state"] == "serving"
        await until_seen(client, ids)
        assert await send_request(client, 3) == 3
        assert (await asyncio.to_thread(http, "/health"))[0] == 200
