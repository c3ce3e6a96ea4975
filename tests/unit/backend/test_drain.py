"""A worker that is drained loses no request, and serves again on command."""

import asyncio
from typing import Any

import pytest
from tests.settle import turns

from dynamo.backend.admission import Admission
from dynamo.backend.drain import ControlRoutes, DrainState, Service, WorkerStatus, joint
from dynamo.core.errors import EngineShutdown
from dynamo.core.tasks import TaskOwner
from dynamo.protocols.engine import PreprocessedRequest


class Reply:
    request_id = "r"
    is_cancelled = False

    def on_cancel(self, callback: Any) -> None: ...

    def token(self, token_id: int) -> None: ...

    def item(self, value: Any) -> None: ...

    def finish(self) -> None: ...

    def fail(self, error: BaseException) -> None: ...


class Stage:
    """A service whose environment records every call."""

    def __init__(self) -> None:
        self.outputs: list[str] = []
        self.is_quiet = asyncio.Event()
        self.admission = Admission(lambda _request, reply: self.running.append(reply), lambda _: None)
        self.running: list[Any] = []
        self.service = Service(
            self.admission, TaskOwner("test"), leave=self.leave, join=self.join, until_quiet=self.until_quiet
        )
        self.service.opened()

    async def leave(self) -> None:
        self.outputs.append("leave")

    async def join(self) -> None:
        self.outputs.append("join")

    async def until_quiet(self) -> None:
        await self.is_quiet.wait()

    def begin_drain(self) -> None:
        self.admission.enter(PreprocessedRequest("m", [1]), Reply())

    def drain_state(self) -> tuple[DrainState, int, bool, bool]:
        status = self.service.status()
        return status.state, status.inflight_requests, status.safe_to_delete, status.discovery_registered


@pytest.fixture
async def stage() -> Stage:
    return Stage()


async def turn() -> None:
    await turns(3)


async def test_draining_worker_accepts_late_requests_until_quiet_and_refuses_them_afterwards(stage: Stage) -> None:
    await stage.service.drain()
    stage.begin_drain()
    await turn()
    assert stage.drain_state() == (DrainState.DRAINING, 1, False, False)
    stage.is_quiet.set()
    await turn()
    with pytest.raises(EngineShutdown, match="draining"):
        stage.begin_drain()
    assert stage.drain_state() == (DrainState.DRAINING, 1, False, False)
    stage.running[0].finish()
    assert stage.drain_state() == (DrainState.DRAINED, 0, True, False)


async def test_second_drain_has_no_effect(stage: Stage) -> None:
    await asyncio.gather(stage.service.drain(), stage.service.drain())
    assert stage.outputs == ["leave"]


@pytest.mark.parametrize("is_quiet", [False, True])
async def test_resumed_worker_is_registered_and_accepts_requests(stage: Stage, is_quiet: bool) -> None:
    await stage.service.drain()
    if is_quiet:
        stage.is_quiet.set()
        await turn()
    await stage.service.resume()
    await turn()
    stage.begin_drain()
    assert stage.drain_state() == (DrainState.SERVING, 1, False, True)
    await stage.service.resume()
    assert stage.outputs == ["leave", "join"]


async def test_stopped_worker_cannot_resume(stage: Stage) -> None:
    await stage.service.drain()
    await stage.service.stop()
    await stage.service.resume()
    await stage.service.drain()
    assert stage.drain_state() == (DrainState.STOPPING, 0, True, False)
    assert stage.outputs == ["leave", "leave"]


async def test_control_routes_apply_to_all_workers_of_a_process(stage: Stage) -> None:
    other = Stage()
    other.is_quiet.set()
    routes = ControlRoutes(lambda: [stage.service, other.service])
    assert (await routes.status({}))["state"] == "serving"
    assert routes.is_serving()
    assert (await routes.drain({}))["discovery_registered"] is False
    assert not routes.is_serving()
    await turn()
    assert (await routes.status({}))["state"] == "draining"
    stage.is_quiet.set()
    await turn()
    assert await routes.status({}) == {
        "state": "drained",
        "inflight_requests": 0,
        "kv_transfers": "not_applicable",
        "safe_to_delete": True,
        "discovery_registered": False,
    }
    assert (await routes.resume({}))["state"] == "serving"
    assert routes.is_serving()


def test_joint_status_is_that_of_the_least_drained_worker() -> None:
    drained = WorkerStatus(DrainState.DRAINED, 0, "not_applicable", True, False)
    serving = WorkerStatus(DrainState.SERVING, 2, "not_applicable", False, True)
    assert joint([drained, serving]) == WorkerStatus(DrainState.SERVING, 2, "not_applicable", False, True)
    assert joint([drained, drained]).safe_to_delete
    assert not joint([]).safe_to_delete
