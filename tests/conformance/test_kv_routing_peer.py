"""Our KV router on released workers: prompts go to workers that cache them, and missed events are queried."""

import asyncio
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from benchmarks.corpus import bench_model
from benchmarks.peer import peer_python
from benchmarks.stacks import HOST, MODEL_NAME, Recipe, Stack, ours, theirs
from tests.cluster.peers import require_peer

from dynamo.kv_events.subscriber import query_source
from dynamo.kv_router import events
from dynamo.kv_router.config import RoutingConfig
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.kv_events import WorkerKvEvent
from dynamo.routing.kv_push_router import KvPushRouter
from dynamo.runtime.distributed import DistributedRuntime

pytestmark = pytest.mark.conformance

BLOCK = 16
TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def released_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Our frontend and two released mockers."""
    require_peer()
    recipe = Recipe(
        name="kv-theirs", frontend=ours(), engine=theirs(peer_python()), workers=2,
        frontend_flags=("--router-mode", "kv"),
        engine_flags=("--block-size", str(BLOCK), "--num-gpu-blocks-override", "96"),
        variables={"DYN_FILE_KV": str(tmp_path_factory.mktemp("kv"))},
    )  # fmt: skip
    with Stack(recipe, bench_model()) as stack:
        until(lambda: models(stack) == 2, "a worker is missing")
        yield stack


def models(stack: Stack) -> int:
    return len(instances(stack))


def instances(stack: Stack) -> list[int]:
    """Return the ids of the workers behind the frontend."""
    status, health = stack.send_request("GET", "/health")
    return [one["instance_id"] for one in health["instances"]] if status == 200 else []


def until(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def chat(stack: Stack, number: int, worker: int | None = None) -> dict[str, Any]:
    """Return the routing data of a long prompt with that number, and the cached tokens that the worker reported.

    The worker is named in the request where one is given, otherwise the router chooses it.
    """
    named = {} if worker is None else {"backend_instance_id": worker}
    words = " ".join(f"{number} item {number * 1000 + word}" for word in range(20))
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": words}],
        "max_tokens": 2,
        "nvext": {"extra_fields": ["routing", "timing"], **named},
    }
    status, answer = stack.send_request("POST", "/v1/chat/completions", body)
    assert status == 200, answer
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return {**answer["nvext"]["routing"], **answer["nvext"]["timing"], "cached_tokens": cached}


def until_known(stack: Stack, number: int, worker: int) -> None:
    """Send a prompt to a worker until the router has its blocks."""
    until(lambda: chat(stack, number, worker)["kv_hit_rate"] > 0.9, "its blocks are not known")


def metric(stack: Stack, name: str) -> float:
    with urllib.request.urlopen(f"http://{HOST}:{stack.port}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_our_router_sends_prompts_to_the_released_worker_that_caches_them(released_workers: Stack) -> None:
    for number in range(1, 5):
        worker = chat(released_workers, number)["worker_id"]
        until_known(released_workers, number, worker)
        reported = chat(released_workers, number)
        assert reported["worker_id"] == worker
        assert reported["device_blocks"] >= 5
        assert reported["cached_tokens"] >= 5 * BLOCK, "it has what we think it has"


def test_our_router_removes_blocks_that_released_workers_evict(released_workers: Stack) -> None:
    holder = chat(released_workers, 5)["worker_id"]
    until_known(released_workers, 5, holder)
    # The holder's cache has room for eight of them. Between idle workers, the router would choose at random.
    for number in range(100, 120):
        chat(released_workers, number, holder)
    until_known(released_workers, 119, holder)  # So are the holder's earlier events.
    reported = chat(released_workers, 5, holder)
    assert reported["kv_hit_rate"] < 0.5
    assert abs(reported["device_blocks"] * BLOCK - reported["cached_tokens"]) <= BLOCK


async def test_router_recovers_missed_events_from_released_workers(
    released_workers: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_FILE_KV", released_workers.recipe.variables["DYN_FILE_KV"])
    monkeypatch.setenv("DYN_TCP_RPC_HOST", HOST)
    monkeypatch.setenv("DYN_TCP_RESPONSE_STREAM_HOST", HOST)
    runtime = DistributedRuntime()
    router = KvPushRouter(runtime, EndpointId.parse("dynamo.backend.generate"), RoutingConfig(block_size=BLOCK))
    view = router.view
    assert view is not None
    receive_event, is_deaf, missed = view.receive, False, 0

    def sometimes(reported: WorkerKvEvent) -> None:
        nonlocal missed
        if is_deaf:
            missed += 1
        else:
            receive_event(reported)

    monkeypatch.setattr(view, "receive", sometimes)
    await router.start()
    try:

        async def settled() -> bool:
            """Return whether our index equals the state that the workers report."""
            for rank, source in list(view._sources.items()):
                assert source.record is not None
                question = {"worker_id": rank[0], "dp_rank": rank[1], "kind": "recovery"}
                answer = await query_source(runtime, source.record.metadata.recovery_target, question)
                assert answer.dump is not None
                mine = held(events.dump_rank(router.machine.index, *rank, 1))
                if held(answer.dump.events) != mine or not mine:
                    return False
            return len(view._sources) == 2

        async def until_settled(what: str) -> None:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    while not await settled():  # noqa: ASYNC110 - other processes tell it
                        await asyncio.sleep(0.05)
            except TimeoutError:
                raise AssertionError(what) from None

        workers = await asyncio.to_thread(instances, released_workers)

        async def prompts_to_each(first: int, count: int) -> None:
            """Send each worker as many prompts; the router could choose one of them for all."""
            for number in range(first, first + count):
                for worker in workers:
                    await asyncio.to_thread(chat, released_workers, number, worker)

        await prompts_to_each(200, 1)
        await until_settled("what they held before is not known")
        is_deaf = True
        await prompts_to_each(201, 3)
        async with asyncio.timeout(TIMEOUT_S):
            while missed < 6:  # noqa: ASYNC110 - other processes tell it
                await asyncio.sleep(0.02)
        assert not await settled()
        is_deaf = False
        await prompts_to_each(204, 2)
        await until_settled("what was missed is not known")
        assert "dynamo_router_kv_event_gaps_total 0" not in runtime.metrics.render()
        router.machine.validate()
    finally:
        await router.close()
        await runtime.shutdown()


def held(reported: Iterable[WorkerKvEvent]) -> set[int]:
    """Return the remaining blocks after some events."""
    blocks: set[int] = set()
    for one in reported:
        data = one.event.data
        if isinstance(data, str):
            blocks.clear()
        elif data.stored is not None:
            blocks.update(block.block_hash for block in data.stored.blocks)
        elif data.removed is not None:
            blocks.difference_update(data.removed.block_hashes)
    return blocks
