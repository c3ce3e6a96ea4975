"""Controls of TensorRT-LLM: offered only where its workers support them."""

from typing import Any

from tests.unit.trtllm import scripted
from tests.unit.vllm.conftest import Host

from dynamo.trtllm.controls import EXTENSION, TrtllmControls

RAY = {"orchestrator_type": "ray"}


def made(**args: Any) -> tuple[scripted.LLM, Host, TrtllmControls]:
    llm, host = scripted.LLM("m"), Host()
    return llm, host, TrtllmControls(llm, host, args)


def test_controls_without_worker_support_have_no_route() -> None:
    assert made()[2].routes() == {}
    assert set(made(**RAY)[2].routes()) == {"control/release_memory_occupation", "control/resume_memory_occupation"}
    assert made(**RAY)[2].endpoints() == {}
    assert "clear_kv_blocks" in made(**RAY, ray_worker_extension_cls=EXTENSION)[2].endpoints()


async def test_memory_release_deregisters_the_worker_until_all_memory_is_resumed() -> None:
    llm, host, controls = made(**RAY)
    routes = controls.routes()
    assert (await routes["control/release_memory_occupation"]({}))["status"] == "ok"
    assert host.service == ["left"]
    assert "model" in (await routes["control/resume_memory_occupation"]({"tags": ["kv_cache"]}))["message"]
    await routes["control/resume_memory_occupation"]({"tags": ["model"]})
    assert host.service == ["left", "back"]
    assert llm.calls == [("sleep", ["model", "kv_cache"]), ("wakeup", ["kv_cache"]), ("wakeup", ["model"])]
    assert (await routes["control/release_memory_occupation"]({"tags": "x"}))["status"] == "error"


async def test_failed_memory_release_keeps_the_worker_registered() -> None:
    llm, host, controls = made(**RAY)
    llm.refuses = ValueError("not supported")
    reported = await controls.routes()["control/release_memory_occupation"]({})
    assert (reported["status"], host.service) == ("error", ["left", "back"])


async def test_weight_cache_and_profile_controls_call_the_worker_extension() -> None:
    llm, _, controls = made(**RAY, ray_worker_extension_cls=EXTENSION)
    routes = controls.routes()
    await routes["control/update_weights_from_ipc"]({"ipc_handles": {"gpu": "x"}})
    await routes["control/start_profile"]({})
    await routes["control/stop_profile"]({})
    await routes["flush_cache"]({})
    assert (await controls.endpoints()["clear_kv_blocks"]({}))["status"] == "success"
    assert [call[0] for call in llm.calls] == [
        "update_weights", "start_profile", "stop_profile", "reset_prefix_cache", "reset_prefix_cache"
    ]  # fmt: skip
    assert (await routes["control/update_weights_from_ipc"]({"ipc_handles": 5}))["status"] == "error"
