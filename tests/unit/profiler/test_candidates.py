import pytest

from dynamo.planner.config.parallelization import PickedParallelConfig
from dynamo.profiler.candidates import EngineFamily, candidates, smallest_that_fits
from dynamo.profiler.perf.gpus import gpu_spec
from dynamo.profiler.perf.known_models import known_config
from dynamo.profiler.perf.model_shape import model_shape


def family(model: str, sku: str = "h200_sxm", node: int = 8) -> EngineFamily:
    return EngineFamily(shape=model_shape(known_config(model) or {}, model), gpu=gpu_spec(sku), gpus_per_node=node)


def labels(model: str, gpus: int, *, is_measured: bool = False, sku: str = "h200_sxm") -> list[str]:
    found = candidates(family(model, sku), gpus, 5000, is_measured=is_measured)
    return [engine.parallel.label() for engine in found]


def test_dense_models_use_tensor_parallelism_within_a_node_then_pipelines() -> None:
    assert labels("Qwen/Qwen3-32B", 16) == ["tp1", "tp2", "tp4", "tp8", "tp8-pp2"]


def test_engines_without_space_for_a_request_are_excluded() -> None:
    assert labels("Qwen/Qwen3-32B", 8, sku="l40s") == ["tp2", "tp4", "tp8"]


def test_measured_mixtures_divide_experts_over_tensor_or_data_parallel_gpus() -> None:
    assert labels("deepseek-ai/DeepSeek-R1", 16, is_measured=True) == [
        "tp8-moeep8",
        "tp1-dp8-moeep8",
        "tp1-dp16-moeep16",
    ]


def test_only_some_mixtures_are_measured_with_tensor_parallel_experts() -> None:
    assert "tp4-moetp4" in labels("Qwen/Qwen3-30B-A3B", 4, is_measured=True)
    assert not any("moetp" in one for one in labels("MiniMaxAI/MiniMax-M2.5", 8, is_measured=True))


def test_kv_heads_must_divide_in_measured_engines() -> None:
    assert "tp8-moeep8" not in labels("Qwen/Qwen3-30B-A3B", 8, is_measured=True)  # Four KV heads.
    assert "tp8-moeep8" in labels("Qwen/Qwen3-30B-A3B", 8)


def test_quantization_blocks_must_divide() -> None:
    """An expert of 768 columns in blocks of 128 divides by 2, not by 4."""
    assert "tp2-moetp2" in labels("Qwen/Qwen3-30B-A3B-FP8", 4)
    assert "tp4-moetp4" not in labels("Qwen/Qwen3-30B-A3B-FP8", 4)


@pytest.mark.parametrize(("sku", "found"), [("h200_sxm", 2), ("a30", 8)])
def test_naive_choice_is_the_fewest_gpus_with_space_for_the_weights(sku: str, found: int) -> None:
    one = smallest_that_fits(family("meta-llama/Llama-3.3-70B-Instruct", sku), 64)
    assert one == PickedParallelConfig(tp=found)


def test_smallest_engine_is_none_without_enough_memory() -> None:
    assert smallest_that_fits(family("meta-llama/Llama-3.1-405B-Instruct", "t4"), 8) is None
