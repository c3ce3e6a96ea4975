"""The embedded frontend starts and stops servers of other protocols, and serves HTTP only if it has a port."""

import asyncio

import pytest

from dynamo.core.metrics import MetricsRegistry
from dynamo.http.embedded import FrontendOptions, ServedFrontend, run_frontend
from dynamo.http.routes.groups import metrics_group
from dynamo.runtime.distributed import DistributedRuntime


class RecordingServer:
    """Server that records its calls."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[str] = []
        self._error = error

    async def start(self) -> None:
        self.calls.append("start")
        if self._error is not None:
            raise self._error

    async def stop(self, budget_s: float) -> None:
        self.calls.append(f"stop within {budget_s:g} s")


async def test_servers_run_until_one_of_the_events_is_set() -> None:
    runtime = DistributedRuntime(None, "mem", "mem", event_plane="mem")
    frontend = ServedFrontend(runtime, FrontendOptions(port=None, groups=(metrics_group,)), MetricsRegistry())
    server, ends = RecordingServer(), (asyncio.Event(), asyncio.Event())
    frontend.servers.append(server)
    ends[1].set()
    await run_frontend(frontend, *ends)
    assert server.calls == ["start", "stop within 5 s"]
    await runtime.shutdown()


async def test_frontend_stops_when_a_server_fails_to_start() -> None:
    runtime = DistributedRuntime(None, "mem", "mem", event_plane="mem")
    frontend = ServedFrontend(runtime, FrontendOptions(port=None, groups=(metrics_group,)), MetricsRegistry())
    server = RecordingServer(OSError("port in use"))
    frontend.servers.append(server)
    with pytest.raises(OSError, match="port in use"):
        await run_frontend(frontend, asyncio.Event())
    assert server.calls == ["start", "stop within 5 s"]
    await runtime.shutdown()
