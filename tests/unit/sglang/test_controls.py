"""SGLang controls: their requests, requests that they interrupt, and methods that a flag names."""

from typing import Any

import pytest
from tests.unit.sglang import scripted
from tests.unit.vllm.conftest import Host

from dynamo.core.errors import InvalidArgument
from dynamo.sglang.controls import EngineRoute, SglangControls, read_engine_route


class Scripted:
    def __init__(self, *own: str, **more: Any) -> None:
        self.engine = scripted.Engine(server_args=scripted.ServerArgs())
        self.manager = self.engine.tokenizer_manager
        self.host = Host()
        routes = [read_engine_route(text) for text in own]
        self.controls = SglangControls(self.engine, scripted.io_struct, self.host, own=routes, **more)

    async def send_request(self, name: str, /, **body: Any) -> dict[str, Any]:
        routes = {**self.controls.routes(), **self.controls.endpoints()}
        return await routes[name](body)


async def test_memory_release_deregisters_the_worker_until_all_memory_is_resumed() -> None:
    made = Scripted()
    assert (await made.send_request("control/release_memory_occupation"))["status"] == "ok"
    assert made.host.service == ["left"]
    reported = await made.send_request("control/resume_memory_occupation", tags=["weights"])
    assert "kv_cache" in reported["message"]
    assert made.host.service == ["left"]
    await made.send_request("control/resume_memory_occupation")
    assert made.host.service == ["left", "back"]
    assert made.manager.calls == [
        ("release_memory_occupation", None),
        ("resume_memory_occupation", ["weights"]),
        ("resume_memory_occupation", None),
    ]


async def test_failed_memory_release_keeps_the_worker_registered() -> None:
    made = Scripted()
    made.manager.refuses = RuntimeError("no memory saver")
    reported = await made.send_request("control/release_memory_occupation")
    assert reported == {"status": "error", "message": "RuntimeError: no memory saver"}
    assert made.host.service == ["left", "back"]


async def test_invalid_memory_tags_are_refused_without_deregistration() -> None:
    made = Scripted()
    assert (await made.send_request("control/release_memory_occupation", tags=["lungs"]))["status"] == "error"
    assert made.host.service == []


async def test_control_body_fields_are_passed_to_the_sglang_request() -> None:
    made = Scripted()
    reported = await made.send_request("control/update_weights_from_disk", model_path="/m", weight_version="7")
    assert reported == {"status": "ok", "message": "told"}
    assert made.manager.calls == [("update_weights_from_disk", {"model_path": "/m", "weight_version": "7"})]
    reported = await made.send_request("control/update_weights_from_disk", modell_path="/m")
    assert (reported["status"], "modell_path" in reported["message"]) == ("error", True)
    made.manager.succeeds = False
    assert (await made.send_request("control/update_weights_from_tensor", serialized_named_tensors=[]))[
        "status"
    ] == "error"


async def test_training_controls_require_the_training_flag() -> None:
    assert "pause_generation" not in Scripted().controls.routes()
    made = Scripted(has_training=True)
    await made.send_request("pause_generation", mode="retract")
    await made.send_request("resume_generation")
    await made.send_request("abort_request", request_id="r")
    await made.send_request("set_weight_version", weight_version=8)
    assert (await made.send_request("get_weight_version"))["version"] == "default"
    assert made.manager.calls[0] == ("pause_generation", "retract")
    assert made.manager.calls[-1] == ("update_weight_version", {"new_version": "8"})
    assert made.manager.aborted == ["r"]
    assert (await made.send_request("pause_generation", mode="nap"))["status"] == "error"
    assert (await made.send_request("abort_request"))["status"] == "error"


async def test_cache_in_use_is_not_cleared() -> None:
    made = Scripted()
    assert (await made.send_request("clear_kv_blocks"))["status"] == "success"
    made.manager.succeeds = False
    assert await made.send_request("clear_kv_blocks") == {"status": "error", "message": "busy"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a/pids=get_all_child_pids:engine", EngineRoute("a/pids", "get_all_child_pids", "engine")),
        ("/config_value:tm", EngineRoute("config_value", "config_value", "tm")),
        ("a/flush_cache", EngineRoute("a/flush_cache", "flush_cache", None)),
    ],
)
def test_custom_engine_route_is_parsed(text: str, expected: EngineRoute) -> None:
    assert read_engine_route(text) == expected


@pytest.mark.parametrize("text", ["", "a=", "a=b:c", "a=_secret", "a=b.c"])
def test_malformed_engine_route_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        read_engine_route(text)


async def test_custom_routes_call_methods_with_the_body_fields() -> None:
    made = Scripted("a/pids=get_all_child_pids:engine", "version=config_value:tm", "state=get_internal_state")
    assert await made.send_request("a/pids") == {"status": "ok", "result": []}
    assert await made.send_request("version", name="weight_version") == {"status": "ok", "result": "default"}
    assert (await made.send_request("version", other=1))["status"] == "error"
    assert (await made.send_request("state"))["result"] == [{"effective_max_running_requests_per_dp": 8}]


def test_missing_sglang_method_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="no method sing"):
        Scripted("a=sing")
