from collections.abc import Callable

import pytest

from dynamo.planner.config.parallelization import PickedParallelConfig
from dynamo.profiler.candidates import EngineFamily, candidates
from dynamo.profiler.perf.efficiencies import EFFICIENCIES
from dynamo.profiler.perf.gpus import gpu_spec
from dynamo.profiler.perf.known_models import known_config
from dynamo.profiler.perf.model_shape import model_shape
from dynamo.profiler.recommend.exploration import DeploymentFamily, Exploration, best_of, families, front, neighbours
from dynamo.profiler.recommend.simulation import CandidateDeployment, SimulatedResult
from dynamo.profiler.search import EngineChoice
from dynamo.profiler.spec import LatencyTarget, TrafficTarget

MakeCandidate = Callable[..., CandidateDeployment]
MakeResult = Callable[..., SimulatedResult]
ENGINE = EngineChoice(parallel=PickedParallelConfig(), batch=64)


def explored(
    result_of: MakeResult, capacity: Callable[[CandidateDeployment], float], *, rate: float, max_gpus: int = 16
) -> tuple[SimulatedResult, int]:
    """Return the best deployment where a candidate's capacity in requests per second is known, and the simulations."""
    calls = 0

    def simulate(candidate: CandidateDeployment, limit: int | None) -> SimulatedResult:
        nonlocal calls
        calls += 1
        return result_of(candidate, min(1.0, capacity(candidate) / rate))

    aggregated = DeploymentFamily(decode=ENGINE, decode_rps=2.0)
    pair = DeploymentFamily(decode=ENGINE, prefill=ENGINE, decode_rps=4.0, prefill_rps=4.0)
    found = Exploration(
        families=[aggregated, pair], rate=rate, requests=1000, max_gpus=max_gpus, share=0.95, simulate=simulate
    ).run()
    assert found is not None
    return found, calls


def engines_per_role(one: CandidateDeployment) -> tuple[int, int]:
    return one.config.decode.replicas, one.config.prefill.replicas if one.config.prefill else 0


@pytest.mark.parametrize("true_rps", [1.0, 1.5, 2.0, 3.0])
def test_fewest_engines_are_found_although_the_estimate_is_wrong(result_of: MakeResult, true_rps: float) -> None:
    def capacity(one: CandidateDeployment) -> float:
        decode, prefill = engines_per_role(one)
        return min(decode, prefill) * 0.5 if prefill else decode * true_rps

    found, calls = explored(result_of, capacity, rate=9.0)
    needed = next(count for count in range(1, 17) if count * true_rps / 9.0 >= 0.95)
    assert found.candidate.gpus == needed
    assert calls < 40


def test_roles_are_balanced_where_the_estimate_was_not(result_of: MakeResult) -> None:
    def capacity(one: CandidateDeployment) -> float:
        decode, prefill = engines_per_role(one)
        return min(decode * 9.0, prefill * 3.0) if prefill else decode * 0.5

    found, _ = explored(result_of, capacity, rate=9.0)
    assert engines_per_role(found.candidate) == (1, 3)


def test_load_beyond_the_budget_yields_the_nearest(result_of: MakeResult) -> None:
    found, _ = explored(result_of, lambda one: one.config.decode.replicas * 0.1, rate=9.0, max_gpus=4)
    assert found.met_share < 0.95
    assert found.candidate.gpus <= 4


def test_exploration_without_engine_families_returns_none() -> None:
    def refuse(candidate: CandidateDeployment, limit: int | None) -> SimulatedResult:
        raise AssertionError(candidate)

    assert Exploration(families=[], rate=1.0, requests=1, max_gpus=1, share=0.9, simulate=refuse).run() is None


def test_families_are_ordered_by_the_gpus_they_need() -> None:
    shape = model_shape(known_config("Qwen/Qwen3-8B") or {})
    family = EngineFamily(
        shape=shape, gpu=gpu_spec("h100_sxm"), gpus_per_node=8, efficiency=EFFICIENCIES["vllm"].efficiency
    )
    traffic = TrafficTarget(isl=3000, osl=300, request_rate=10)
    found = families(candidates(family, 8, 3300), traffic, LatencyTarget(ttft_ms=1000, itl_ms=25), 8)
    assert {one.prefill is None for one in found} == {True, False}
    first, last = found[0], found[-1]
    assert first.decode.parallel.num_gpus / first.decode_rps < last.decode.parallel.num_gpus / last.decode_rps


def test_neighbours_change_one_role(candidate_of: MakeCandidate) -> None:
    larger = neighbours(candidate_of(2, 1), larger=True)
    assert [engines_per_role(one) for one in larger] == [(3, 1), (2, 2)]
    assert [engines_per_role(one) for one in neighbours(candidate_of(2, 1), larger=False)] == [(1, 1)]


def test_best_meets_the_objectives_with_the_fewest_gpus(candidate_of: MakeCandidate, result_of: MakeResult) -> None:
    small, large = result_of(candidate_of(2)), result_of(candidate_of(4))
    failing = result_of(candidate_of(1), 0.5)
    assert best_of([failing, large, small], 0.95) is small
    assert best_of([failing, result_of(candidate_of(1), 0.2)], 0.95) is failing


def test_front_has_no_dominated_result(candidate_of: MakeCandidate, result_of: MakeResult) -> None:
    fast, slow = result_of(candidate_of(4), goodput=1000), result_of(candidate_of(2), goodput=1000)
    dominated = result_of(candidate_of(2), 0.5)
    assert front([slow, dominated, fast]) == [fast, slow]
