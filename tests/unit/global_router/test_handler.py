"""A request goes to its pool's router, and to a faster pool's when that one fails."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.memory import MemoryCluster
from tests.unit.global_router.test_pool_selection import DISAGG

from dynamo.core.errors import DynamoException, InvalidArgument, Overloaded
from dynamo.global_router.handler import GlobalRouterHandler, RoutedRequest, routed_request
from dynamo.runtime.context import Context
from dynamo.runtime.streams import GeneratorHandler

SLOW = {"token_ids": list(range(20_000)), "router": {"ttft_target": 2900}}


class GlobalRouterHarness(MemoryCluster):
    """Three pools' routers, and a handler connected to them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        path.write_text(json.dumps({**DISAGG, "enable_priority_retry": True}))
        self.path = path
        self.seen: list[str] = []
        self.failing: dict[str, tuple[int, Exception]] = {}
        """Number of elements after which each pool fails, and the error."""

    async def start(self) -> None:
        for name in DISAGG["prefill_pool_dynamo_namespaces"]:
            await self.pool(name)
        for name in DISAGG["decode_pool_dynamo_namespaces"]:
            await self.pool(name)
        self.handler = GlobalRouterHandler(self.runtime(), str(self.path), "m")
        await self.handler.initialize()

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

    async def send_request(self, request: Any) -> list[Any]:
        return [output["pool"] async for output in self.handler.handle_prefill(request, Context())]

    async def close(self) -> None:
        await self.shutdown()


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[GlobalRouterHarness]:
    made = GlobalRouterHarness(tmp_path / "pools.json")
    await made.start()
    yield made
    await made.close()


async def test_request_is_sent_to_its_selected_pool(harness: GlobalRouterHarness) -> None:
    assert await harness.send_request({"token_ids": [1], "router": {"ttft_target": 20}}) == ["p-fast", "p-fast"]
    assert await harness.send_request(SLOW) == ["p-slow", "p-slow"]
    assert harness.seen == ["p-fast", "p-slow"]


async def test_failed_pool_is_retried_with_a_faster_pool(harness: GlobalRouterHarness) -> None:
    harness.failing = {"p-slow": (0, Overloaded("full")), "p-mid": (0, Overloaded("full"))}
    assert await harness.send_request(SLOW) == ["p-fast", "p-fast"]
    assert harness.seen == ["p-slow", "p-mid", "p-fast"]


async def test_started_response_is_not_retried(harness: GlobalRouterHarness) -> None:
    harness.failing = {"p-slow": (1, Overloaded("full"))}
    with pytest.raises(DynamoException):
        await harness.send_request(SLOW)
    assert harness.seen == ["p-slow"]


async def test_error_of_the_last_pool_is_returned(harness: GlobalRouterHarness) -> None:
    harness.failing = dict.fromkeys(DISAGG["prefill_pool_dynamo_namespaces"], (0, Overloaded("full")))
    with pytest.raises(DynamoException, match="full"):
        await harness.send_request(SLOW)
    assert harness.seen == ["p-slow", "p-mid", "p-fast"]


async def test_malformed_request_is_refused(harness: GlobalRouterHarness) -> None:
    with pytest.raises(InvalidArgument):
        await harness.send_request([1, 2])


async def test_decode_request_is_sent_to_its_selected_pool(harness: GlobalRouterHarness) -> None:
    request = {"token_ids": b"\1\0\0\0" * 3, "router": {"itl_target": 400}}
    outputs = [output async for output in harness.handler.handle_decode(request)]
    assert [output["pool"] for output in outputs] == ["d-slow", "d-slow"]
    assert harness.handler.get_pool_info()["decode_connected"] == ["d-fast", "d-slow"]


def test_targets_and_priority_are_read_from_a_request() -> None:
    request = {
        "token_ids": [1, 2, 3],
        "router": {"ttft_target": 100, "itl_target": 20.5},
        "routing": {"priority": 50},
    }
    assert routed_request(request, None, None) == RoutedRequest(3, 100, 20.5, 50)
    assert routed_request({"extra_args": {"ttft_target": 7}}, 1.0, 2.0) == RoutedRequest(0, 7, 2.0, None)
    unusable = {"router": {"ttft_target": "x"}, "token_ids": None}
    assert routed_request(unusable, 1.0, None) == RoutedRequest(0, 1.0, None, None)
    assert routed_request({"token_ids": b"\0" * 8}, None, None).tokens == 2
