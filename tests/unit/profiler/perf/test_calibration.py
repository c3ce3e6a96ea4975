from dataclasses import replace

import pytest

from dynamo.planner.config.parallelization import PickedParallelConfig
from dynamo.profiler.perf.analytic_engine import AnalyticEngine, Efficiency
from dynamo.profiler.perf.calibration import EnginePoint, closed_loop, errors, fit
from dynamo.profiler.perf.efficiencies import EFFICIENCIES
from dynamo.profiler.perf.gpus import gpu_spec
from dynamo.profiler.perf.known_models import known_config
from dynamo.profiler.perf.model_shape import model_shape

START = EFFICIENCIES["vllm"].efficiency


def engine(model: str = "Qwen/Qwen3-32B", sku: str = "h100_sxm", **widths: int) -> AnalyticEngine:
    shape = model_shape(known_config(model) or {}, model)
    return AnalyticEngine(shape=shape, gpu=gpu_spec(sku), parallel=PickedParallelConfig(**widths), efficiency=START)


def points(truth: Efficiency) -> list[EnginePoint]:
    """Return the measurements of an engine of known efficiency."""
    found = []
    for tp in (1, 2, 4):
        for batch in (1, 8, 64):
            for isl in (512, 4096):
                one = engine(tp=tp)
                ttft_ms, tpot_ms = closed_loop(replace(one, efficiency=truth), isl, 256, batch)
                found.append(EnginePoint(engine=one, isl=isl, osl=256, batch=batch, ttft_ms=ttft_ms, tpot_ms=tpot_ms))
    return found


def test_known_efficiencies_are_found_again() -> None:
    truth = replace(START, compute=0.5, memory=0.7, step_s=2e-3, prompt_s=0.05)
    found = fit(points(truth), START, prior_weight=1e-3)
    assert found.compute == pytest.approx(0.5, rel=0.05)
    assert found.memory == pytest.approx(0.7, rel=0.05)
    assert max(abs(one) for pair in errors(points(truth), found) for one in pair) < 0.1


def test_single_point_moves_the_fit_only_partly() -> None:
    slow = replace(START, layer_s=3 * START.layer_s)
    (point,) = points(slow)[:1]
    found = fit([point], START)
    before, after = errors([point])[0][1], errors([point], found)[0][1]
    assert abs(after) < 0.6 * abs(before)
    assert found.compute == pytest.approx(START.compute, rel=0.2)


def test_outliers_do_not_move_the_fit() -> None:
    measured = points(START)
    measured[0] = replace(measured[0], tpot_ms=20 * measured[0].tpot_ms)
    found = fit(measured, START)
    assert found.memory == pytest.approx(START.memory, rel=0.15)


def test_fitted_peak_shares_are_bounded() -> None:
    found = fit(points(replace(START, compute=3.0, memory=3.0)), START, prior_weight=1e-3)
    assert found.compute <= 0.9 + 1e-9
    assert found.memory <= 0.95 + 1e-9


def test_engine_that_was_not_fitted_is_predicted() -> None:
    """Published: Qwen3-32B on two H100 with vLLM, 1024 tokens each way; batch, TPOT in ms."""
    for batch, tpot_ms in ((8, 15.9), (16, 17.4), (32, 20.1), (64, 26.1), (128, 37.8)):
        assert closed_loop(engine(tp=2), 1024, 1024, batch)[1] == pytest.approx(tpot_ms, rel=0.15)
