"""Runtime data: instances found by what their cards say."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.settle import turns

from dynamo.core.codec import json_encode
from dynamo.core.errors import InvalidArgument, WorkerUnavailable
from dynamo.protocols.discovery import MODEL_CARDS, EndpointId
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.runtime_data import wait_for_instances_by_runtime_data

ENDPOINT = EndpointId("ns", "comp", "ep")
TIMEOUT_S = 5.0


class Present:
    endpoint = ENDPOINT

    def __init__(self) -> None:
        self.ids: list[int] = []

    def instance_ids(self) -> list[int]:
        return self.ids


class House:
    def __init__(self) -> None:
        self.registry = MemoryDiscovery(MemoryStore())
        self.present = Present()

    async def card(self, number: int, data: Any, endpoint: str = "ep") -> None:
        record = {"type": "Model", "instance_id": number, "card_json": {"runtime_config": {"runtime_data": data}}}
        await self.registry.put(MODEL_CARDS, f"ns/comp/{endpoint}/{number:x}", json_encode(record))

    async def find(self, count: int = 1, timeout_s: float | None = TIMEOUT_S) -> list[int]:
        return await wait_for_instances_by_runtime_data(
            self.present, self.registry, "role", "draft", min_count=count, timeout_s=timeout_s
        )


@pytest.fixture
async def house() -> AsyncIterator[House]:
    made = House()
    yield made
    await made.registry.close()


async def test_only_those_that_say_so_and_can_be_called_are_found(house: House) -> None:
    house.present.ids = [1, 2, 4, 5]
    await house.card(2, {"role": "draft"})
    await house.card(1, {"role": "draft", "more": 1})
    await house.card(3, {"role": "draft"})
    await house.card(4, {"role": "other"})
    await house.card(5, {"role": "draft"}, endpoint="another")
    await house.registry.put(MODEL_CARDS, "ns/comp/ep/6", b"{broken")
    assert await house.find(2) == [1, 2]


async def test_one_that_comes_later_is_waited_for(house: House) -> None:
    finding = asyncio.ensure_future(house.find())
    await turns()
    await house.card(1, {"role": "draft"})
    house.present.ids = [1]
    assert await finding == [1]


async def test_what_does_not_come_in_time_is_told(house: House) -> None:
    await house.card(1, {"role": "other"})
    with pytest.raises(WorkerUnavailable, match="role='draft'"):
        await house.find(timeout_s=0.01)
    with pytest.raises(InvalidArgument):
        await house.find(0)
