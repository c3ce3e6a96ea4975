"""A request goes to its pool's router, and to a faster pool's when that one fails."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from tests.cluster.memory import MemoryCluster
from tests.unit.global_router.test_pools import DISAGG

from dynamo.core.errors import DynamoException, InvalidArgument, Overloaded
from dynamo.global_router.main import PoolRelay
from dynamo.global_router.pools import PoolsFile, pools_of
from dynamo.runtime.context import Context
from dynamo.runtime.streams import GeneratorHandler

SLOW = {"token_ids": list(range(20_000)), "router": {"ttft_target": 2900}}


class GlobalRouterHarness(MemoryCluster):
    """Three pools' routers, and a relay to them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.failing: dict[str, tuple[int, Exception]] = {}
        """By pool: after how many elements it fails, and how."""

    async def start(self) -> None:
        for name in DISAGG["prefill_pool_dynamo_namespaces"]:
            await self.pool(name)
        file = msgspec.convert({**DISAGG, "enable_priority_retry": True}, PoolsFile)
        self.relay = PoolRelay(self.runtime(), pools_of(file)["prefill"])
        await self.relay.start()

    async def pool(self, name: str) -> None:
        runtime = self.runtime()

        async def generate(request: Any, context: Context) -> AsyncIterator[Any]:
            self.seen.append(name)
            after, error = self.failing.get(name, (9, Overloaded("unused")))
            for number in range(2):
                if number == after:
                    raise error
                yield {"token_ids": [number], "pool": name}

        await runtime.endpoint(f"{name}.router.generate").serve(GeneratorHandler(generate, runtime.tasks))

    async def ask(self, request: Any) -> list[Any]:
        return [output["pool"] async for output in self.relay.generate(request, Context())]

    async def close(self) -> None:
        await self.shutdown()


@pytest.fixture
async def harness() -> AsyncIterator[GlobalRouterHarness]:
    made = GlobalRouterHarness()
    await made.start()
    yield made
    await made.close()


async def test_a_request_goes_to_its_pool(harness: GlobalRouterHarness) -> None:
    assert await harness.ask({"token_ids": [1], "router": {"ttft_target": 20}}) == ["p-fast", "p-fast"]
    assert await harness.ask(SLOW) == ["p-slow", "p-slow"]
    assert harness.seen == ["p-fast", "p-slow"]


async def test_a_pool_that_fails_at_once_is_followed_by_a_faster_one(harness: GlobalRouterHarness) -> None:
    harness.failing = {"p-slow": (0, Overloaded("full")), "p-mid": (0, Overloaded("full"))}
    assert await harness.ask(SLOW) == ["p-fast", "p-fast"]
    assert harness.seen == ["p-slow", "p-mid", "p-fast"]


async def test_what_has_begun_is_not_begun_again(harness: GlobalRouterHarness) -> None:
    harness.failing = {"p-slow": (1, Overloaded("full"))}
    with pytest.raises(DynamoException):
        await harness.ask(SLOW)
    assert harness.seen == ["p-slow"]


async def test_the_last_pool_s_failure_is_the_answer(harness: GlobalRouterHarness) -> None:
    harness.failing = dict.fromkeys(DISAGG["prefill_pool_dynamo_namespaces"], (0, Overloaded("full")))
    with pytest.raises(DynamoException, match="full"):
        await harness.ask(SLOW)
    assert harness.seen == ["p-slow", "p-mid", "p-fast"]


async def test_what_cannot_be_read_is_refused(harness: GlobalRouterHarness) -> None:
    with pytest.raises(InvalidArgument):
        await harness.ask([1, 2])
