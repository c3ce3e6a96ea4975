"""Synthetic: shapes of generated loads."""

import pytest

from dynamo.core.errors import ConfigError
from dynamo.replay.synthetic import Shape, sessions


def test_turns_grow_by_responses_and_keep_their_prefix() -> None:
    (session,) = sessions(Shape(input_tokens=100, output_tokens=30, requests=3, turns=3, block_tokens=16))
    assert [turn.input_tokens for turn in session.turns] == [100, 230, 360]
    first, second, _ = session.turns
    assert tuple(second.hash_ids[: len(first.hash_ids)]) == tuple(first.hash_ids)
    assert all(len(turn.hash_ids) * 16 >= turn.input_tokens for turn in session.turns)


def test_prefix_groups_share_only_their_prefixes() -> None:
    found = sessions(
        Shape(input_tokens=160, output_tokens=1, requests=50, shared_prefix_ratio=0.5, prefix_groups=2, block_tokens=16)
    )
    beginnings = {tuple(session.turns[0].hash_ids[:5]) for session in found}
    rests = [tuple(session.turns[0].hash_ids[5:]) for session in found]
    assert len(beginnings) == 2
    assert len(set(rests)) == 50


def test_arrivals_are_regular_or_random_and_reproducible() -> None:
    even = sessions(Shape(input_tokens=9, output_tokens=1, requests=4, arrival_interval_ms=50))
    assert [session.turns[0].at_ms for session in even] == [0, 50, 100, 150]
    shape = Shape(input_tokens=9, output_tokens=1, requests=2000, request_rate=10)
    times = [session.turns[0].at_ms or 0.0 for session in sessions(shape)]
    assert times == [session.turns[0].at_ms for session in sessions(shape)]
    assert times[-1] == pytest.approx(200_000, rel=0.1)


@pytest.mark.parametrize(
    "wrong", [{"input_tokens": 0}, {"requests": 0}, {"turns": 0}, {"shared_prefix_ratio": 2.0}, {"request_rate": 0.0}]
)
def test_invalid_load_shape_is_refused(wrong: dict[str, float]) -> None:
    given: dict[str, float] = {"input_tokens": 9, "output_tokens": 9, "requests": 9, **wrong}
    with pytest.raises(ConfigError):
        Shape(**given)  # type: ignore[arg-type]
