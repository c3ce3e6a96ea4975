"""Router mode of a graph's manifests."""

from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.ops.recipes.parts import SourcedObject
from dynamo.ops.router_patch import with_mode


def graph(front: dict[str, Any], worker: list[str]) -> SourcedObject:
    components = [
        {"name": "F", "type": "frontend", "podTemplate": {"spec": {"containers": [{"name": "main", **front}]}}},
        {"name": "W", "type": "worker", "podTemplate": {"spec": {"containers": [{"name": "main", "command": worker}]}}},
    ]
    value = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "g"},
        "spec": {"components": components},
    }
    return SourcedObject("f", value)


def front_of(value: Any) -> Any:
    return value["spec"]["components"][0]["podTemplate"]["spec"]["containers"][0]


def test_mode_is_a_variable_or_replaces_the_flag() -> None:
    before = graph({"args": ["--router-mode", "random"]}, ["python3", "-m", "dynamo.mocker"])
    (value,), notes = with_mode([before], "kv")
    assert front_of(value)["args"] == ["--router-mode", "kv"]
    assert front_of(value)["env"] == [
        {"name": "DYN_ROUTER_MODE", "value": "kv"},
        {"name": "DYN_ROUTER_USE_KV_EVENTS", "value": "true"},
    ]
    assert notes == []
    assert front_of(before.value)["args"] == ["--router-mode", "random"]
    (value,), _ = with_mode([graph({"env": [{"name": "DYN_ROUTER_MODE", "value": "kv"}]}, ["x"])], "least-loaded")
    assert front_of(value)["env"] == [{"name": "DYN_ROUTER_MODE", "value": "least-loaded"}]


@pytest.mark.parametrize(
    ("worker", "part"),
    [("dynamo.vllm", "add --kv-events-config"), ("dynamo.trtllm", "add --publish-kv-events")],
)
def test_worker_without_kv_events_is_noted(worker: str, part: str) -> None:
    _, notes = with_mode([graph({}, ["python3", "-m", worker])], "kv")
    assert [part in note for note in notes] == [True]
    assert with_mode([graph({}, ["python3", "-m", worker])], "kv", uses_events=False)[1] == []
    assert with_mode([graph({}, ["python3", "-m", worker])], "random")[1] == []


def test_script_that_sets_the_flag_is_noted() -> None:
    script = {"command": ["sh", "-c", "python3 -m dynamo.frontend --router-mode random"]}
    _, notes = with_mode([graph(script, ["x"])], "kv")
    assert "edit the script" in notes[0]


def test_manifests_without_frontend_are_refused() -> None:
    with pytest.raises(ConfigError, match="no component of type frontend"):
        with_mode([], "kv")
