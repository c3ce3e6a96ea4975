"""Virtual connector: decisions in discovery, and numbers of workers that are those of discovery."""

from typing import Any

import msgspec
from tests.cluster.memory import MemoryCluster

from dynamo.core.clock import ManualClock
from dynamo.llm.virtual_connector import PlannerDecision, VirtualConnectorClient
from dynamo.planner.config.planner_config import PlannerConfig, parse
from dynamo.planner.connectors.base import ScaleStatus
from dynamo.planner.connectors.virtual import MAX_WAIT_S, VirtualConnector
from dynamo.planner.connectors.workers import WorkerDirectory
from dynamo.protocols.discovery import INSTANCES, MODEL_CARDS
from dynamo.protocols.model_card import ModelDeploymentCard, ModelRecord, RuntimeConfig
from dynamo.protocols.planner import ScalingDecision
from dynamo.runtime.discovery.base import Discovery


def settings(**more: Any) -> PlannerConfig:
    return parse({"environment": "virtual", "mode": "disagg", "namespace": "n", **more})


async def add_worker(discovery: Discovery, number: int, kind: str, *, is_served: bool = True) -> str:
    card = ModelDeploymentCard(
        display_name="M",
        slug="m",
        worker_type=kind,
        kv_cache_block_size=16,
        runtime_config=RuntimeConfig(total_kv_blocks=100, max_num_seqs=8, context_length=4096),
    )
    component = "prefill" if kind == "prefill" else "backend"
    record = ModelRecord(namespace="n", component=component, endpoint="generate", instance_id=number, card_json=card)
    key = f"n/{component}/generate/{number:x}"
    await discovery.put(MODEL_CARDS, key, msgspec.json.encode(record))
    if is_served:
        await discovery.put(INSTANCES, key, b"{}")
    return key


async def test_decision_is_published_and_expected_until_the_workers_are_there() -> None:
    cluster = MemoryCluster()
    runtime = cluster.runtime()
    connector = VirtualConnector(runtime, settings(), clock=ManualClock())
    await connector.start()
    await add_worker(runtime.discovery, 1, "prefill")
    await add_worker(runtime.discovery, 2, "decode")
    counts = await connector.counts()
    assert (counts.ready_num_prefill, counts.expected_num_prefill) == (1, 1)

    outcome = await connector.scale(ScalingDecision(num_decode=2))
    assert outcome.status is ScaleStatus.ACCEPTED
    environment = VirtualConnectorClient(runtime, "n")
    assert await environment.get() == PlannerDecision(-1, 2, 1)
    counts = await connector.counts()
    assert (counts.ready_num_decode, counts.expected_num_decode) == (1, 2)

    held = await connector.scale(ScalingDecision(num_decode=3))
    assert (held.status, held.message) == (ScaleStatus.HELD, "decision 1 is pending")
    await environment.complete(await environment.get())
    assert (await connector.scale(ScalingDecision(num_decode=3))).status is ScaleStatus.ACCEPTED
    await cluster.shutdown()


async def test_number_that_is_not_reached_in_time_is_given_up() -> None:
    cluster = MemoryCluster()
    runtime, clock = cluster.runtime(), ManualClock()
    connector = VirtualConnector(runtime, settings(), clock=clock)
    await connector.start()
    await add_worker(runtime.discovery, 2, "decode")
    await connector.scale(ScalingDecision(num_decode=5))
    clock.advance(MAX_WAIT_S + 1)
    counts = await connector.counts()
    assert (counts.ready_num_decode, counts.expected_num_decode) == (1, 1)
    await cluster.shutdown()


async def test_restarted_planner_continues_from_the_last_decision() -> None:
    cluster = MemoryCluster()
    runtime = cluster.runtime()
    first = VirtualConnector(runtime, settings(), clock=ManualClock())
    await first.start()
    await first.scale(ScalingDecision(num_prefill=2, num_decode=3))
    second = VirtualConnector(runtime, settings(), clock=ManualClock())
    await second.start()
    counts = await second.counts()
    assert (counts.expected_num_prefill, counts.expected_num_decode) == (2, 3)
    await cluster.shutdown()


async def test_workers_are_counted_by_card_and_instance_and_their_limits_read() -> None:
    cluster = MemoryCluster()
    runtime = cluster.runtime()
    await add_worker(runtime.discovery, 1, "aggregated")
    await add_worker(runtime.discovery, 2, "aggregated", is_served=False)
    await runtime.discovery.put(MODEL_CARDS, "n/backend/generate/3", b"not json")
    await runtime.discovery.put(INSTANCES, "n/backend/generate/3", b"{}")
    live = await WorkerDirectory(runtime.discovery, "n").live()
    assert (list(live.prefill), list(live.decode), live.model_name) == ([], [1], "M")
    other = await WorkerDirectory(runtime.discovery, "n", "another").live()
    assert (list(other.decode), other.model_name) == ([], None)

    connector = VirtualConnector(runtime, settings(mode="agg", decode_engine_num_gpu=2), clock=ManualClock())
    found = await connector.capabilities()
    assert found.prefill is None
    assert found.decode is not None
    assert (found.decode.num_gpu, found.decode.max_kv_tokens, found.decode.context_length) == (2, 1600, 4096)
    await cluster.shutdown()
