"""Gaps between tokens: statistics in constant memory, and the gaps of simulated runs."""

from itertools import pairwise
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.mocker.simulation.step import StepResult
from dynamo.replay.engine import EngineArgs
from dynamo.replay.gaps import GapHistogram
from dynamo.replay.load import ReplaySession
from dynamo.replay.outcome import Flight
from dynamo.replay.report import rows_of, statistics, summary_of
from dynamo.replay.scenario import Scenario
from dynamo.replay.worker import SimulatedWorker


@given(st.lists(st.floats(1e-3, 1e5), min_size=1, max_size=60))
def test_statistics_are_those_of_the_values_within_half_a_thousandth(values: list[float]) -> None:
    histogram = GapHistogram()
    for value in values:
        histogram.add(value)
    for found, expected in (
        (histogram.itl_ms(), statistics(values)),
        (histogram.tokens_per_s(), statistics([1000 / value for value in values])),
    ):
        for name in ("mean", "min", "max"):
            assert found[name] == pytest.approx(expected[name])
        assert found["std"] == pytest.approx(expected["std"], rel=1e-3, abs=1e-3 * (expected["max"] or 0))
    found = histogram.itl_ms()
    for name in ("median", "p75", "p90", "p95", "p99"):
        assert found[name] == pytest.approx(statistics(values)[name], rel=5e-4)


def test_a_gap_of_many_requests_counts_as_many() -> None:
    histogram = GapHistogram()
    histogram.add(10.0, 99)
    histogram.add(500.0)
    assert histogram.gaps.count == 100
    assert histogram.itl_ms()["p99"] == pytest.approx(10, rel=5e-4)
    assert histogram.itl_ms()["max"] == 500


@pytest.mark.parametrize("engine_type", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("blocks", [256, 4096])
def test_gaps_of_a_run_are_those_between_all_tokens(
    engine: EngineArgs, chatty: list[ReplaySession], engine_type: str, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: dict[str, list[float]] = {}

    def note(self: SimulatedWorker, result: StepResult[Flight], now_ms: float) -> None:
        for sequence in [*result.sequences, *result.finished]:
            tokens.setdefault(sequence.owner.key, []).append(now_ms)
        original(self, result, now_ms)

    def never_coast(self: object, *, crosses_borders: bool, is_direct: bool) -> int:
        return 0

    original = SimulatedWorker.decoded
    monkeypatch.setattr(SimulatedWorker, "decoded", note)
    args = msgspec.structs.replace(engine, engine_type=engine_type, num_gpu_blocks=blocks)
    jumped = Scenario(sessions=chatty, workers=1, engine=args, block_tokens=64).run()
    monkeypatch.setattr("dynamo.mocker.simulation.batching.Batching.coast_steps", never_coast)
    tokens.clear()
    outcome = Scenario(sessions=chatty, workers=1, engine=args, block_tokens=64).run()
    gaps = [second - first for times in tokens.values() for first, second in pairwise(times)]
    assert outcome.gaps.gaps.count == len(gaps) == sum(one.turn.output_tokens - 1 for one in outcome.flights)
    assert outcome.gaps.gaps.total == pytest.approx(sum(gaps), rel=0.01)
    assert outcome.gaps.gaps.most == pytest.approx(max(gaps))
    assert jumped.gaps.gaps.count == len(gaps)
    assert jumped.gaps.gaps.total == pytest.approx(outcome.gaps.gaps.total, rel=1e-3)


def test_summary_has_gaps_as_itl_and_means_of_requests_as_tpot(engine: EngineArgs, chatty: list[ReplaySession]) -> None:
    outcome = Scenario(sessions=chatty, engine=engine, block_tokens=64).run()
    rows = rows_of(outcome.flights)
    found = summary_of(outcome, rows)
    assert found["max_itl_ms"] > found["max_tpot_ms"]
    assert found["mean_tpot_ms"] == pytest.approx(cast("float", statistics([row.itl_ms for row in rows])["mean"]))
