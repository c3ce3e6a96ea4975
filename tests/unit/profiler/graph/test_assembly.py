from collections.abc import Callable
from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.profiler.graph.assembly import Assembly
from dynamo.profiler.graph.components import main_container
from dynamo.profiler.search import Configuration
from dynamo.profiler.spec import ProfileSpec
from dynamo.protocols.kubernetes.common import KubeObject

MakeSpec = Callable[..., ProfileSpec]
CURVES: dict[str, Any] = {"prefill_raw_data.json": {}, "decode_raw_data.json": {}}


def assembled(spec: ProfileSpec, config: Configuration, backend: str = "vllm", **more: Any) -> list[KubeObject]:
    return Assembly(
        spec=spec, config=config, backend=backend, suffix=lambda: "0f0f", **{"curves": CURVES, **more}
    ).documents()


def kinds(documents: list[KubeObject]) -> list[str]:
    return [one["kind"] for one in documents]


def test_plain_request_yields_only_the_graph(spec_of: MakeSpec, pair: Configuration) -> None:
    documents = assembled(spec_of(), pair)
    assert kinds(documents) == ["DynamoGraphDeployment"]
    assert documents[-1]["metadata"]["name"] == "vllm-disagg-0f0f0f0f"


def test_config_maps_precede_the_graph(spec_of: MakeSpec, pair: Configuration) -> None:
    documents = assembled(spec_of(features={"planner": {"optimization_target": "sla"}}), pair)
    assert kinds(documents) == ["ConfigMap", "ConfigMap", "DynamoGraphDeployment"]


def test_mocker_replaces_the_engines(spec_of: MakeSpec, pair: Configuration) -> None:
    graph = assembled(spec_of(features={"mocker": {"enabled": True}, "kvRouter": {"enabled": True}}), pair)[-1]
    for one in graph["spec"]["components"]:
        main = main_container(one)
        assert main is not None
        assert main["image"] == "registry/dynamo-planner:1.6.1"
    frontend = main_container(graph["spec"]["components"][0])
    assert frontend is not None
    assert frontend["env"] == [{"name": "DYN_ROUTER_MODE", "value": "kv"}]


def test_name_is_that_of_the_request(spec_of: MakeSpec, pair: Configuration) -> None:
    assert assembled(spec_of(), pair, request_name="chat")[-1]["metadata"]["name"] == "chat-dgd"


def test_too_long_names_are_refused_with_the_name_to_shorten(spec_of: MakeSpec, pair: Configuration) -> None:
    with pytest.raises(ConfigError, match=r"metadata.name: 'a{40}': must be 7 characters shorter"):
        assembled(spec_of(), pair, request_name="a" * 40)


def test_override_is_merged_and_its_name_wins(spec_of: MakeSpec, pair: Configuration) -> None:
    override = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "mine", "labels": {"team": "a"}},
        "spec": {"components": [{"name": "prefill", "replicas": 5}]},
    }
    graph = assembled(spec_of(overrides={"dgd": override}), pair, request_name="chat")[-1]
    assert graph["metadata"] == {"name": "mine", "labels": {"team": "a"}}
    assert {one["name"]: one["replicas"] for one in graph["spec"]["components"]}["prefill"] == 5


def test_override_of_an_absent_component_is_refused(spec_of: MakeSpec, pair: Configuration) -> None:
    override = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "spec": {"components": [{"name": "other", "replicas": 5}]},
    }
    with pytest.raises(ConfigError, match=r"overrides.dgd.spec.components: other: the generated graph has"):
        assembled(spec_of(overrides={"dgd": override}), pair)


def test_override_without_version_is_v1alpha1(spec_of: MakeSpec, pair: Configuration) -> None:
    override = {"spec": {"services": {"prefill": {"replicas": 2}}}}
    graph = assembled(spec_of(overrides={"dgd": override}), pair)[-1]
    assert graph["apiVersion"] == "nvidia.com/v1beta1"
    assert {one["name"]: one["replicas"] for one in graph["spec"]["components"]}["prefill"] == 2


def test_tolerations_of_the_job_are_those_of_all_pods(spec_of: MakeSpec, pair: Configuration) -> None:
    toleration = {"key": "gpu", "operator": "Exists"}
    job = {"template": {"spec": {"tolerations": [toleration]}}}
    graph = assembled(spec_of(overrides={"profilingJob": job}), pair)[-1]
    for one in graph["spec"]["components"]:
        assert one["podTemplate"]["spec"]["tolerations"] == [toleration]


def test_remote_code_is_allowed_only_on_request(spec_of: MakeSpec, pair: Configuration) -> None:
    def flags(graph: KubeObject) -> int:
        mains = [main_container(one) for one in graph["spec"]["components"]]
        return sum("--trust-remote-code" in main["args"] for main in mains if main is not None)

    assert flags(assembled(spec_of(), pair)[-1]) == 0
    assert flags(assembled(spec_of(overrides={"trustRemoteCode": True}), pair)[-1]) == 2
    assert flags(assembled(spec_of(overrides={"trustRemoteCode": True}), pair, "trtllm")[-1]) == 0


def test_runtime_version_is_set_on_all_components(spec_of: MakeSpec, pair: Configuration) -> None:
    graph = assembled(spec_of(runtimeVersionOverride="1.6.0", features={"planner": {}}), pair)[-1]
    assert {one["runtimeVersionOverride"] for one in graph["spec"]["components"]} == {"1.6.0"}


def test_trtllm_workers_have_chunked_prefill(spec_of: MakeSpec, single: Configuration) -> None:
    main = main_container(assembled(spec_of(), single, "trtllm")[-1]["spec"]["components"][1])
    assert main is not None
    assert main["args"][-2:] == ["--trtllm.enable_chunked_prefill", "true"]
