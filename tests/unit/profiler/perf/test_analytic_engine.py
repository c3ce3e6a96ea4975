import pytest

from dynamo.planner.config.parallelization import PickedParallelConfig
from dynamo.profiler.perf.analytic_engine import AnalyticEngine
from dynamo.profiler.perf.gpus import gpu_spec
from dynamo.profiler.perf.known_models import known_config
from dynamo.profiler.perf.model_shape import model_shape


def engine(model: str = "Qwen/Qwen3-32B", sku: str = "h200_sxm", **widths: int) -> AnalyticEngine:
    shape = model_shape(known_config(model) or {}, model)
    return AnalyticEngine(shape=shape, gpu=gpu_spec(sku), parallel=PickedParallelConfig(**widths))


def test_decode_of_one_sequence_reads_all_weights() -> None:
    one = engine()
    assert one.decode_ms(1000, 10**6, 1) > one.shape.weight_bytes / 4.8e12 * 1000


def test_prefill_of_long_prompts_is_bound_by_arithmetic() -> None:
    one = engine()
    least_ms = 2 * one.shape.dense_params * 8000 / 989e12 * 1000
    assert least_ms < one.prefill_ms(8000) < 3 * least_ms


def test_steps_grow_with_tokens_context_and_sequences() -> None:
    one = engine()
    assert one.prefill_ms(4000) > one.prefill_ms(1000) > one.prefill_ms(0) == 0.0
    assert one.prefill_ms(1000, 30000) > one.prefill_ms(1000)
    assert one.decode_ms(10**6, 10**6, 64) > one.decode_ms(10**5, 10**6, 64) > one.decode_ms(10**5, 10**6, 1)
    assert one.decode_ms(0, 10**6, 0) == 0.0


def test_tensor_parallelism_shortens_steps_and_frees_memory() -> None:
    one, four = engine(tp=1), engine(tp=4)
    assert four.decode_ms(64000, 10**6, 32) < one.decode_ms(64000, 10**6, 32)
    assert four.kv_tokens() > 4 * one.kv_tokens()


def test_tensor_parallelism_gains_less_over_a_slow_link() -> None:
    def gain(sku: str) -> float:
        one = engine("meta-llama/Llama-3.1-8B-Instruct", sku, tp=1)
        return one.prefill_ms(4000) / engine("meta-llama/Llama-3.1-8B-Instruct", sku, tp=4).prefill_ms(4000)

    assert gain("a100_sxm") > 1.5 * gain("a100_pcie")


def test_experts_that_no_token_uses_are_not_read() -> None:
    one = engine("MiniMaxAI/MiniMax-M2.5", "b200_sxm", tp=4, moe_tp=4)
    few, many = one.decode_ms(1500, 10**6, 1), one.decode_ms(64 * 1500, 10**6, 64)
    assert many > 1.5 * few


def test_data_parallel_ranks_each_have_a_cache() -> None:
    one = engine("deepseek-ai/DeepSeek-V3", tp=8, moe_ep=8)
    ranks = engine("deepseek-ai/DeepSeek-V3", dp=8, moe_ep=8)
    assert ranks.gpus == one.gpus == 8
    assert ranks.kv_tokens() > 2 * one.kv_tokens()  # Latent vectors cannot be split between tensor-parallel GPUs.


def test_weights_larger_than_memory_leave_no_cache() -> None:
    assert engine("meta-llama/Llama-3.1-70B-Instruct", "l4").kv_tokens() <= 0


def test_step_times_are_near_published_ones() -> None:
    """Published: B200, MiniMax-M2.5 in FP8, four GPUs, 1024 tokens each way, closed loop."""
    one = engine("MiniMaxAI/MiniMax-M2.5", "b200_sxm", tp=4, moe_tp=4)
    for batch, measured_ms in ((4, 9.58), (8, 10.12), (16, 12.31), (32, 16.32), (64, 20.64)):
        itl_ms = one.decode_ms(batch * 1536, 10**6, batch) + batch * one.prefill_ms(1024) / 1024
        assert itl_ms == pytest.approx(measured_ms, rel=0.2)
