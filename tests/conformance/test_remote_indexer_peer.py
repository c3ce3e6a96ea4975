"""A served index between the implementations: a released router queries ours, and ours queries a released one."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from benchmarks.corpus import bench_model
from tests.cluster.peers import require_peer

from dynamo.core.errors import DynamoException
from dynamo.runtime.distributed import DistributedRuntime

pytestmark = pytest.mark.conformance

TIMEOUT_S = 60.0
PROMPT = list(range(100))
ROUTER = ("-m", "dynamo.router", "--endpoint", "dynamo.backend.generate", "--router-block-size", "16")


@pytest.fixture(scope="module", autouse=True)
def peer() -> str:
    return require_peer()


@contextlib.asynccontextmanager
async def process(*command: str) -> AsyncIterator[None]:
    made = await asyncio.create_subprocess_exec(*command, env={**os.environ, "HOME": os.environ["DYN_FILE_KV"]})
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            made.terminate()
        await made.wait()


async def overlaps(runtime: DistributedRuntime, namespace: str) -> list[int]:
    """Return the blocks that a router attributes to the workers; empty while it has no index."""
    client = await runtime.endpoint(f"{namespace}.router.get_overlap_scores").client()
    try:
        stream = await client.generate({"token_ids": PROMPT}, annotated=False)
        (table,) = [answer async for answer in stream]
    except DynamoException:
        return []
    finally:
        await client.close()
    return [row["device_blocks"] for row in table["workers"]]


@pytest.mark.parametrize("serves", ["theirs", "ours"])
async def test_frontend_routes_with_the_index_of_the_other_implementation(
    peer: str, serves: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "DYN_FILE_KV": str(tmp_path / "kv"),
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "DYN_LOG": "error",
    }.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "kv").mkdir()
    server, asker = (peer, sys.executable) if serves == "theirs" else (sys.executable, peer)
    mocker = ("-m", "dynamo.mocker", "--model-path", bench_model(), "--model-name", "m", "--discovery-backend", "file")
    runtime = DistributedRuntime(None, "file", "tcp")
    try:
        async with process(sys.executable, *mocker, "--block-size", "16", "--speedup-ratio", "0"):
            worker = await runtime.endpoint("dynamo.backend.generate").client()
            await worker.wait_for_instances(TIMEOUT_S)
            async with process(server, *ROUTER, "--serve-indexer"):
                await until_held(runtime, worker, 6)
            # Both routers have the same name, so each is queried through its own endpoint.
            async with process(server, *ROUTER, "--serve-indexer"):
                client = await runtime.endpoint("dynamo.backend.kv_indexer_query").client()
                await client.wait_for_instances(TIMEOUT_S)
                routers = await runtime.endpoint("dynamo.router.get_overlap_scores").client()
                await routers.wait_for_instances(TIMEOUT_S)
                (serving,) = routers.instance_ids()
                async with process(asker, *ROUTER, "--use-remote-indexer"):
                    deadline = time.monotonic() + TIMEOUT_S
                    found: list[int] = []
                    while found != [6]:
                        assert time.monotonic() < deadline, f"the one that asks says {found}"
                        await asyncio.sleep(0.2)
                        for one in routers.instance_ids():
                            if one != serving:
                                found = await of_instance(routers, one)
    finally:
        await runtime.shutdown(drain_timeout_s=0.0)


async def until_held(runtime: DistributedRuntime, worker: object, blocks: int) -> None:
    """Send the prompt once, and wait until a router has its blocks."""
    client = await runtime.endpoint("dynamo.router.generate").client()
    await client.wait_for_instances(TIMEOUT_S)
    deadline = time.monotonic() + TIMEOUT_S
    request = {
        "model": "m", "token_ids": PROMPT, "stop_conditions": {"max_tokens": 2}, "sampling_options": {},
        "output_options": {}, "eos_token_ids": [], "annotations": [],
    }  # fmt: skip
    while await overlaps(runtime, "dynamo") != [blocks]:
        assert time.monotonic() < deadline, "the router never knew who holds the prompt"
        with contextlib.suppress(DynamoException):
            stream = await client.generate(request, annotated=False)
            async for _ in stream:
                pass
        await asyncio.sleep(0.2)


async def of_instance(client: object, instance_id: int) -> list[int]:
    """Return the blocks of one router."""
    try:
        stream = await client.direct({"token_ids": PROMPT}, instance_id, annotated=False)  # type: ignore[attr-defined]
        (table,) = [answer async for answer in stream]
    except DynamoException:
        return []
    return [row["device_blocks"] for row in table["workers"]]
