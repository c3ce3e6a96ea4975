import json
from collections.abc import Callable

from dynamo.planner.config.planner_config import parse
from dynamo.profiler.graph import features
from dynamo.profiler.graph.components import graph_of, main_container
from dynamo.profiler.search import Configuration
from dynamo.profiler.spec import ProfileSpec
from dynamo.protocols.kubernetes.common import KubeObject

MakeSpec = Callable[..., ProfileSpec]


def named(value: KubeObject, name: str) -> KubeObject:
    return next(one for one in value["spec"]["components"] if one["name"] == name)


def env(one: KubeObject) -> dict[str, str]:
    main = main_container(one)
    return {} if main is None else {each["name"]: each["value"] for each in main.get("env") or ()}


def test_kv_router_is_selected_by_a_variable_of_the_frontend_only(spec_of: MakeSpec, pair: Configuration) -> None:
    value = graph_of(spec_of(), pair, "vllm", "name")
    features.enable_kv_router(value)
    features.enable_kv_router(value)
    assert env(named(value, "Frontend")) == {"DYN_ROUTER_MODE": "kv"}
    assert env(named(value, "decode")) == {}


def test_vllm_workers_measure_the_steps_of_their_role(
    spec_of: MakeSpec, pair: Configuration, single: Configuration
) -> None:
    value = graph_of(spec_of(), pair, "vllm", "name")
    features.enable_benchmarks(value)
    assert env(named(value, "prefill"))["DYN_BENCHMARK_MODE"] == "prefill"
    alone = graph_of(spec_of(), single, "vllm", "name")
    features.enable_benchmarks(alone)
    assert env(named(alone, "worker"))["DYN_BENCHMARK_MODE"] == "agg"


def test_scaling_adapters_are_on_the_roles_that_the_planner_scales(spec_of: MakeSpec, pair: Configuration) -> None:
    for mode, scaled in (("disagg", {"prefill", "decode"}), ("prefill", {"prefill"}), ("decode", {"decode"})):
        value = graph_of(spec_of(), pair, "vllm", "name")
        features.add_scaling_adapters(value, parse({"mode": mode}))
        assert {one["name"] for one in value["spec"]["components"] if "scalingAdapter" in one} == scaled


def test_aggregated_worker_becomes_a_decode_worker_for_the_planner(spec_of: MakeSpec, single: Configuration) -> None:
    value = graph_of(spec_of(), single, "vllm", "name")
    features.add_scaling_adapters(value, parse({"mode": "agg"}))
    assert named(value, "worker")["type"] == "decode"
    assert "scalingAdapter" in named(value, "worker")


def test_advisory_planner_adds_no_scaling_adapters(spec_of: MakeSpec, pair: Configuration) -> None:
    value = graph_of(spec_of(), pair, "vllm", "name")
    features.add_scaling_adapters(value, parse({"advisory": True}))
    assert not any("scalingAdapter" in one for one in value["spec"]["components"])


def test_planner_uses_explicit_objectives_unless_configured_with_its_own(
    spec_of: MakeSpec, pair: Configuration
) -> None:
    planner = {"optimization_target": "sla", "itl_ms": 12}
    spec = spec_of(features={"planner": planner}, sla={"ttft": 700, "itl": 20})
    found = features.planner_config(spec, pair, None)
    assert (found["ttft_ms"], found["itl_ms"]) == (700, 12)
    assert (found["prefill_engine_num_gpu"], found["decode_engine_num_gpu"]) == (2, 4)
    assert found["model_name"] == "Qwen/Qwen3-32B"
    silent = spec_of(features={"planner": {"optimization_target": "sla"}})
    assert features.planner_config(silent, pair, None)["ttft_ms"] == 500


def test_planner_configuration_can_be_read_by_the_planner(spec_of: MakeSpec, pair: Configuration) -> None:
    spec = spec_of(features={"planner": {"optimization_target": "sla"}})
    interpolation = features.interpolation_spec(spec, pair, "vllm", 40960, (16, 6))
    found = json.loads(json.dumps(features.planner_config(spec, pair, interpolation)))
    read = parse(found)
    assert read.aic_interpolation is not None
    assert read.aic_interpolation.decode_pick == pair.decode.parallel


def test_planner_reads_its_configuration_from_a_mounted_config_map(spec_of: MakeSpec, pair: Configuration) -> None:
    spec = spec_of(features={"planner": {}})
    value = graph_of(spec, pair, "vllm", "name")
    made = features.add_planner(value, spec, {"a": 1}, lambda: "0f0f")
    assert made["metadata"]["name"] == "planner-config-0f0f"
    planner = named(value, "Planner")
    main = main_container(planner)
    assert main is not None
    assert main["image"] == "registry/dynamo-planner:1.6.1"
    assert main["args"] == ["--config", "/workspace/planner_config/planner_config.json"]
    assert planner["podTemplate"]["spec"]["volumes"][0]["configMap"] == {"name": "planner-config-0f0f"}


def test_simulated_workers_take_their_timing_from_the_profile_data(spec_of: MakeSpec) -> None:
    value = features.mocker_graph(spec_of(), "name")
    made = features.add_profile_data(value, {"prefill_raw_data.json": {}}, lambda: "0f0f", for_mocker=True)
    assert made["data"] == {"prefill_raw_data.json": "{}"}
    for name in ("prefill", "decode"):
        main = main_container(named(value, name))
        assert main is not None
        assert main["args"][-2:] == ["--planner-profile-data", "/workspace/profiling_results"]
        assert main["volumeMounts"][0]["readOnly"]
    assert "volumes" not in named(value, "Frontend")["podTemplate"]["spec"]


def test_real_workers_do_not_get_profile_data(spec_of: MakeSpec, pair: Configuration) -> None:
    value = graph_of(spec_of(), pair, "vllm", "name")
    features.add_profile_data(value, {"prefill_raw_data.json": {}}, lambda: "0f0f", for_mocker=False)
    assert not any("volumes" in one["podTemplate"]["spec"] for one in value["spec"]["components"])
