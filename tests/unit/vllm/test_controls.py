"""Controls: effect of system port requests on the engine."""

from typing import Any

import pytest
from tests.unit.vllm import scripted
from tests.unit.vllm.conftest import Host

from dynamo.vllm.controls import VllmControls


class Panel:
    def __init__(self, *, has_training: bool = True) -> None:
        self.llm, self.host = scripted.AsyncLLM(None), Host()
        self.controls = VllmControls(self.llm, self.host, has_training=has_training)

    async def press(self, name: str, **body: Any) -> dict[str, Any]:
        return await (self.controls.routes() | self.controls.endpoints())[name](body)


async def test_sleep_deregisters_the_worker_and_full_wake_up_registers_it() -> None:
    panel = Panel()
    assert (await panel.press("control/sleep", level=2))["status"] == "ok"
    assert panel.host.service == ["left"]
    assert (await panel.press("control/sleep"))["message"] == "Engine already asleep"
    assert (await panel.press("control/wake_up", tags=["weights"]))["message"] == "Engine partly awake"
    assert panel.host.service == ["left"]
    await panel.press("control/wake_up")
    assert panel.host.service == ["left", "back"]
    assert panel.llm.calls == [("sleep", 2), ("wake_up", ["weights"]), ("wake_up", None)]
    assert (await panel.press("control/wake_up"))["message"] == "Engine already awake"


async def test_failed_sleep_keeps_the_worker_registered() -> None:
    panel = Panel()
    panel.llm.refuses = RuntimeError("no allocator")
    found = await panel.press("control/sleep")
    assert found == {"status": "error", "message": "RuntimeError: no allocator"}
    assert panel.host.service == ["left", "back"]


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("control/sleep", {"level": 9}),
        ("control/scale_elastic_ep", {"new_data_parallel_size": 0}),
        ("pause_generation", {"mode": "odd"}),
        ("abort_request", {}),
        ("update_weights_from_disk", {}),
        ("set_weight_version", {}),
    ],
)
async def test_invalid_control_request_is_refused_without_an_engine_call(name: str, body: dict[str, Any]) -> None:
    panel = Panel()
    assert (await panel.press(name, **body))["status"] == "error"
    assert panel.llm.calls == []


@pytest.mark.parametrize(
    ("name", "body", "call"),
    [
        ("control/start_profile", {"profile_prefix": "a"}, ("start_profile", "a")),
        ("control/stop_profile", {}, ("stop_profile",)),
        ("control/scale_elastic_ep", {"new_data_parallel_size": 2}, ("scale_elastic_ep", 2)),
        ("pause_generation", {"mode": "keep", "clear_cache": False}, ("pause_generation", "keep", False)),
        ("resume_generation", {}, ("resume_generation",)),
        ("flush_cache", {}, ("reset_prefix_cache",)),
        ("abort_request", {"request_id": "r"}, ("abort", "r")),
        ("set_weight_version", {"weight_version": 3}, ("update_weight_version", "3")),
        ("clear_kv_blocks", {}, ("reset_prefix_cache",)),
    ],
)
async def test_each_control_calls_a_vllm_method(name: str, body: dict[str, Any], call: tuple[Any, ...]) -> None:
    panel = Panel()
    assert (await panel.press(name, **body))["status"] in ("ok", "success")
    assert panel.llm.calls == [call]


async def test_planner_gets_the_reply_of_a_worker_without_a_benchmark() -> None:
    assert await Panel().press("get_perf_metrics") == {"status": "error", "message": "no benchmark data"}


async def test_weight_update_pauses_generation_and_resumes_it() -> None:
    panel = Panel()
    await panel.press("update_weights_from_disk", model_path="/new", weight_version="8")
    assert panel.llm.calls == [
        ("pause_generation", "wait", True),
        ("collective_rpc", "reload_weights", {"weights_path": "/new"}),
        ("update_weight_version", "8"),
        ("resume_generation",),
    ]
    assert (await panel.press("get_weight_version"))["version"] == "7"


async def test_dead_engine_fails_the_liveness_probe() -> None:
    panel = Panel()
    assert (await panel.press("liveness_probe"))["alive"] is True
    panel.llm.is_dead = True
    assert (await panel.press("liveness_probe"))["status"] == "error"


def test_training_controls_require_the_training_flag() -> None:
    assert "pause_generation" not in Panel(has_training=False).controls.routes()
