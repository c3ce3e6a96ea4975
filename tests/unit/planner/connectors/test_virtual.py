"""Virtual connector: published decisions, and the numbers of workers that it expects."""

from collections.abc import AsyncIterator

import pytest
from tests.unit.planner.connectors.test_workers import record, register

from dynamo.core.clock import ManualClock
from dynamo.llm.virtual_connector import VirtualConnectorClient
from dynamo.planner.config.planner_config import parse
from dynamo.planner.connectors.base import ScaleStatus
from dynamo.planner.connectors.virtual import MAX_WAIT_S, RESTART_WAIT_S, VirtualConnector
from dynamo.protocols.planner import ScalingDecision
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.distributed import DistributedRuntime

CONFIG = parse({"namespace": "ns", "environment": "virtual", "model_name": "org/model"})


@pytest.fixture
async def runtime() -> AsyncIterator[DistributedRuntime]:
    runtime = DistributedRuntime(None, MemoryDiscovery(MemoryStore()), "mem", event_plane="mem")
    yield runtime
    await runtime.shutdown()


async def connector_of(runtime: DistributedRuntime, clock: ManualClock) -> VirtualConnector:
    connector = VirtualConnector(runtime, CONFIG, clock=clock)
    await connector.start()
    return connector


async def test_decision_is_accepted_once_and_held_while_pending(runtime: DistributedRuntime) -> None:
    connector, client = await connector_of(runtime, ManualClock()), VirtualConnectorClient(runtime, "ns")
    first = await connector.scale(ScalingDecision(num_prefill=1, num_decode=2))
    assert (first.status, first.message) == (ScaleStatus.ACCEPTED, "decision 0 published")
    second = await connector.scale(ScalingDecision(num_decode=3))
    assert (second.status, second.message) == (ScaleStatus.HELD, "decision 0 is pending")
    await client.complete(await client.get())
    assert (await connector.scale(ScalingDecision(num_decode=3))).status is ScaleStatus.ACCEPTED


async def test_decision_equal_to_the_current_replicas_is_held(runtime: DistributedRuntime) -> None:
    assert isinstance(runtime.discovery, MemoryDiscovery)
    await register(runtime.discovery, record(1))
    await register(runtime.discovery, record(2))
    connector, client = await connector_of(runtime, ManualClock()), VirtualConnectorClient(runtime, "ns")
    await connector.scale(ScalingDecision(num_decode=2))
    await client.complete(await client.get())
    outcome = await connector.scale(ScalingDecision(num_decode=2))
    assert (outcome.status, outcome.message) == (ScaleStatus.HELD, "decision 0 has these numbers already")


async def test_completed_decision_with_missing_workers_is_published_again(runtime: DistributedRuntime) -> None:
    connector, client = await connector_of(runtime, ManualClock()), VirtualConnectorClient(runtime, "ns")
    await connector.scale(ScalingDecision(num_decode=2))
    await client.complete(await client.get())
    outcome = await connector.scale(ScalingDecision(num_decode=2))
    assert (outcome.status, outcome.message) == (
        ScaleStatus.ACCEPTED,
        "decision 1 published with the numbers of the last",
    )
    decision = await client.get()
    assert (decision.num_decode_workers, decision.decision_id) == (2, 1)


async def test_held_planner_continues_from_the_decisions_of_the_active_one(runtime: DistributedRuntime) -> None:
    first, second = await connector_of(runtime, ManualClock()), await connector_of(runtime, ManualClock())
    client = VirtualConnectorClient(runtime, "ns")
    for number in (2, 3):
        await first.scale(ScalingDecision(num_decode=number))
        await client.complete(await client.get())
    assert (await second.counts()).expected_num_decode == 3
    await second.scale(ScalingDecision(num_decode=4))
    assert (await client.get()).decision_id == 2


async def test_ready_workers_are_those_of_discovery_and_expected_ones_those_of_the_decision(
    runtime: DistributedRuntime,
) -> None:
    assert isinstance(runtime.discovery, MemoryDiscovery)
    await register(runtime.discovery, record(1))
    connector = await connector_of(runtime, ManualClock())
    before = await connector.counts()
    assert (before.ready_num_decode, before.expected_num_decode) == (1, 1)
    await connector.scale(ScalingDecision(num_decode=3))
    after = await connector.counts()
    assert (after.ready_num_decode, after.expected_num_decode, after.expected_num_prefill) == (1, 3, 0)


async def test_unreached_decision_expires(runtime: DistributedRuntime) -> None:
    clock = ManualClock()
    connector = await connector_of(runtime, clock)
    await connector.scale(ScalingDecision(num_decode=3))
    clock.advance(MAX_WAIT_S)
    assert (await connector.counts()).expected_num_decode == 3
    clock.advance(1)
    assert (await connector.counts()).expected_num_decode == 0


async def test_restarted_planner_continues_from_the_last_decision(runtime: DistributedRuntime) -> None:
    first = await connector_of(runtime, ManualClock())
    await first.scale(ScalingDecision(num_decode=3))
    await first.close()
    assert (await (await connector_of(runtime, ManualClock())).counts()).expected_num_decode == 3


async def test_restarted_planner_waits_a_minute_for_workers_of_a_decision_that_was_carried_out(
    runtime: DistributedRuntime,
) -> None:
    first, client = await connector_of(runtime, ManualClock()), VirtualConnectorClient(runtime, "ns")
    await first.scale(ScalingDecision(num_decode=3))
    await client.complete(await client.get())
    clock = ManualClock()
    second = await connector_of(runtime, clock)
    assert (await second.counts()).expected_num_decode == 3
    clock.advance(RESTART_WAIT_S + 1)
    assert (await second.counts()).expected_num_decode == 0


async def test_capabilities_are_those_of_the_registered_workers(runtime: DistributedRuntime) -> None:
    assert isinstance(runtime.discovery, MemoryDiscovery)
    await register(runtime.discovery, record(1, context_length=64))
    found = await (await connector_of(runtime, ManualClock())).capabilities()
    assert found.decode is not None and found.decode.context_length == 64
