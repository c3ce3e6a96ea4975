"""Worker control: status with the load of each rank, drain and resume, and the refusal of other actions."""

import pytest

from dynamo.backend.drain import DrainState, WorkerStatus
from dynamo.backend.worker_control import WorkerControl
from dynamo.core.errors import InvalidArgument
from dynamo.protocols.load import WorkerLoad


class DrainableService:
    """Service that records its calls."""

    def __init__(self) -> None:
        self.state = DrainState.SERVING

    async def drain(self) -> None:
        self.state = DrainState.DRAINED

    async def resume(self) -> None:
        self.state = DrainState.SERVING

    def status(self) -> WorkerStatus:
        return WorkerStatus(self.state, 0, "not_applicable", False, self.state is DrainState.SERVING)


def control(service: DrainableService) -> WorkerControl:
    loads = {1: WorkerLoad(dp_rank=1, kv_used_blocks=3, kv_total_blocks=9), 0: WorkerLoad()}
    return WorkerControl(service, {"engine": "mocker"}, loads=lambda: loads, wall=lambda: 5.0)  # type: ignore[arg-type]


async def test_status_has_the_state_and_the_load_of_each_rank() -> None:
    found = await control(DrainableService()).answer({"action": "status"})
    assert (found["state"], found["engine"], found["started_at"]) == ("serving", "mocker", 5.0)
    assert [(one["dp_rank"], one["kv_used_blocks"], one["kv_total_blocks"]) for one in found["ranks"]] == [
        (0, 0, 0),
        (1, 3, 9),
    ]


async def test_actions_return_the_status_after_them() -> None:
    worker = control(DrainableService())
    assert (await worker.answer({"action": "drain"}))["state"] == "drained"
    assert (await worker.answer({}))["state"] == "drained"
    assert (await worker.answer({"action": "resume"}))["state"] == "serving"


async def test_unknown_control_action_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="action 'stop': expected one of status, drain, resume"):
        await control(DrainableService()).answer({"action": "stop"})
