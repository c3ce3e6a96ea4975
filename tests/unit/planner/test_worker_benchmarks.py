"""Workers' own benchmarks: the first performance data of the planner, from the component of each role."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.settle import turns
from tests.unit.planner.connectors.test_workers import record
from tests.unit.planner.test_profile_data import REPLY

from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.config.planner_config import parse
from dynamo.planner.connectors.workers import LiveWorkers
from dynamo.planner.worker_benchmarks import measured_steps
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.unary import serve_unary_endpoint

WORKERS = LiveWorkers(prefill={1: record(1, "prefill")}, decode={2: record(2)})
SLA = {"namespace": "ns", "optimization_target": "sla", "load_predictor": "constant"}
NO_WAIT_S = 0.01


@pytest.fixture
async def runtime() -> AsyncIterator[DistributedRuntime]:
    runtime = DistributedRuntime(None, MemoryDiscovery(MemoryStore()), "mem", event_plane="mem")
    yield runtime
    await runtime.shutdown()


@asynccontextmanager
async def served(runtime: DistributedRuntime, component: str, reply: Any) -> AsyncIterator[list[Any]]:
    """Serve the endpoint of a component; yield the requests."""
    requests: list[Any] = []

    async def handle(request: Any, *, context: object) -> Any:
        requests.append(request)
        return reply

    endpoint = runtime.endpoint(f"ns.{component}.get_perf_metrics")
    serving = asyncio.ensure_future(serve_unary_endpoint(endpoint, handle))
    await turns()
    try:
        yield requests
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_each_scaled_role_has_the_steps_that_its_workers_measured(runtime: DistributedRuntime) -> None:
    async with served(runtime, "prefill", REPLY), served(runtime, "decode", REPLY) as requests:
        found = await measured_steps(runtime, parse(SLA), WORKERS)
        assert {role: len(steps) for role, steps in found.items()} == {EngineRole.PREFILL: 1, EngineRole.DECODE: 1}
        assert requests == [None]
        found = await measured_steps(runtime, parse({**SLA, "mode": "agg"}), WORKERS)
        assert {role: len(steps) for role, steps in found.items()} == {EngineRole.AGGREGATED: 2}


async def test_role_without_benchmark_data_keeps_the_steps_of_the_other_role(runtime: DistributedRuntime) -> None:
    missing = {"status": "error", "message": "no benchmark data"}
    async with served(runtime, "prefill", missing), served(runtime, "decode", REPLY):
        assert set(await measured_steps(runtime, parse(SLA), WORKERS)) == {EngineRole.DECODE}
    async with served(runtime, "prefill", {"results": 3}), served(runtime, "decode", REPLY):
        assert set(await measured_steps(runtime, parse(SLA), WORKERS)) == {EngineRole.DECODE}


async def test_measured_steps_wait_for_an_endpoint_that_is_registered_late(runtime: DistributedRuntime) -> None:
    asking = asyncio.ensure_future(measured_steps(runtime, parse({**SLA, "mode": "decode"}), WORKERS))
    await turns()
    async with served(runtime, "decode", REPLY):
        assert set(await asking) == {EngineRole.DECODE}


@pytest.mark.parametrize(
    "settings",
    [
        SLA,
        {**SLA, "optimization_target": "throughput"},
        {**SLA, "pre_deployment_sweeping_mode": "none"},
        {**SLA, "backend": "mocker"},
    ],
)
async def test_workers_without_the_benchmark_endpoint_have_no_steps(
    runtime: DistributedRuntime, settings: dict[str, Any]
) -> None:
    wait_s = NO_WAIT_S if settings == SLA else 3600.0
    async with asyncio.timeout(1.0):
        assert await measured_steps(runtime, parse(settings), WORKERS, wait_s=wait_s) == {}
