from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.profiler.perf.known_models import known_config
from dynamo.profiler.rapid import PickedDeployment, rapid
from dynamo.profiler.spec import profile_spec


def picked(model: str = "Qwen/Qwen3-32B", sku: str = "h200_sxm", gpus: int = 16, **changes: Any) -> PickedDeployment:
    hardware = {"gpuSku": sku, "totalGpus": gpus, "numGpusPerNode": 8}
    spec = profile_spec({"model": model, "image": "i", "hardware": hardware, **changes})
    return rapid(spec, known_config(model) or {})


def test_objectives_within_reach_are_met_without_a_warning() -> None:
    found = picked()
    assert found.warnings == ()
    assert found.config.ttft_ms <= 2000
    assert found.config.itl_ms <= 30


def test_automatic_backend_with_a_planner_is_vllm_and_others_are_kept() -> None:
    assert picked(features={"planner": {}}).backend == "vllm"
    assert picked(backend="sglang").backend == "sglang"


def test_automatic_backend_is_the_one_with_the_best_estimate() -> None:
    rates = {name: picked(backend=name).config.tokens_per_gpu for name in ("vllm", "sglang", "trtllm")}
    assert rates[picked().backend] >= max(rates.values()) / 1.15


def test_planner_gets_one_prefill_and_one_decode_engine() -> None:
    config = picked(features={"planner": {"optimization_target": "sla"}}).config
    assert config.prefill is not None
    assert (config.prefill.replicas, config.decode.replicas) == (1, 1)


def test_planner_of_aggregated_workers_has_one_worker() -> None:
    config = picked(features={"planner": {"optimization_target": "sla", "mode": "agg"}}).config
    assert config.prefill is None
    assert config.decode.replicas == 1


def test_unattainable_objective_warns_with_the_nearest() -> None:
    (warning,) = picked(sla={"ttft": 10, "itl": 1}).warnings
    assert "TTFT 10 ms, ITL 1 ms is not attainable" in warning
    assert "the nearest is TTFT" in warning


def test_load_beyond_the_budget_warns_with_the_need() -> None:
    (warning,) = picked(workload={"requestRate": 1000}).warnings
    assert "hardware.totalGpus: 16: the load needs" in warning


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sku": "l4", "gpus": 2}, "hardware.totalGpus: 2: must be 4 or more on l4"),
        ({"model": "deepseek-ai/DeepSeek-R1", "sku": "t4"}, "hardware.gpuSku: t4: no engine of up to 8 nodes fits"),
        ({"gpus": 1, "features": {"planner": {}}}, "hardware.totalGpus: 1: must be 2 or more for one prefill"),
        ({"workload": {"isl": 40000, "osl": 4000}}, "must be at most 40960 tokens together"),
    ],
)
def test_configuration_that_cannot_fit_is_refused_with_the_remedy(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        picked(**changes)


def test_uncovered_model_gets_tensor_parallelism_by_memory() -> None:
    hardware = {"gpuSku": "h100_sxm", "totalGpus": 8, "numGpusPerNode": 8}
    spec = profile_spec({"model": "a/mamba", "image": "i", "hardware": hardware})
    config = {"architectures": ["Mamba2ForCausalLM"], "state_size": 128}
    found = rapid(spec, config, stored_bytes=100 * 10**9)
    assert found.config.prefill is None
    assert (found.config.decode.parallel.tp, found.config.decode.replicas) == (2, 4)
    assert "not verified" in found.warnings[0]
    with pytest.raises(ConfigError, match="give a directory"):
        rapid(spec, config)
    with pytest.raises(ConfigError, match=r"hardware.totalGpus: 8: too few"):
        rapid(spec, config, stored_bytes=10**12)
