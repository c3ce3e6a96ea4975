"""Runtime data: instances selected by their cards."""

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


class RuntimeDataHarness:
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
async def harness() -> AsyncIterator[RuntimeDataHarness]:
    made = RuntimeDataHarness()
    yield made
    await made.registry.close()


async def test_find_returns_present_workers_with_matching_runtime_data(harness: RuntimeDataHarness) -> None:
    harness.present.ids = [1, 2, 4, 5]
    await harness.card(2, {"role": "draft"})
    await harness.card(1, {"role": "draft", "more": 1})
    await harness.card(3, {"role": "draft"})
    await harness.card(4, {"role": "other"})
    await harness.card(5, {"role": "draft"}, endpoint="another")
    await harness.registry.put(MODEL_CARDS, "ns/comp/ep/6", b"{broken")
    assert await harness.find(2) == [1, 2]


async def test_find_waits_for_a_worker_that_registers_later(harness: RuntimeDataHarness) -> None:
    finding = asyncio.ensure_future(harness.find())
    await turns()
    await harness.card(1, {"role": "draft"})
    harness.present.ids = [1]
    assert await finding == [1]


async def test_find_times_out_naming_the_missing_value(harness: RuntimeDataHarness) -> None:
    await harness.card(1, {"role": "other"})
    with pytest.raises(WorkerUnavailable, match="role='draft'"):
        await harness.find(timeout_s=0.01)
    with pytest.raises(InvalidArgument):
        await harness.find(0)
