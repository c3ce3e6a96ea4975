from collections.abc import Callable

import pytest

from dynamo.planner.config.planner_config import Mode, parse
from dynamo.profiler.recommend.presets import PRESETS, preset_config
from dynamo.profiler.recommend.simulation import CandidateDeployment
from dynamo.profiler.spec import LatencyTarget

MakeCandidate = Callable[..., CandidateDeployment]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("prefill", [0, 1])
def test_preset_is_a_configuration_of_the_planner(candidate_of: MakeCandidate, name: str, prefill: int) -> None:
    candidate = candidate_of(2, prefill, tp=2)
    found = preset_config(name, candidate.config, LatencyTarget(ttft_ms=300, itl_ms=12), 16)
    assert parse(found.as_json()) == found
    assert found.mode is (Mode.DISAGG if prefill else Mode.AGG)
    assert (found.ttft_ms, found.itl_ms, found.max_gpu_budget) == (300, 12, 16)
    assert (found.prefill_engine_num_gpu, found.decode_engine_num_gpu) == (2, 2)


@pytest.mark.parametrize(
    ("name", "throughput", "load"),
    [("throughput_600_5", 600, None), ("load_180_10", None, 10), ("hybrid_180_5", 180, 5)],
)
def test_names_state_the_intervals(
    candidate_of: MakeCandidate, name: str, throughput: int | None, load: int | None
) -> None:
    found = preset_config(name, candidate_of(1).config, LatencyTarget(), 8)
    assert (found.enable_throughput_scaling, found.enable_load_scaling) == (throughput is not None, load is not None)
    if throughput is not None:
        assert found.throughput_adjustment_interval_seconds == throughput
    if load is not None:
        assert found.load_adjustment_interval_seconds == load
