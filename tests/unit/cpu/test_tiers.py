"""With a cache that is far too small and tiers below it, every token is the same, and less is computed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.settle import until, until_blocking

from dynamo.core.metrics import MetricsRegistry
from dynamo.cpu.blocks import KvBlockPool
from dynamo.cpu.config import CpuConfig
from dynamo.cpu.core import Core
from dynamo.cpu.engine import CpuEngine
from dynamo.cpu.model import TransformerModel
from dynamo.cpu.scheduler import Scheduler
from dynamo.cpu.tiers import CacheTiers, open_tiers
from dynamo.kv_router.events import apply
from dynamo.kv_router.index import KvIndex
from dynamo.kv_router.runs import pack
from dynamo.kvbm.config import KvbmConfig
from dynamo.kvbm.logical.policies import Rule
from dynamo.protocols.engine import PreprocessedRequest, SamplingOptions, StopConditions
from dynamo.protocols.kv_events import Cleared, KvEventData, NumberedKvEvent, Removed, Stored, WorkerKvEvent
from dynamo.tokens.hashing import block_hashes

Make = Callable[..., Any]
BLOCK_TOKENS = 4
PROMPTS = [[int(token) for token in np.random.default_rng(at).integers(0, 96, 40)] for at in range(8)]
BLOCKS = 8 * 13
"""Blocks that all prompts need, each with twelve output tokens."""
PATIENCE_S = 20.0


@pytest.fixture
def tiered(tiny_model: TransformerModel, tmp_path: Path) -> Any:
    """Return a core whose cache holds a quarter of the working set."""
    opened: list[CacheTiers] = []
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")

    def make(*, blocks: int = BLOCKS // 4, **options: Any) -> tuple[Core, CacheTiers]:
        given: dict[str, Any] = {"disk_dir": str(tmp_path), "disk_filter": False, "onboard_timeout_s": PATIENCE_S}
        config = KvbmConfig(**(given | options))
        tiers = open_tiers(config, str(tmp_path / "model"), tiny_model.cache, BLOCK_TOKENS, "1", lambda: None)
        opened.append(tiers)
        tiers.start(MetricsRegistry())
        pool = KvBlockPool(blocks, notes_evicted=True)
        scheduler = Scheduler(pool, sequences_max=8, batched_tokens_max=64, tiers=tiers)
        return Core(tiny_model, scheduler, BLOCK_TOKENS, tiers), tiers

    yield make
    for tiers in opened:
        tiers.close()


def settle(tiers: CacheTiers) -> None:
    """Return when no block is in transit to a slower tier."""
    book = tiers.manager.book

    def is_idle() -> bool:
        return not any(map(book.waiting, book.lower)) and not any(pool.held() for pool in book.lower.values())

    until_blocking(is_idle, "the blocks never arrived")


@pytest.fixture
def answers(make_generation: Make, run: Make) -> Make:
    """Return the tokens and the number of uncomputed prompt tokens of sequential prompts."""

    def send_request(
        core: Core, prompts: list[list[int]], tiers: CacheTiers | None = None
    ) -> list[tuple[list[int], int]]:
        found = []
        for prompt in prompts:
            generation = make_generation(prompt)
            core.add(generation)
            run(core)
            if tiers is not None:
                settle(tiers)
                tiers.manager.validate()
            usage = generation.reply.messages[-1].completion_usage
            found.append((generation.reply.tokens, usage.prompt_tokens_details.cached_tokens))
        return found

    return send_request


@pytest.mark.parametrize(
    "options",
    [
        {"cpu_blocks": 2 * BLOCKS},
        {"cpu_blocks": 24, "disk_blocks": 2 * BLOCKS},
        {"disk_blocks": 2 * BLOCKS},
        {"cpu_blocks": 24, "object_enabled": True},
        {"cpu_blocks": 24, "disk_blocks": 16, "object_enabled": True, "eviction": "lfu", "disk_direct": False},
    ],
    ids=["host", "host and disk", "disk alone", "host and objects", "all, too small"],
)
def test_tiers_return_equal_answers_without_recomputation(
    tiered: Make, make_core: Make, answers: Make, options: dict[str, Any], tmp_path: Path
) -> None:
    want = [tokens for tokens, _ in answers(make_core(is_caching=False), PROMPTS)]
    core, tiers = tiered(object_endpoint=f"file://{tmp_path}/objects", **options)
    first = answers(core, PROMPTS, tiers)
    again = answers(core, PROMPTS, tiers)
    assert [tokens for tokens, _ in (*first, *again)] == want * 2
    assert [cached for _, cached in first] == [0] * 8
    assert [cached for _, cached in again] == [36] * 8


def test_tiers_serve_concurrent_requests_equally(
    tiered: Make, make_core: Make, make_generation: Make, run: Make, answers: Make
) -> None:
    want = [tokens for tokens, _ in answers(make_core(is_caching=False), PROMPTS)]
    core, tiers = tiered(cpu_blocks=30, disk_blocks=BLOCKS)
    for _ in range(3):
        generations = [make_generation(prompt) for prompt in PROMPTS]
        for generation in generations:
            core.add(generation)
        run(core)
        assert [generation.reply.tokens for generation in generations] == want
        tiers.manager.validate()
    assert tiers.manager.book.host.held() == sum(tiers.manager.book.waiting(tier) for tier in tiers.manager.book.lower)


def test_tiers_release_blocks_of_a_cancelled_waiting_request(
    tiered: Make, make_generation: Make, answers: Make
) -> None:
    core, tiers = tiered(cpu_blocks=12, disk_blocks=BLOCKS)
    answers(core, PROMPTS[:3], tiers)
    generation = make_generation(PROMPTS[0])
    core.add(generation)
    core.scheduler.plan()
    core.drop(generation)
    tiers.close()
    assert tiers.manager.book.host.held() == 0


def test_tiers_recompute_blocks_that_arrive_too_late(tiered: Make, answers: Make, make_core: Make) -> None:
    want = [tokens for tokens, _ in answers(make_core(is_caching=False), PROMPTS[:3])]
    core, tiers = tiered(cpu_blocks=12, disk_blocks=BLOCKS, onboard_timeout_s=1e-9)
    answers(core, PROMPTS[:3], tiers)
    assert [tokens for tokens, _ in answers(core, PROMPTS[:3], tiers)] == want
    assert tiers.manager.traffic.tickets_late > 0


def test_tiers_recompute_a_corrupt_disk_block(tiered: Make, answers: Make, make_core: Make) -> None:
    want = [tokens for tokens, _ in answers(make_core(is_caching=False), PROMPTS[:3])]
    core, tiers = tiered(cpu_blocks=12, disk_blocks=BLOCKS)
    answers(core, PROMPTS[:3], tiers)
    with open(tiers.manager._io.disk.path, "r+b") as file:
        for slot in range(BLOCKS):
            file.seek(4096 + slot * 8192 + 4096 + 100)
            file.write(b"\xff")
    again = answers(core, PROMPTS[:3], tiers)
    assert [tokens for tokens, _ in again] == want
    assert tiers.manager.book.counts.corrupt > 0


def test_tiers_keep_disk_blocks_across_a_restart(tiered: Make, answers: Make) -> None:
    core, tiers = tiered(cpu_blocks=24, disk_blocks=BLOCKS)
    first = answers(core, PROMPTS[:3], tiers)
    tiers.close()
    core, tiers = tiered(cpu_blocks=24, disk_blocks=BLOCKS)
    again = answers(core, PROMPTS[:3], tiers)
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in first]
    assert [cached for _, cached in again] == [36] * 3


def test_tiers_recompute_cleared_blocks(tiered: Make, answers: Make) -> None:
    core, tiers = tiered(cpu_blocks=BLOCKS, disk_blocks=BLOCKS)
    first = answers(core, PROMPTS[:2], tiers)
    core.clear()
    assert answers(core, PROMPTS[:2], tiers) == first


def test_tiers_do_not_reuse_blocks_of_former_weights(
    tiered: Make, answers: Make, make_core: Make, tiny_model: TransformerModel, tmp_path: Path
) -> None:
    objects = {"object_enabled": True, "object_endpoint": f"file://{tmp_path}/objects"}
    core, tiers = tiered(cpu_blocks=24, disk_blocks=BLOCKS, **objects)
    first = answers(core, PROMPTS[:3], tiers)
    former = tiny_model._weights
    try:
        tiny_model.load(replace(former, embedding=former.embedding[::-1].copy()))
        want = [tokens for tokens, _ in answers(make_core(blocks=BLOCKS), PROMPTS[:3])]
        core.reidentify("other weights")
        assert answers(core, PROMPTS[:3], tiers) == [(tokens, 0) for tokens in want]
        assert [tokens for tokens, _ in answers(core, PROMPTS[:3], tiers)] == want
        assert want != [tokens for tokens, _ in first]
    finally:
        tiny_model.load(former)


def test_tiers_republish_their_blocks_after_sleep(tiered: Make, answers: Make) -> None:
    core, tiers = tiered(cpu_blocks=2 * BLOCKS)
    answers(core, PROMPTS[:2], tiers)
    core.reidentify(tiers.manager.layout.model)
    reported = core.step().tier_events
    assert isinstance(reported[0][0], Cleared)
    hashes = [block.block_hash for event, _ in reported[1:] if isinstance(event, Stored) for block in event.blocks]
    assert {tier for _, tier in reported[1:]} == {"host_pinned"}
    assert len(hashes) == len(set(hashes)) == len(tiers.manager.book.host) > 0
    assert [cached for _, cached in answers(core, PROMPTS[:2], tiers)] == [36] * 2


def test_tiers_keep_low_value_blocks_on_the_device(tiered: Make, answers: Make) -> None:
    core, tiers = tiered(cpu_blocks=BLOCKS, host_priority_min=1)
    answers(core, PROMPTS[:1], tiers)
    assert len(tiers.manager.book.host) == 0


def test_tiers_may_skip_rarely_used_blocks(tiered: Make, answers: Make) -> None:
    core, tiers = tiered(cpu_blocks=BLOCKS, to_host=(Rule.PRESENCE_LFU,), to_host_lfu_min=2, blocks=BLOCKS)
    answers(core, PROMPTS[:1], tiers)
    assert len(tiers.manager.book.host) == 0


def test_tiers_publish_the_location_of_every_block(tiered: Make, make_generation: Make, deliver: Make) -> None:
    core, tiers = tiered(cpu_blocks=40, disk_blocks=BLOCKS)
    index, numbers = KvIndex(), iter(range(1, 10_000))

    def collect_events() -> None:
        for event, tier in core_events:
            data: Any = "cleared"
            if isinstance(event, Stored):
                data = KvEventData(stored=event)
            elif isinstance(event, Removed):
                data = KvEventData(removed=event)
            else:
                assert isinstance(event, Cleared)
            assert apply(index, WorkerKvEvent(1, tier, "worker", NumberedKvEvent(next(numbers), data, 0)))

    for prompt in PROMPTS:
        core.add(make_generation(prompt))
        while core.has_work:
            outcome = core.step()
            deliver(outcome)
            core_events = outcome.tier_events
            collect_events()
        settle(tiers)
        core_events = core.step().tier_events
        collect_events()
    overlap = index.find(pack(block_hashes(PROMPTS[0], BLOCK_TOKENS)))
    assert index.depth_by_rank(overlap) == {}
    assert index.beyond(overlap, index.slot_of(1), 0, 1) == 0
    assert index.beyond(overlap, index.slot_of(1), 0, 2) == 10
    recent = index.find(pack(block_hashes(PROMPTS[-1], BLOCK_TOKENS)))
    assert index.depth_by_rank(recent) == {(1, 0): 10}
    assert index.beyond(recent, index.slot_of(1), 0, 1) == 10
    index.validate()


async def test_tiers_are_configured_by_variables(
    write_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receiver_type: type[Any]
) -> None:
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS", "64")
    monkeypatch.setenv("DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS", "64")
    monkeypatch.setenv("DYN_KVBM_DISK_CACHE_DIR", str(tmp_path / "disk"))
    monkeypatch.setenv("DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER", "true")
    reported: list[tuple[Any, str]] = []

    class Host:
        metrics = MetricsRegistry()
        worker_id = 7

        def publish_kv_event(self, event: Any, dp_rank: int = 0, tier: str = "device") -> None:
            reported.append((event, tier))

        def publish_load(self, load: Any) -> None: ...
        def publish_forward_pass(self, passed: Any, dp_rank: int = 0) -> None: ...

    engine = CpuEngine(CpuConfig(model_path=write_model(), block_size=4, kv_cache_blocks=16))
    host: Any = Host()
    config = await engine.start(host)
    request = PreprocessedRequest("m", PROMPTS[0], StopConditions(max_tokens=4), SamplingOptions(temperature=0.0))
    reply = receiver_type()
    engine.submit(request, reply)
    await until(lambda: {tier for _, tier in reported} == {"device", "host_pinned", "disk"}, str(reported))
    status = await config.routes["kvbm"]({})
    assert status["tiers"]["host"]["stored"] == 10
    assert "kvbm_offload_blocks_d2h 10" in host.metrics.render()
    await engine.stop()
    assert list((tmp_path / "disk").iterdir())
