"""Random shapes of load: a function of their number, within the documented ranges, and small enough for their caches."""

from dataclasses import replace

import pytest
from benchmarks.routing_loads import BLOCK
from benchmarks.routing_regret import RegretBench, regrets, tables
from benchmarks.routing_shapes import CACHE_BLOCK, RandomShape

from dynamo.core.errors import ConfigError

NUMBERS = range(1, 41)


@pytest.mark.parametrize("number", NUMBERS)
def test_shape_is_a_function_of_its_number(number: int) -> None:
    one, other = RandomShape.of(number), RandomShape.of(number)
    assert one == other != RandomShape.of(number + 1)
    assert one.sessions(5.0, 1, 60) == other.sessions(5.0, 1, 60)
    assert 0 <= (one.prefill_workers or 0) < one.workers
    assert all(0.5 <= speed <= 0.8 for speed in one.speeds.values())


@pytest.mark.parametrize("number", NUMBERS)
def test_every_request_fits_into_a_cache(number: int) -> None:
    shape = RandomShape.of(number)
    turns = [turn for session in shape.sessions(10.0, 1, 400) for turn in session.turns]
    assert max(turn.input_tokens + turn.output_tokens for turn in turns) < shape.engine.num_gpu_blocks * CACHE_BLOCK
    assert all(-(-turn.input_tokens // BLOCK) == len(turn.hash_ids) for turn in turns)


def test_arrivals_have_the_requested_rate() -> None:
    shape = next(shape for shape in map(RandomShape.of, NUMBERS) if shape.turns == 1 and shape.burst == 1)
    sessions = shape.sessions(20.0, 1, 2000)
    last_ms = sessions[-1].turns[0].at_ms
    assert last_ms is not None
    assert 2000 / (last_ms / 1000) == pytest.approx(20.0, rel=0.1)


def test_saturated_rate_of_more_workers_is_higher() -> None:
    shape = next(shape for shape in map(RandomShape.of, NUMBERS) if shape.prefill_workers is None and not shape.speeds)
    few, many = (replace(shape, workers=workers).saturated_rate(60) for workers in (2, 8))
    assert 0 < few < many


def test_regret_is_the_figure_over_the_lowest() -> None:
    point = {
        name: {"e2e": value, "ttft": value, "ttft_p99": value} for name, value in (("preble", 2.0), ("balanced", 3.0))
    }
    result = {"shapes": {"7": {"description": "x", "strengths": dict.fromkeys(("light", "near", "over"), point)}}}
    assert regrets(result, "balanced", "e2e", "near") == {"7": 1.5}
    assert regrets(result, "preble", "e2e", "near") == {"7": 1.0}
    text = "\n".join(tables(result))
    assert "| balanced | +50.0 % |" in text
    assert "| 7, over | +50.0 % | preble |" in text


def test_unknown_policy_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--policies fastest: must be among round-robin"):
        RegretBench(policies=["fastest"])
