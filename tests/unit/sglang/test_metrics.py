"""LoadReporter of SGLang: tokens become blocks, and an idle engine is left alone."""

import asyncio
from types import SimpleNamespace

from tests.settle import turns
from tests.unit.sglang import scripted
from tests.unit.vllm.conftest import Host

from dynamo.core.clock import ManualClock
from dynamo.sglang.metrics import SglangLoadReporter


def snapshot(used: int, rank: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        **dict.fromkeys(scripted.LOADS, 0) | {"dp_rank": rank, "num_used_tokens": used, "max_total_num_tokens": 160}
    )


async def test_load_of_each_rank_is_published_when_it_changes() -> None:
    manager, host = scripted.TokenizerManager(), Host()
    reporter = SglangLoadReporter(manager, host, 16, first_rank=2, is_busy=lambda: True)
    manager.loads = [snapshot(17), snapshot(0, 1)]
    await reporter.look()
    await reporter.look()
    assert [(load.dp_rank, load.kv_used_blocks, load.kv_total_blocks) for load in host.loads] == [
        (2, 2, 10),
        (3, 0, 10),
    ]


async def test_idle_engine_load_is_read_once_more() -> None:
    manager, host, clock, busy = scripted.TokenizerManager(), Host(), ManualClock(), [True]
    looks = []
    reporter = SglangLoadReporter(manager, host, 16, is_busy=lambda: busy[0], clock=clock)

    async def look() -> None:
        looks.append(clock.now())

    reporter.look = look  # type: ignore[method-assign]
    running = asyncio.ensure_future(reporter.run())

    async def pass_time() -> None:
        await turns(3)
        clock.advance(0.25)
        await turns(3)

    await pass_time()
    busy[0] = False
    for _ in range(4):
        await pass_time()
    running.cancel()
    assert len(looks) == 2
