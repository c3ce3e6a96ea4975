from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.planner.config.planner_config import SweepMode
from dynamo.profiler.spec import ProfileSpec, parse_text, path_in_cache, profile_spec
from dynamo.protocols.kubernetes.v1beta1 import ModelCache

BASE: dict[str, Any] = {
    "model": "Qwen/Qwen3-32B",
    "image": "registry/dynamo-planner:1.6.1",
    "hardware": {"gpuSku": "h200_sxm", "totalGpus": 16, "numGpusPerNode": 8},
}


def spec(**changes: Any) -> ProfileSpec:
    return profile_spec({**BASE, **changes})


def test_absent_fields_have_their_defaults() -> None:
    found = spec()
    assert (found.traffic.isl, found.traffic.osl) == (4000, 1000)
    assert (found.latency.ttft_ms, found.latency.itl_ms) == (2000, 30)
    assert not found.latency.is_explicit
    assert (found.backend, found.is_thorough, found.picking_mode) == ("auto", False, "default")


def test_total_gpus_default_to_one_node() -> None:
    assert spec(hardware={"gpuSku": "h200_sxm", "numGpusPerNode": 8}).total_gpus == 8


def test_numbers_in_text_are_accepted_as_in_released_profilers() -> None:
    assert spec(workload={"isl": "3000", "osl": "150"}).traffic.isl == 3000


def test_end_to_end_latency_replaces_the_other_objectives() -> None:
    latency = spec(sla={"e2eLatency": 10000}).latency
    assert (latency.ttft_ms, latency.itl_ms) == (None, None)
    assert latency.met_by(1000, 9, 1000)
    assert not latency.met_by(1100, 9, 1000)


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({"features": {"planner": {}}}, "autoscale"),
        ({"workload": {"requestRate": 5}}, "load_match"),
        ({"workload": {"concurrency": 5}}, "load_match"),
        ({"features": {"planner": {}}, "workload": {"requestRate": 5}}, "autoscale"),
        ({}, "default"),
    ],
)
def test_picking_mode_follows_planner_and_load(changes: dict[str, Any], mode: str) -> None:
    assert spec(**changes).picking_mode == mode


def test_curves_are_needed_by_the_mocker_and_by_throughput_scaling() -> None:
    assert spec(features={"mocker": {"enabled": True}}).needs_curves
    assert spec(features={"planner": {"optimization_target": "sla"}}).needs_curves
    assert not spec(features={"planner": {}}).needs_curves
    assert not spec(
        features={"planner": {"optimization_target": "sla", "pre_deployment_sweeping_mode": "none"}}
    ).needs_curves


def test_sweep_mode_of_a_request_without_planner_is_the_search_strategy() -> None:
    assert spec(searchStrategy="thorough", backend="vllm").sweep_mode is SweepMode.THOROUGH
    assert spec().sweep_mode is SweepMode.RAPID


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"image": None}, "image: missing"),
        ({"hardware": None}, "hardware.gpuSku: missing"),
        ({"hardware": {"gpuSku": "h201", "numGpusPerNode": 8}}, "hardware.gpuSku: 'h201': must be one of"),
        ({"hardware": {"gpuSku": "h200_sxm", "numGpusPerNode": 0}}, "hardware.numGpusPerNode: 0"),
        ({"hardware": {"gpuSku": "h200_sxm", "numGpusPerNode": 8, "totalGpus": 0}}, "hardware.totalGpus: 0"),
        ({"workload": {"requestRate": 5, "concurrency": 5}}, "only one of them"),
        ({"workload": {"isl": 0}}, "workload.isl: 0: must be positive"),
        ({"sla": {"ttft": -1}}, "sla.ttft: -1: must be positive"),
        ({"sla": {"ttft": 100, "e2eLatency": 1000}}, "mutually exclusive"),
        ({"sla": {"ttft": None}}, "needs both ttft and itl"),
        ({"backend": "tgi"}, r"backend"),
        ({"searchStrategy": "thorough"}, "backend: auto: must be vllm"),
        (
            {"features": {"mocker": {"enabled": True}, "planner": {"pre_deployment_sweeping_mode": "none"}}},
            "features.planner.pre_deployment_sweeping_mode: none",
        ),
        ({"features": {"planner": {"mode": "both"}}}, "features.planner.mode: 'both'"),
    ],
)
def test_contradictions_are_refused_in_one_line_that_names_the_field(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        spec(**changes)
    assert "\n" not in str(refused.value)


def test_whole_resource_is_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="below its `spec`"):
        profile_spec({"apiVersion": "nvidia.com/v1beta1", "spec": BASE})


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("deepseek-r1", "/opt/model-cache/deepseek-r1"),
        ("/deepseek-r1/", "/opt/model-cache/deepseek-r1"),
        ("/opt/model-cache/deepseek-r1", "/opt/model-cache/deepseek-r1"),
        ("", "/opt/model-cache"),
    ],
)
def test_path_in_the_cache_volume(path: str, found: str) -> None:
    assert path_in_cache(ModelCache(pvc_name="models", pvc_model_path=path)) == found


def test_text_is_json_or_yaml() -> None:
    assert parse_text('{"a": 1}', "x") == parse_text("a: 1", "x") == {"a": 1}
    with pytest.raises(ConfigError, match="--config x"):
        parse_text("a: [", "x")
