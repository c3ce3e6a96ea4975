from dataclasses import replace

import pytest

from dynamo.profiler.candidates import EngineFamily, candidates
from dynamo.profiler.perf.analytic_engine import AnalyticEngine
from dynamo.profiler.perf.gpus import gpu_spec
from dynamo.profiler.perf.known_models import known_config
from dynamo.profiler.perf.model_shape import model_shape
from dynamo.profiler.search import Configuration, SearchResult, aggregated, excess, prefill_rate, queue_factor, search
from dynamo.profiler.spec import LatencyTarget, TrafficTarget

TRAFFIC = TrafficTarget(isl=3000, osl=150)
TARGET = LatencyTarget(ttft_ms=1000, itl_ms=30)


def engines(gpus: int = 16) -> list[AnalyticEngine]:
    shape = model_shape(known_config("Qwen/Qwen3-32B") or {})
    return candidates(EngineFamily(shape=shape, gpu=gpu_spec("h200_sxm"), gpus_per_node=8), gpus, 3150)


def found(
    traffic: TrafficTarget = TRAFFIC, target: LatencyTarget = TARGET, gpus: int = 16, **more: object
) -> SearchResult:
    result = search(engines(gpus), traffic, target, gpus, **more)  # type: ignore[arg-type]
    assert result is not None
    return result


def test_queue_grows_without_bound_near_full_utilization() -> None:
    assert queue_factor(0.0) == 1.0
    assert queue_factor(0.5) == 1.5
    assert queue_factor(0.95) > 10


def test_best_configuration_meets_the_objectives_with_the_highest_rate_per_gpu() -> None:
    result = found()
    assert result.is_met
    assert result.best.ttft_ms <= 1000
    assert result.best.itl_ms <= 30
    assert result.best.gpus <= 16
    assert result.best.tokens_per_gpu >= max(one.tokens_per_gpu for one in result.others) - 0.1
    assert {one.is_disaggregated for one in result.others} == {True, False}


def test_tighter_objectives_reduce_throughput() -> None:
    loose, tight = found(), found(target=LatencyTarget(ttft_ms=300, itl_ms=12))
    assert tight.is_met
    assert tight.best.tokens_per_gpu < loose.best.tokens_per_gpu


def test_given_request_rate_selects_the_fewest_gpus() -> None:
    result = found(replace(TRAFFIC, request_rate=4.0), mode="load_match")
    assert result.best.request_rate >= 4.0
    assert result.best.gpus == result.best.gpus_needed < 16
    twice = found(replace(TRAFFIC, request_rate=8.0), mode="load_match")
    assert twice.best.gpus > result.best.gpus


def test_load_beyond_the_budget_uses_all_of_it_and_reports_the_need() -> None:
    result = found(replace(TRAFFIC, request_rate=500.0), gpus=8, mode="load_match")
    assert result.best.gpus <= 8 < result.best.gpus_needed


def test_concurrency_is_a_load_by_the_latency_of_a_request() -> None:
    result = found(replace(TRAFFIC, concurrency=100), mode="load_match")
    assert result.best.request_rate * result.best.e2e_ms / 1000 >= 100


def test_planner_gets_one_engine_of_each_role() -> None:
    best = found(mode="autoscale", kinds=frozenset({True})).best
    assert best.prefill is not None
    assert (best.prefill.replicas, best.decode.replicas) == (1, 1)


def test_unattainable_objectives_yield_the_nearest() -> None:
    result = found(target=LatencyTarget(ttft_ms=1, itl_ms=0.1))
    assert not result.is_met
    target = LatencyTarget(ttft_ms=1, itl_ms=0.1)
    assert excess(result.best, target) <= min(excess(one, target) for one in result.others) + 1e-3


def test_latency_preference_reduces_end_to_end_latency() -> None:
    fast = found(target=replace(TARGET, prefers_latency=True)).best
    assert fast.e2e_ms < found().best.e2e_ms


def test_search_without_engines_returns_none() -> None:
    assert search([], TRAFFIC, TARGET, 8) is None


def test_prefill_engines_are_loaded_until_the_queue_uses_up_the_objective() -> None:
    engine = engines()[-2]
    slow_rps, slow_ms = prefill_rate(engine, TRAFFIC, 2000)
    fast_rps, fast_ms = prefill_rate(engine, TRAFFIC, 300)
    assert slow_rps > fast_rps
    assert fast_ms <= 300.5
    assert slow_ms <= 2000


def test_batches_of_aggregated_engines_end_at_the_capacity_of_the_cache() -> None:
    engine = engines()[0]
    points: list[Configuration] = list(aggregated(engine, TRAFFIC))
    assert points[-1].decode.batch * 3150 <= engine.kv_tokens()
    assert [one.itl_ms for one in points] == sorted(one.itl_ms for one in points)


@pytest.mark.parametrize("gpus", [2, 4, 8, 16])
def test_configurations_are_within_the_budget(gpus: int) -> None:
    result = found(gpus=gpus)
    assert all(one.gpus <= gpus for one in result.others)
