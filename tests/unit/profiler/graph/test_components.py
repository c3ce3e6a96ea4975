from collections.abc import Callable
from dataclasses import replace

import pytest

from dynamo.planner.config.parallelization import PickedParallelConfig
from dynamo.profiler.graph.components import engine_args, graph_of, main_container
from dynamo.profiler.search import Configuration, EngineChoice
from dynamo.profiler.spec import ProfileSpec
from dynamo.protocols.kubernetes.common import KubeObject, decode
from dynamo.protocols.kubernetes.v1beta1 import DynamoGraphDeployment

MakeSpec = Callable[..., ProfileSpec]


def named(value: KubeObject, name: str) -> KubeObject:
    return next(one for one in value["spec"]["components"] if one["name"] == name)


@pytest.mark.parametrize("backend", ["vllm", "sglang", "trtllm"])
def test_graph_is_a_valid_resource(spec_of: MakeSpec, pair: Configuration, single: Configuration, backend: str) -> None:
    for config in (pair, single):
        value = graph_of(spec_of(), config, backend, "name")
        assert decode(DynamoGraphDeployment, value).spec.components


def test_disaggregated_graph_has_both_roles_with_their_engines(spec_of: MakeSpec, pair: Configuration) -> None:
    value = graph_of(spec_of(), pair, "vllm", "name")
    prefill = named(value, "prefill")
    assert (prefill["type"], prefill["replicas"]) == ("prefill", 3)
    main = main_container(prefill)
    assert main is not None
    assert main["image"] == "registry/vllm-runtime:1.6.1"
    assert main["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    text = " ".join(main["args"])
    assert "--tensor-parallel-size 2" in text
    assert "--disaggregation-mode prefill" in text
    assert '"kv_role":"kv_producer"' in text


def test_engines_of_several_nodes_state_their_number(spec_of: MakeSpec, single: Configuration) -> None:
    wide = replace(single, decode=EngineChoice(parallel=PickedParallelConfig(dp=16, moe_ep=16)))
    worker = named(graph_of(spec_of(), wide, "vllm", "name"), "worker")
    assert worker["multinode"] == {"nodeCount": 2}
    main = main_container(worker)
    assert main is not None
    assert main["resources"]["limits"]["nvidia.com/gpu"] == "8"


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        ("vllm", "--tensor-parallel-size 1 --data-parallel-size 8 --enable-expert-parallel"),
        ("sglang", "--tp 8 --dp 8 --enable-dp-attention --ep 8"),
        ("trtllm", "--tensor-parallel-size 8 --expert-parallel-size 8 --enable-attention-dp"),
    ],
)
def test_data_parallel_attention_in_the_flags_of_each_backend(backend: str, text: str) -> None:
    choice = EngineChoice(parallel=PickedParallelConfig(dp=8, moe_ep=8), batch=16)
    assert text in " ".join(engine_args(backend, choice))


def test_model_in_a_volume_is_mounted_into_all_components(spec_of: MakeSpec, pair: Configuration) -> None:
    spec = spec_of(modelCache={"pvcName": "models", "pvcModelPath": "qwen"})
    value = graph_of(spec, pair, "vllm", "name")
    for one in value["spec"]["components"]:
        main = main_container(one)
        assert main is not None
        assert main["volumeMounts"] == [{"name": "models", "mountPath": "/opt/model-cache"}]
    main = main_container(named(value, "decode"))
    assert main is not None
    assert "--model /opt/model-cache/qwen --served-model-name Qwen/Qwen3-32B" in " ".join(main["args"])
    frontend = main_container(named(value, "Frontend"))
    assert frontend is not None
    assert frontend["args"][-4:] == ["--model-name", "Qwen/Qwen3-32B", "--model-path", "/opt/model-cache/qwen"]


def test_volume_without_path_is_the_cache_of_the_hub(spec_of: MakeSpec, pair: Configuration) -> None:
    value = graph_of(spec_of(modelCache={"pvcName": "models"}), pair, "vllm", "name")
    main = main_container(named(value, "decode"))
    assert main is not None
    assert main["env"] == [{"name": "HF_HOME", "value": "/opt/model-cache"}]
