"""A request goes to the worker that caches its prefix, waits while no slot is free, and is removed when it ends."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.cluster.memory import MemoryCluster
from tests.settle import turns

from dynamo.core.clock import ManualClock
from dynamo.core.errors import ConfigError, DynamoException, InvalidArgument, Overloaded
from dynamo.kv_router.config import RoutingConfig
from dynamo.kv_router.hicache import RUNTIME_KEY, ObjectEvent, page_names
from dynamo.kv_router.runs import pack
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.engine import PrefillResult, PreprocessedRequest, Routing
from dynamo.protocols.model_card import ModelDeploymentCard, RuntimeConfig
from dynamo.routing.kv_push_router import KvPushRouter, facts_of
from dynamo.routing.prefill_plan import DECODE_OVERRIDE
from dynamo.routing.topology import constraints_of
from dynamo.tokens.hashing import block_hashes, mixed_block_hashes, seed_of

BLOCK = 4
PROMPT = list(range(1, 41))


@dataclass
class Progress:
    tokens: int = 0
    is_over: bool = False


def card(**runtime: Any) -> ModelDeploymentCard:
    config = RuntimeConfig(**{"max_num_batched_tokens": 40, "total_kv_blocks": 100, **runtime})
    return ModelDeploymentCard(display_name="m", slug="m", kv_cache_block_size=BLOCK, runtime_config=config)


def request(tokens: list[int] | None = None, **routing: Any) -> PreprocessedRequest:
    wanted = Routing(**routing) if routing else None
    return PreprocessedRequest(model="m", token_ids=PROMPT if tokens is None else tokens, routing=wanted)


class RouterHarness:
    """Router of two workers, with a manual clock."""

    def __init__(self, **config: Any) -> None:
        self.clock = ManualClock()
        self.runtime = MemoryCluster().runtime()
        self.router = KvPushRouter(
            self.runtime,
            EndpointId.parse("dynamo.backend.generate"),
            RoutingConfig(block_size=BLOCK, **config),
            rng=random.Random(1),
            clock=self.clock,
        )
        self.router.set_workers({1: card(), 2: card()})

    def hold(self, worker_id: int, tokens: list[int], seed: int = 1337) -> None:
        hashes = block_hashes(tokens, BLOCK, seed)
        self.router.machine.index.store(worker_id, 0, None, hashes, pack(hashes))

    async def close(self) -> None:
        await self.router.close()
        await self.runtime.shutdown()


@pytest.fixture
async def harness() -> AsyncIterator[RouterHarness]:
    made = RouterHarness()
    yield made
    await made.close()


async def test_kv_push_router_learns_transfers_where_the_prompt_is_computed() -> None:
    """A request that is sent during its prefill waits for that too, so it is not learned from."""
    harness = RouterHarness(policy="balanced")
    override = dict(DECODE_OVERRIDE)
    computed = msgspec.structs.replace(
        request(routing_constraints={"preferred_taints": {"dynamo.topology/zone=a": 0.5}}),
        router_config_override=override,
        prefill_result=PrefillResult(disaggregated_params={}),
    )
    routed = harness.router.to_route_request(computed, "a")
    assert (routed.is_computed, routed.near_taint) == (True, "dynamo.topology/zone=a")
    early = msgspec.structs.replace(request(), router_config_override=override)
    assert not harness.router.to_route_request(early, "b").is_computed
    progress = Progress()
    movement = harness.router.machine.pace.movement
    await harness.router.choose(early, "b", Progress())
    await harness.router.choose(computed, "a", progress)
    assert len(movement) == 1
    progress.tokens = 1
    harness.clock.advance(0.1)
    harness.router.refresh()
    assert not len(movement)
    await harness.close()


async def test_kv_push_router_sends_a_prompt_to_the_worker_that_caches_it(harness: RouterHarness) -> None:
    harness.hold(2, PROMPT[:20])
    decision = await harness.router.choose(request(), "a", Progress())
    assert (decision.worker_id, decision.dp_rank, decision.overlap_blocks) == (2, 0, 5)
    assert harness.router.machine.loads()[(2, 0)] == (20, 10, 1)
    (reported,) = harness.router.explain("a")
    assert reported.candidates[0].worker_id == 2


async def test_kv_push_router_observes_first_token_and_end(harness: RouterHarness) -> None:
    progress = Progress()
    decision = await harness.router.choose(request(), "a", progress)
    rank = (decision.worker_id, 0)
    progress.tokens = 1
    harness.router.refresh()
    assert harness.router.machine.loads()[rank] == (0, 10, 1)
    harness.router.release("a")
    harness.router.release("a")
    assert harness.router.machine.loads()[rank] == (0, 0, 0)


async def test_kv_push_router_separates_caches_of_adapters_and_salts(harness: RouterHarness) -> None:
    harness.hold(2, PROMPT, seed_of("poet", "s"))
    for _ in range(5):
        decision = harness.router.peek(request(lora_name="poet", cache_salt="s"))
        assert (decision.worker_id, decision.overlap_blocks) == (2, 10)
    assert harness.router.peek(request()).overlap_blocks == 0


async def test_kv_push_router_obeys_pinned_workers_and_required_taints(harness: RouterHarness) -> None:
    harness.router.set_workers({1: card(), 2: card(taints=["fast"], data_parallel_size=2)})
    assert harness.router.peek(request(backend_instance_id=1)).worker_id == 1
    assert harness.router.peek(request(dp_rank=1)).worker_id == 2
    assert harness.router.peek(request(routing_constraints={"required_taints": ["fast"]})).worker_id == 2
    assert harness.router.peek(request(allowed_worker_ids=[1])).worker_id == 1
    assert harness.router.peek(request(), avoid={1}).worker_id == 2
    with pytest.raises(InvalidArgument, match="required_taints"):
        harness.router.peek(request(routing_constraints={"required_taints": "fast"}))
    with pytest.raises(InvalidArgument, match="preferred_taints"):
        constraints_of({"preferred_taints": {"a": "much"}})


async def test_kv_push_router_queues_requests_until_a_worker_is_free() -> None:
    harness = RouterHarness(queue_threshold=0.5)
    first, second = Progress(), Progress()
    await harness.router.choose(request(), "a", first)
    await harness.router.choose(request(), "b", second)
    waiting = asyncio.ensure_future(harness.router.choose(request(), "c", Progress()))
    gone = Progress()
    leaving = asyncio.ensure_future(harness.router.choose(request(), "d", gone))
    await turns()
    assert not waiting.done()
    gone.is_over = True
    first.tokens = 1
    for _ in range(10):
        harness.clock.advance(0.01)
        await turns()
    assert (await waiting).request_id == "c"
    with pytest.raises(DynamoException, match="no longer waits"):
        await leaving
    cancelled = asyncio.ensure_future(harness.router.choose(request(), "e", Progress()))
    await turns()
    cancelled.cancel()
    await asyncio.wait({cancelled})
    assert len(harness.router.machine.waiting) == 0
    last = asyncio.ensure_future(harness.router.choose(request(), "f", Progress()))
    await turns()
    await harness.close()
    with pytest.raises(Overloaded, match="shutting down"):
        await last


async def test_kv_push_router_rejects_a_request_that_was_queued_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_ROUTER_QUEUE_TIMEOUT_SECS", "0.01")
    harness = RouterHarness(queue_threshold=0.0)
    for name in "ab":
        await harness.router.choose(request(), name, Progress())
    with pytest.raises(Overloaded, match="DYN_ROUTER_QUEUE_TIMEOUT_SECS"):
        await harness.router.choose(request(), "c", Progress())
    assert len(harness.router.machine.waiting) == 0
    await harness.close()


async def test_kv_push_router_predicts_caches_without_events_and_logs_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness = RouterHarness()
    await harness.router.choose(request(), "a", Progress())
    harness.router.release("a")
    harness.clock.advance(11)
    first = await harness.router.choose(request(), "b", Progress())
    assert "no KV events from 2 worker(s) of dynamo.backend.generate" in caplog.text
    harness.router.release("b")
    again = harness.router.peek(request())
    assert (again.worker_id, again.overlap_blocks) == (first.worker_id, 10)
    await harness.close()


async def test_workers_whose_cards_state_no_kv_events_are_reported_once(
    harness: RouterHarness, caplog: pytest.LogCaptureFixture
) -> None:
    silent = card(kv_event_publishing_enabled=False, data_parallel_size=2, data_parallel_start_rank=1)
    decode = card(kv_event_publishing_enabled=False)
    decode.worker_type = "decode"
    for _ in range(2):
        harness.router.set_workers({1: card(), 2: silent, 3: decode})
    [record] = [one for one in caplog.records if hasattr(one, "diagnostic_code")]
    output = vars(record)
    assert output["diagnostic_code"] == "kv_event_publisher_disabled"
    assert (output["worker_id"], output["worker_role"], output["rank_count"], output["dp_ranks"]) == (
        2,
        "aggregated",
        2,
        "1,2",
    )
    assert output["serving_endpoint"] == "dynamo/backend/generate"
    harness.router.set_workers({1: card()})
    harness.router.set_workers({2: silent})
    assert sum(hasattr(one, "diagnostic_code") for one in caplog.records) == 2, (
        "a worker that returns is reported again"
    )


async def test_kv_push_router_tracks_output_blocks_when_enabled() -> None:
    harness = RouterHarness(track_output_blocks=True)
    progress = Progress()
    decision = await harness.router.choose(request(), "a", progress)
    progress.tokens = 9
    harness.router.refresh()
    assert harness.router.machine.loads()[(decision.worker_id, 0)] == (0, 12, 1)
    await harness.close()


async def test_kv_push_router_skips_a_removed_worker(harness: RouterHarness) -> None:
    harness.hold(1, PROMPT)
    harness.router.set_workers({2: card()})
    assert harness.router.peek(request()).worker_id == 2


def test_kv_push_router_reads_worker_properties_from_the_card() -> None:
    facts = facts_of(7, card(data_parallel_start_rank=2, data_parallel_size=2, taints=["a"]))
    assert (facts.dp_start, facts.dp_size, facts.batch_tokens, facts.taints) == (2, 2, 40, frozenset("a"))


async def test_kv_push_router_uses_lookahead_block_hashes(harness: RouterHarness) -> None:
    harness.router.set_workers({1: card(enable_eagle=True), 2: card(enable_eagle=True)})
    hashes = mixed_block_hashes(PROMPT, BLOCK, is_eagle=True)
    harness.router.machine.index.store(2, 0, None, hashes, pack(hashes))
    decision = harness.router.peek(request())
    assert (decision.worker_id, decision.device_blocks) == (2, len(PROMPT) // BLOCK - 1)


async def test_kv_push_router_hashes_images_into_blocks(harness: RouterHarness) -> None:
    shown = {"mm_objects": [{"mm_hash": 5, "offsets": [[0, 2]]}]}
    hashes = mixed_block_hashes(PROMPT, BLOCK, media=[[5]])
    harness.router.machine.index.store(2, 0, None, hashes, pack(hashes))
    requested = request()
    requested.mm_routing_info = {"routing_token_ids": PROMPT, "block_mm_infos": [shown]}
    requested.token_ids = [7]  # The worker receives placeholders of its own.
    assert harness.router.peek(requested).device_blocks == len(PROMPT) // BLOCK
    assert harness.router.peek(request()).device_blocks == 0
    requested.mm_routing_info = {"block_mm_infos": [{"mm_objects": 7}]}
    with pytest.raises(InvalidArgument, match="block_mm_infos"):
        harness.router.peek(requested)


async def test_kv_push_router_updates_the_output_length_estimate_with_the_balanced_policy() -> None:
    harness = RouterHarness(policy="balanced")
    before, progress = harness.router.machine.pace.output_tokens, Progress()
    await harness.router.choose(request(), "a", progress)
    progress.tokens = int(before) + 1000
    harness.router.release("a")
    assert harness.router.machine.pace.output_tokens > before
    await harness.close()


async def test_kv_push_router_includes_shared_cache_hits_in_the_cost() -> None:
    harness = RouterHarness(shared_cache="hicache")
    layout = {"page_size": BLOCK, "is_mla_model": True}
    harness.router.set_workers(dict.fromkeys((1, 2), card(runtime_data={RUNTIME_KEY: layout})))
    assert harness.router.shared is not None
    stored = [ObjectEvent("stored", name.hex() + "__k") for name in page_names(PROMPT, BLOCK)[:6]]
    harness.router.shared.pages.apply(1, stored)

    await harness.router.choose(request(), "a", Progress())
    apart = await harness.router.choose(request(lora_name="poet"), "b", Progress())

    (reported,) = harness.router.explain("a")
    assert {(one.shared, one.saved) for one in reported.candidates} == {(6, 3.0)}
    assert apart.snapshot.prompt.shared_beyond == {}, "an adapter's pages have other names"
    assert "dynamo_component_router_shared_cache_beyond_blocks" in harness.runtime.metrics.render()
    await harness.close()


async def test_kv_push_router_tracks_requests_by_keyed_hashes(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(bytes(32))
    keyed = {"tracking_hash": "keyed-xxh3-v1", "tracking_key_file": str(tmp_path / "key"), "tracking_key_id": "a"}
    harness = RouterHarness(**keyed)

    first = await harness.router.choose(request(), "a", Progress())
    harness.router.prefilled("a")
    again = await harness.router.choose(request(), "b", Progress())

    assert (
        harness.router.to_route_request(request(), "x").sequence
        != harness.router.to_route_request(request(cache_salt="s"), "y").sequence
    )
    assert again.worker_id == first.worker_id, "blocks are shared by the same hashes"
    assert harness.router.machine.loads()[(first.worker_id, 0)][1:] == (10, 2)
    await harness.close()


async def test_kv_push_router_refuses_to_start_with_an_unreadable_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--router-tracking-key-file"):
        RouterHarness(tracking_hash="keyed-xxh3-v1", tracking_key_file=str(tmp_path / "none"), tracking_key_id="a")
