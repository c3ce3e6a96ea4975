"""Scaling decisions between a planner's coordinator and the client in an external environment."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.settle import turns

from dynamo.llm.virtual_connector import VirtualConnectorClient, VirtualConnectorCoordinator
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.distributed import DistributedRuntime

BUCKET = "v1/ns/planner"


@pytest.fixture
async def runtime() -> AsyncIterator[DistributedRuntime]:
    runtime = DistributedRuntime(None, MemoryDiscovery(MemoryStore()), "mem", event_plane="mem")
    yield runtime
    await runtime.shutdown()


async def coordinator_of(runtime: DistributedRuntime, wait_s: int = 60) -> VirtualConnectorCoordinator:
    coordinator = VirtualConnectorCoordinator(runtime, "ns", 0, wait_s, 2)
    await coordinator.async_init()
    return coordinator


async def test_decision_is_published_and_acknowledged(runtime: DistributedRuntime) -> None:
    coordinator, client = await coordinator_of(runtime), VirtualConnectorClient(runtime, "ns")
    assert coordinator.read_state().decision_id == -1
    assert await coordinator.is_scaling_ready()
    assert await runtime.discovery.snapshot(BUCKET) == {}
    await coordinator.update_scaling_decision(num_prefill=2, num_decode=3)
    assert not await coordinator.is_scaling_ready()
    decision = await client.get()
    assert (decision.num_prefill_workers, decision.num_decode_workers, decision.decision_id) == (2, 3, 0)
    await client.complete(decision)
    await coordinator.wait_for_scaling_completion()
    records = await runtime.discovery.snapshot(BUCKET)
    assert records["scaled_decision_id"] == b"0"
    assert records["num_prefill_workers"] == b"2"


async def test_pending_decision_is_kept_until_the_maximum_wait(runtime: DistributedRuntime) -> None:
    patient = await coordinator_of(runtime)
    await patient.update_scaling_decision(num_decode=3)
    await patient.update_scaling_decision(num_decode=4)
    assert patient.read_state().num_decode_workers == 3
    assert patient.read_state().num_prefill_workers == -1
    hasty = await coordinator_of(runtime, wait_s=0)
    await hasty.update_scaling_decision(num_decode=4)
    assert (hasty.read_state().num_decode_workers, hasty.read_state().decision_id) == (4, 1)


async def test_unchanged_numbers_are_not_published_again(runtime: DistributedRuntime) -> None:
    coordinator = await coordinator_of(runtime)
    await coordinator.update_scaling_decision(2, 3)
    await coordinator.update_scaling_decision(2)
    assert coordinator.read_state().decision_id == 0


async def test_unacknowledged_decision_ends_the_wait_with_an_error(runtime: DistributedRuntime) -> None:
    coordinator = await coordinator_of(runtime)
    await coordinator.update_scaling_decision(2, 3)
    with pytest.raises(TimeoutError, match="decision 0"):
        await coordinator.wait_for_scaling_completion()


async def test_client_waits_for_a_decision(runtime: DistributedRuntime) -> None:
    coordinator, client = await coordinator_of(runtime), VirtualConnectorClient(runtime, "ns")
    waiting = asyncio.ensure_future(client.wait())
    await turns()
    assert not waiting.done()
    await coordinator.update_scaling_decision(1, 1)
    await asyncio.wait_for(waiting, 5)


async def test_scaling_state_persists_after_its_process() -> None:
    store = MemoryStore()
    first = DistributedRuntime(None, MemoryDiscovery(store), "mem", event_plane="mem")
    await (await coordinator_of(first)).update_scaling_decision(2, 3)
    await first.shutdown()
    second = DistributedRuntime(None, MemoryDiscovery(store), "mem", event_plane="mem")
    assert (await coordinator_of(second)).read_state().decision_id == 0
    await second.shutdown()
