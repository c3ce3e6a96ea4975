"""Upstream's router and indexers in Python, over planes in memory."""

import asyncio
import gc
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.cluster.memory import MemoryCluster
from tests.settle import until

from dynamo.core.clock import ManualClock
from dynamo.core.errors import InvalidArgument, NotReady
from dynamo.llm import (
    ApproxKvIndexer,
    KvEventPublisher,
    KvIndexer,
    KvRouter,
    KvRouterConfig,
    LoadThresholdConfig,
    RoutingConstraints,
    compute_block_hash_for_seq,
)
from dynamo.runtime import Endpoint

BLOCK = 4
PROMPT = list(range(1, 23))
PATH = "dynamo.backend.generate"
TIMEOUT_S = 10.0


class KvRouterHarness(MemoryCluster):
    """Two workers that return the requested rank, and a runtime that calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: list[int] = []
        self.seen: list[tuple[int, dict[str, Any]]] = []

    async def worker(self) -> KvEventPublisher:
        runtime = self.runtime()
        endpoint = runtime.endpoint(PATH)
        worker_id = endpoint.connection_id()

        async def generate(request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
            self.seen.append((worker_id, request))
            for token in range(request["stop_conditions"]["max_tokens"]):
                yield {"token_ids": [token], "index": 0}
            yield {"token_ids": [], "finish_reason": "length"}

        self.workers.append(worker_id)
        runtime.tasks.start(endpoint.serve_endpoint(generate), "serve")
        return KvEventPublisher(endpoint, kv_block_size=BLOCK, enable_local_indexer=True)

    async def close(self) -> None:
        await self.shutdown()


@pytest.fixture
async def harness() -> AsyncIterator[KvRouterHarness]:
    made = KvRouterHarness()
    yield made
    await made.close()


async def router_of(
    harness: KvRouterHarness, workers: int = 2, config: KvRouterConfig | None = None, **more: Any
) -> KvRouter:
    router = KvRouter(harness.runtime().endpoint(PATH), BLOCK, config or KvRouterConfig(), **more)
    core = await router.ready()
    await until(lambda: len(core.client.instance_ids()) == workers)
    return router


def stored(publisher: KvEventPublisher, tokens: list[int]) -> None:
    whole = len(tokens) // BLOCK
    publisher.publish_stored(tokens, [BLOCK] * whole, list(range(100, 100 + whole)))


async def test_prompt_is_routed_to_the_worker_that_caches_its_prefix(harness: KvRouterHarness) -> None:
    await harness.worker()
    second = await harness.worker()
    router = await router_of(harness)
    stored(second, PROMPT)
    core = router.core
    await until(lambda: core.kv.machine.index.held(harness.workers[1]) == 5)
    assert await router.best_worker(PROMPT) == (harness.workers[1], 0, 5)
    scores = await router.get_overlap_scores(PROMPT)
    assert scores["num_blocks"] == 5
    by_worker = {row["worker_id"]: row["device_blocks"] for row in scores["workers"]}
    assert by_worker == {harness.workers[0]: 0, harness.workers[1]: 5}
    assert scores["workers"][0].keys() >= {"host_pinned_blocks", "disk_blocks", "host_pinned_extension_blocks"}
    dumped = json.loads(await router.dump_events())
    assert [len(one["event"]["data"]["stored"]["blocks"]) for one in dumped] == [5]


async def test_load_without_a_response_buffer_follows_the_reader(harness: KvRouterHarness) -> None:
    await harness.worker()
    router = await router_of(harness, 1)

    async def load() -> tuple[int, int]:
        (row,) = await router.get_potential_loads(PROMPT)
        return row["active_requests"], row["potential_prefill_tokens"]

    idle = await load()
    stream = await router.generate(PROMPT, "m", stop_conditions={"max_tokens": 2}, response_buffer_size=0)
    await until(lambda: stream._is_over)
    assert await load() == (1, idle[1] + len(PROMPT))
    await anext(stream)
    assert await load() == (1, idle[1])
    assert [output async for output in stream]
    assert await load() == idle
    unread = [await router.generate(PROMPT, "m", stop_conditions={"max_tokens": 2}, response_buffer_size=0)]
    await until(lambda: unread[0]._is_over)
    assert (await load())[0] == 1
    unread.clear()
    gc.collect()  # The calls of the plane in memory refer to each other.
    assert await load() == idle


async def test_calls_wait_until_the_initial_workers_have_registered(
    harness: KvRouterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_ROUTER_MIN_INITIAL_WORKERS", "2")
    router = KvRouter(harness.runtime().endpoint(PATH), BLOCK, KvRouterConfig())
    requested = asyncio.ensure_future(router.get_potential_loads(PROMPT))
    await harness.worker()
    await until(lambda: router.core._client is not None and router.core.client.instance_ids() != [])
    assert not requested.done()
    await harness.worker()
    assert {row["worker_id"] for row in await asyncio.wait_for(requested, TIMEOUT_S)} == set(harness.workers)


async def test_response_of_the_chosen_worker_removes_its_load_at_the_end(harness: KvRouterHarness) -> None:
    await harness.worker()
    router = await router_of(harness, 1)
    stream = await router.generate(PROMPT, "m", stop_conditions={"max_tokens": 2}, extra_args={"x": 1})
    assert (await router.get_potential_loads(PROMPT))[0]["active_requests"] == 1
    outputs = [output async for output in stream]
    assert [output["token_ids"] for output in outputs] == [[0], [1], []]
    assert outputs[0]["routing_data"]["worker_id"]["decode_worker_id"] == harness.workers[0]
    assert "routing_data" not in outputs[1]
    timing = outputs[2]["routing_data"]["timing"]
    assert timing["prefill_wait_time_ms"] + timing["prefill_time_ms"] == pytest.approx(timing["ttft_ms"])
    assert timing["ttft_ms"] <= timing["total_time_ms"]
    assert (timing["kv_hit_rate"], timing["router_queue_depth"]) == (0, 0)
    loads = await router.get_potential_loads(PROMPT)
    assert loads == [
        {
            "worker_id": harness.workers[0],
            "dp_rank": 0,
            "potential_prefill_tokens": 22,
            "potential_decode_blocks": 5,
            "active_requests": 0,
        }
    ]
    _, request = harness.seen[0]
    assert request["routing"]["dp_rank"] == 0
    assert request["extra_args"] == {"x": 1}
    assert request["stop_conditions"]["max_tokens"] == 2


async def test_abandoned_response_leaves_no_load(harness: KvRouterHarness) -> None:
    await harness.worker()
    router = await router_of(harness, 1)
    stream = await router.generate_from_request(
        {"model": "m", "token_ids": PROMPT, "stop_conditions": {"max_tokens": 3}}
    )
    await stream.aclose()
    assert (await router.get_potential_loads(PROMPT))[0]["active_requests"] == 0


async def test_request_sent_by_the_caller_is_counted_until_freed(harness: KvRouterHarness) -> None:
    await harness.worker()
    router = await router_of(harness, 1)
    await router.best_worker(PROMPT, request_id="a")
    loads = (await router.get_potential_loads(PROMPT))[0]
    assert (loads["potential_prefill_tokens"], loads["potential_decode_blocks"]) == (44, 5)
    with pytest.raises(InvalidArgument, match="already"):
        await router.best_worker(PROMPT, request_id="a")
    await router.mark_prefill_complete("a")
    assert (await router.get_potential_loads(PROMPT))[0]["potential_prefill_tokens"] == 22
    await router.free("a")
    assert (await router.get_potential_loads(PROMPT))[0]["active_requests"] == 0
    for gone in (router.free("a"), router.mark_prefill_complete("a")):
        with pytest.raises(InvalidArgument, match="not found"):
            await gone


async def test_pinned_workers_and_constraints_are_respected(harness: KvRouterHarness) -> None:
    await harness.worker()
    await harness.worker()
    router = await router_of(harness)
    for worker in harness.workers:
        stream = await router.generate(PROMPT, "m", stop_conditions={"max_tokens": 1}, worker_id=worker, dp_rank=0)
        assert [output["token_ids"] async for output in stream] == [[0], []]
    assert [worker for worker, _ in harness.seen] == harness.workers
    with pytest.raises(InvalidArgument):
        await router.generate(PROMPT, "m", worker_id=1)
    with pytest.raises(NotReady, match="lacks gold"):
        await router.best_worker(PROMPT, routing_constraints=RoutingConstraints({"gold"}))
    with pytest.raises(InvalidArgument, match="invalid request"):
        await router.generate_from_request({"token_ids": "x"})
    with pytest.raises(ValueError, match="response_buffer_size"):
        await router.generate(PROMPT, "m", response_buffer_size=-1)


async def test_prompts_with_different_images_have_different_hashes(harness: KvRouterHarness) -> None:
    await harness.worker()
    router = await router_of(harness, 1, KvRouterConfig(use_kv_events=False))
    cat = [{"mm_objects": [{"mm_hash": 5, "offsets": [[0, 2]]}]}]
    dog = [{"mm_objects": [{"mm_hash": 6, "offsets": [[0, 2]]}]}]
    await router.best_worker(PROMPT, update_indexer=True, block_mm_infos=cat)
    assert (await router.best_worker(PROMPT, block_mm_infos=cat))[2] == 5
    assert (await router.best_worker(PROMPT, block_mm_infos=dog))[2] == 0
    stream = await router.generate(PROMPT, "m", stop_conditions={"max_tokens": 1}, block_mm_infos=dog)
    assert [output async for output in stream]
    assert (await router.best_worker(PROMPT, block_mm_infos=dog))[2] == 5
    assert (await router.best_worker(PROMPT))[2] == 0


async def test_invalid_router_settings_are_refused_by_name(harness: KvRouterHarness) -> None:
    endpoint = harness.runtime().endpoint(PATH)
    with pytest.raises(ValueError, match="block_size"):
        KvRouter(endpoint, 0, KvRouterConfig())
    with pytest.raises(ValueError, match="backend, system, model"):
        KvRouter(endpoint, 16, KvRouterConfig(router_prefill_load_model="ais"), {"x": 1})
    with pytest.raises(ValueError, match="session_affinity_mode"):
        KvRouter(endpoint, 16, KvRouterConfig(), session_affinity_mode="warm")
    with pytest.raises(ValueError, match="session-affinity-ttl"):
        KvRouter(endpoint, 16, KvRouterConfig(), session_affinity_ttl_secs=0)
    thresholds = LoadThresholdConfig(active_decode_blocks_threshold=7.0)
    with pytest.raises(ValueError, match="active_decode_blocks_threshold"):
        KvRouter(endpoint, 16, KvRouterConfig(), load_threshold_config=thresholds)


async def test_indexer_follows_the_events_of_an_endpoint(harness: KvRouterHarness) -> None:
    publisher = await harness.worker()
    indexer = KvIndexer(harness.runtime().endpoint(PATH), BLOCK)
    await indexer.ready()
    stored(publisher, PROMPT)
    rank = (harness.workers[0], 0)
    await until(lambda: indexer.find_matches_for_request(PROMPT).scores == {rank: 5})
    assert indexer.find_matches(compute_block_hash_for_seq(PROMPT, BLOCK)[:2]).scores == {rank: 2}
    assert indexer.find_matches_for_request(PROMPT, lora_name="l").scores == {}
    assert indexer.block_size() == BLOCK
    publisher.publish_removed([104])
    await until(lambda: indexer.find_matches_for_request(PROMPT).scores == {rank: 4})
    await indexer.close()


async def test_approximate_indexer_entries_expire(harness: KvRouterHarness) -> None:
    clock = ManualClock()
    indexer = ApproxKvIndexer(harness.runtime().endpoint(PATH), BLOCK, 10.0, clock=clock)
    await indexer.process_routing_decision_for_request(PROMPT, 7, 1)
    assert (await indexer.find_matches_for_request(PROMPT)).scores == {(7, 1): 5}
    clock.advance(11.0)
    assert indexer.find_matches_for_request(PROMPT).scores == {}
    assert indexer.block_size() == BLOCK


async def test_router_is_created_in_a_thread_that_the_loop_waits_for() -> None:
    harness = KvRouterHarness()
    await harness.worker()
    endpoint = harness.runtime().endpoint(PATH)
    made: list[KvRouter] = []
    thread = threading.Thread(target=lambda: made.append(KvRouter(endpoint, BLOCK, KvRouterConfig())))
    thread.start()
    thread.join(TIMEOUT_S)
    (router,) = made
    assert (await router.best_worker(PROMPT))[0] == harness.workers[0]
    await harness.close()


def test_router_is_created_in_a_thread_and_used_on_several_loops() -> None:
    loop = asyncio.new_event_loop()

    async def start() -> tuple[KvRouterHarness, Endpoint]:
        harness = KvRouterHarness()
        await harness.worker()
        return harness, harness.runtime().endpoint(PATH)

    async def tokens(router: KvRouter) -> list[list[int]]:
        stream = await router.generate(PROMPT, "m", stop_conditions={"max_tokens": 2})
        return [output["token_ids"] async for output in stream]

    async def ids(endpoint: Endpoint) -> list[int]:
        return await (await endpoint.client()).wait_for_instances(TIMEOUT_S)

    harness, endpoint = loop.run_until_complete(start())
    made: list[KvRouter] = []
    thread = threading.Thread(target=lambda: made.append(KvRouter(endpoint, BLOCK, KvRouterConfig())))
    thread.start()
    thread.join(TIMEOUT_S)
    (router,) = made
    try:
        assert asyncio.run(ids(endpoint)) == harness.workers
        assert [asyncio.run(tokens(router)) for _ in range(2)] == [[[0], [1], []]] * 2
        assert asyncio.run(router.best_worker(PROMPT))[0] == harness.workers[0]
    finally:
        endpoint.runtime.thread.stop()
        loop.run_until_complete(harness.close())
        loop.close()
