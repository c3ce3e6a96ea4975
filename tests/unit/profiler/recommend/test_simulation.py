from collections.abc import Callable

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
    return DeploymentSimulator({"tp1": engine}, sessions(shape), LatencyTarget(ttft_ms=500, itl_ms=20))


def test_step_times_are_those_of_the_performance_model(candidate_of: MakeCandidate) -> None:
    lonely = simulator(Shape(input_tokens=1000, output_tokens=50, requests=5, arrival_interval_ms=5000))
    found = lonely.run(candidate_of(1))
    engine = lonely.engines["tp1"]
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


def test_part_of_the_load_costs_less(candidate_of: MakeCandidate) -> None:
    part = simulator()
    assert part.run(candidate_of(1), 20).requests == 20
    assert part.simulated_requests == 20


def test_labels_differ(candidate_of: MakeCandidate) -> None:
    made = [candidate_of(1), candidate_of(2), candidate_of(1, 1), candidate_of(1, tp=2), candidate_of(1, batch=32)]
    assert len({one.label() for one in made}) == len(made)
