from collections.abc import Callable
from dataclasses import replace

import pytest

from dynamo.planner.config.parallelization import PickedParallelConfig
from dynamo.profiler.perf.analytic_engine import AnalyticEngine
from dynamo.profiler.perf.efficiencies import EFFICIENCIES
from dynamo.profiler.perf.gpus import gpu_spec
from dynamo.profiler.perf.known_models import known_config
from dynamo.profiler.perf.model_shape import model_shape
from dynamo.profiler.recommend.simulation import CandidateDeployment, DeploymentSimulator
from dynamo.profiler.spec import LatencyTarget
from dynamo.replay.synthetic import Shape, sessions

MakeCandidate = Callable[..., CandidateDeployment]
SHAPE = Shape(input_tokens=1000, output_tokens=50, requests=60, request_rate=10.0)


def simulator(shape: Shape = SHAPE) -> DeploymentSimulator:
    engine = AnalyticEngine(
        shape=model_shape(known_config("Qwen/Qwen3-8B") or {}),
        gpu=gpu_spec("h100_sxm"),
        parallel=PickedParallelConfig(),
        efficiency=EFFICIENCIES["vllm"].efficiency,
    )
    compact = replace(engine, shape=replace(engine.shape, kv_bits=8.0))
    return DeploymentSimulator([engine, compact], sessions(shape), LatencyTarget(ttft_ms=500, itl_ms=20))


def test_simulated_step_times_equal_those_of_the_performance_model(candidate_of: MakeCandidate) -> None:
    lonely = simulator(Shape(input_tokens=1000, output_tokens=50, requests=5, arrival_interval_ms=5000))
    found = lonely.run(candidate_of(1))
    engine = lonely.engines[0]
    assert found.ttft_ms == pytest.approx(engine.request_ms() + engine.prefill_ms(1000), rel=0.1)
    assert abs(found.itl_ms / engine.decode_ms(1025, 10**6, 1) - 1) < 0.1


def test_more_engines_meet_the_objectives_more_often(candidate_of: MakeCandidate) -> None:
    busy = simulator(Shape(input_tokens=4000, output_tokens=200, requests=120, request_rate=30.0))
    few, many = busy.run(candidate_of(1)), busy.run(candidate_of(8))
    assert few.met_share < many.met_share
    assert busy.simulated_requests == 240


def test_disaggregated_engines_serve_all_requests(candidate_of: MakeCandidate) -> None:
    found = simulator().run(candidate_of(1, 1))
    assert found.requests == 60
    assert found.met_share > 0.9
    assert found.goodput_per_gpu == found.goodput / 2


def test_simulation_of_part_of_the_load_is_supported(candidate_of: MakeCandidate) -> None:
    part = simulator()
    assert part.run(candidate_of(1), 20).requests == 20
    assert part.simulated_requests == 20


def test_candidate_labels_are_distinct(candidate_of: MakeCandidate) -> None:
    made = [candidate_of(1), candidate_of(2), candidate_of(1, 1), candidate_of(1, tp=2), candidate_of(1, batch=32)]
    made += [
        candidate_of(1, router="round_robin"),
        candidate_of(1, preset="load_180_5"),
        candidate_of(1, kv_dtype="fp8"),
    ]
    assert len({one.label() for one in made}) == len(made)


def test_planner_follows_the_load_within_the_gpus(candidate_of: MakeCandidate) -> None:
    busy = sessions(Shape(input_tokens=4000, output_tokens=40, requests=200, request_rate=10.0))
    calm = sessions(Shape(input_tokens=1000, output_tokens=20, requests=25, request_rate=0.1, seed=1))
    later = [
        replace(one, turns=[replace(turn, at_ms=turn.at_ms + 20_000) for turn in one.turns])  # type: ignore[operator]
        for one in calm
    ]
    engines = simulator().engines
    planned = DeploymentSimulator(
        engines, [*busy, *later], LatencyTarget(ttft_ms=1000, itl_ms=25), max_gpus=4, startup_s=5
    )
    found = planned.run(candidate_of(3, preset="load_180_5"))
    constant = planned.run(candidate_of(3))
    assert constant.mean_gpus == 3
    assert 1 <= found.mean_gpus < 2.5
    assert found.requests == constant.requests


def test_compact_cache_holds_more_requests(candidate_of: MakeCandidate) -> None:
    long = simulator(Shape(input_tokens=30_000, output_tokens=150, requests=40, request_rate=4.0))
    plain, compact = long.run(candidate_of(2, batch=256)), long.run(candidate_of(2, batch=256, kv_dtype="fp8"))
    assert compact.output_tok_s > plain.output_tok_s
