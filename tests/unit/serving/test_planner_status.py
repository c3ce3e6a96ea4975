"""Status of planners: those that discovery lists are called, and one that does not reply is reported with its error."""

from collections.abc import AsyncIterator
from typing import Any

from dynamo.protocols.discovery import EndpointId
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.request_plane.memory import MemoryHub, MemoryPlane
from dynamo.runtime.streams import GeneratorHandler
from dynamo.serving.direct_calls import instances_of
from dynamo.serving.planner_status import PlannerStatuses


class Processes:
    """Runtimes that share one registry and one network."""

    def __init__(self) -> None:
        self._store, self._hub = MemoryStore(), MemoryHub()

    async def start(self) -> DistributedRuntime:
        runtime = DistributedRuntime(
            None, MemoryDiscovery(self._store), lambda dispatcher, _: MemoryPlane(dispatcher, self._hub)
        )
        await runtime.connect()
        return runtime


async def reply(request: Any) -> AsyncIterator[dict[str, Any]]:
    yield {"mode": "agg", "decisions": []}


async def refuse(request: Any) -> AsyncIterator[dict[str, Any]]:
    raise RuntimeError("the planner is broken")
    yield {}


async def test_planner_statuses_include_failed_planners() -> None:
    processes = Processes()
    frontend, good, bad = [await processes.start() for _ in range(3)]
    for runtime, namespace, handler in ((good, "one", reply), (bad, "two", refuse)):
        await runtime.endpoint(f"{namespace}.Planner.status").serve(GeneratorHandler(handler, runtime.tasks))
    statuses = PlannerStatuses(frontend)
    try:
        first, second = await statuses.read()
        assert first == {"namespace": "one", "instance_id": f"{good.instance_id:x}", "mode": "agg", "decisions": []}
        assert second["namespace"] == "two"
        assert "the planner is broken" in second["error"]
        assert len(await statuses.read()) == 2
    finally:
        for runtime in (frontend, good, bad):
            await runtime.shutdown(drain_timeout_s=0.0)


async def test_planner_status_is_empty_without_a_planner() -> None:
    runtime = await Processes().start()
    assert await PlannerStatuses(runtime).read() == []
    await runtime.shutdown(drain_timeout_s=0.0)


def test_planner_instances_are_those_with_a_status_endpoint() -> None:
    keys = [
        "dynamo/Planner/status/ff",
        "dynamo/Planner/generate/ff",
        "dynamo/backend/status/1",
        "dynamo/Planner/status/x",
    ]
    assert instances_of(keys, "status", "Planner") == [(EndpointId("dynamo", "Planner", "status"), 255)]
