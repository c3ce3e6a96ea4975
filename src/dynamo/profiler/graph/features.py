"""Features of a graph: mocker, KV router, planner with its ConfigMap and scaling adapters, profile data, benchmarks."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from dynamo.planner.config.perf_model import AicBackend, AicInterpolationSpec
from dynamo.planner.config.planner_config import Mode, PlannerConfig, ScalingPolicy, SweepMode
from dynamo.profiler.graph.components import WORKERS, component, container, graph, main_container
from dynamo.profiler.graph.images import planner_image
from dynamo.profiler.search import Configuration
from dynamo.profiler.spec import ProfileSpec
from dynamo.protocols.kubernetes.common import KubeObject

PROFILE_DATA_MOUNT = "/workspace/profiling_results"
PLANNER_CONFIG_MOUNT = "/workspace/planner_config"
PLANNER_DIRECTORY = "/workspace/components/src/dynamo/planner"
PLANNER_CONFIG_KEY = "planner_config.json"
BENCHMARK_MODES = {"prefill": "prefill", "decode": "decode", "worker": "agg"}
SCALED_TYPES = {
    Mode.PREFILL: ("prefill",),
    Mode.DECODE: ("decode",),
    Mode.AGG: ("decode",),
    Mode.DISAGG: ("prefill", "decode"),
}


def mocker_graph(spec: ProfileSpec, name: str) -> KubeObject:
    """Return a graph of simulated engines: one prefill and one decode worker, in the profiler's image."""
    frontend = container(spec.image, ["python3"], ["-m", "dynamo.frontend"], has_secret=False)
    components = [component("Frontend", "frontend", 1, frontend)]
    for role in ("decode", "prefill"):
        args = ["--model-path", spec.model, "--model-name", spec.model]
        args += ["--speedup-ratio", "1.0", "--disaggregation-mode", role]
        main = container(spec.image, ["python3", "-m", "dynamo.mocker"], args)
        main["workingDir"] = "/workspace"
        components.append(component(role, role, 1, main))
    return graph(name, components)


def set_env(main: KubeObject, name: str, value: str) -> None:
    """Set a variable of a container; it replaces earlier ones of its name."""
    kept = [one for one in main.get("env") or () if one.get("name") != name]
    main["env"] = [*kept, {"name": name, "value": value}]


def enable_kv_router(value: KubeObject) -> None:
    """Select the KV router by a variable, which a flag of an override still overrides."""
    for one in value["spec"]["components"]:
        main = main_container(one)
        if one.get("type") == "frontend" and main is not None:
            set_env(main, "DYN_ROUTER_MODE", "kv")


def enable_benchmarks(value: KubeObject) -> None:
    """Let vLLM workers measure their own steps at start-up, which the planner reads from `get_perf_metrics`."""
    for one in value["spec"]["components"]:
        mode, main = BENCHMARK_MODES.get(str(one.get("type"))), main_container(one)
        if mode is not None and main is not None:
            set_env(main, "DYN_BENCHMARK_MODE", mode)


def enable_chunked_prefill(value: KubeObject) -> None:
    """Enable chunked prefill of TensorRT-LLM workers, so that their token limit may be below the prompt's length."""
    for one in value["spec"]["components"]:
        main = main_container(one)
        if one.get("type") in WORKERS and main is not None:
            main["args"] = [*main["args"], "--trtllm.enable_chunked_prefill", "true"]


def add_scaling_adapters(value: KubeObject, planner: PlannerConfig) -> None:
    """Add scaling adapters to the workers that the planner scales; a worker that serves both phases becomes type decode."""
    if planner.advisory:
        return
    scaled = SCALED_TYPES[planner.mode]
    for one in value["spec"]["components"]:
        kind = one.get("type")
        if kind == "worker" and planner.mode is Mode.AGG:
            one["type"] = kind = "decode"
        if kind in scaled:
            one["scalingAdapter"] = {**(one.get("scalingAdapter") or {}), "enabled": True}


def planner_config(
    spec: ProfileSpec, config: Configuration, interpolation: AicInterpolationSpec | None
) -> dict[str, Any]:
    """Return the planner's configuration as JSON data: the request's, with model, GPUs per engine and objectives."""
    assert spec.planner is not None
    prefill = config.prefill or config.decode
    changes: dict[str, Any] = {
        "model_name": spec.planner.model_name or spec.model,
        "prefill_engine_num_gpu": prefill.parallel.num_gpus,
        "decode_engine_num_gpu": config.decode.parallel.num_gpus,
        "profile_results_dir": PROFILE_DATA_MOUNT,
    }
    if interpolation is not None:
        changes["aic_interpolation"] = interpolation
    if spec.latency.e2e_ms is None and spec.latency.is_explicit:
        if not {"ttft_ms", "ttft"} & spec.planner_fields:
            changes["ttft_ms"] = float(spec.latency.ttft_ms or 0.0)
        if not {"itl_ms", "itl"} & spec.planner_fields:
            changes["itl_ms"] = float(spec.latency.itl_ms or 0.0)
    found = dataclasses.replace(spec.planner, **changes).as_json()
    if spec.planner.scaling_policy is ScalingPolicy.STANDARD:
        del found["scaling_policy"]  # Released planners do not have it.
    return found


def interpolation_spec(
    spec: ProfileSpec, config: Configuration, backend: str, max_context: int, granularity: tuple[int, int]
) -> AicInterpolationSpec | None:
    """Return what a released planner needs to sweep its own performance database; None without throughput scaling."""
    planner = spec.planner
    is_used = planner is not None and planner.enable_throughput_scaling and spec.sweep_mode is SweepMode.RAPID
    if config.prefill is None or not is_used:
        return None
    return AicInterpolationSpec(
        hf_id=spec.model,
        system=spec.sku,
        backend=AicBackend(backend),
        isl=spec.traffic.isl,
        osl=spec.traffic.osl,
        sweep_max_context_length=max_context,
        prefill_interpolation_granularity=granularity[0],
        decode_interpolation_granularity=granularity[1],
        prefill_pick=config.prefill.parallel,
        decode_pick=config.decode.parallel,
    )


def config_map(name: str, data: Mapping[str, Any]) -> KubeObject:
    """Return a ConfigMap whose values are JSON documents."""
    texts = {key: json.dumps(value) for key, value in data.items()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": texts}


def mount_config_map(one: KubeObject, name: str, path: str) -> None:
    """Mount a ConfigMap into a component's main container."""
    pod = one["podTemplate"]["spec"]
    pod["volumes"] = [*(pod.get("volumes") or ()), {"name": name, "configMap": {"name": name}}]
    main = main_container(one)
    assert main is not None
    mounts = main.get("volumeMounts") or ()
    main["volumeMounts"] = [*mounts, {"name": name, "mountPath": path, "readOnly": True}]


def add_planner(
    value: KubeObject, spec: ProfileSpec, config: Mapping[str, Any], suffix: Callable[[], str]
) -> KubeObject:
    """Add the planner to a graph, and return the ConfigMap of its configuration."""
    args = ["--config", f"{PLANNER_CONFIG_MOUNT}/{PLANNER_CONFIG_KEY}"]
    main = container(planner_image(spec.image), ["python3", "-m", "dynamo.planner"], args, has_secret=False)
    main["workingDir"] = PLANNER_DIRECTORY
    planner = component("Planner", "planner", 1, main)
    made = config_map(f"planner-config-{suffix()}", {PLANNER_CONFIG_KEY: config})
    mount_config_map(planner, made["metadata"]["name"], PLANNER_CONFIG_MOUNT)
    value["spec"]["components"].append(planner)
    return made


def add_profile_data(
    value: KubeObject, curves: Mapping[str, Any], suffix: Callable[[], str], *, for_mocker: bool
) -> KubeObject:
    """Mount the performance data into the planner, and into simulated workers, which use it as their timing."""
    made = config_map(f"planner-profile-data-{suffix()}", curves)
    name = made["metadata"]["name"]
    for one in value["spec"]["components"]:
        is_mocker = for_mocker and one.get("type") in WORKERS
        if is_mocker:
            main = main_container(one)
            assert main is not None
            main["args"] = [*main["args"], "--planner-profile-data", PROFILE_DATA_MOUNT]
        if is_mocker or one.get("type") == "planner":
            mount_config_map(one, name, PROFILE_DATA_MOUNT)
    return made
