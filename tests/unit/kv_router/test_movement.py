"""Movement of KV blocks: durations are learned from first tokens."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.kv_router.movement import PENDING_MAX, Movement


def observe(movement: Movement, first_s: float, second_s: float, *, noise_s: float = 0.0, count: int = 400) -> None:
    """Report transfers of which some tokens are at the destination already."""
    rng = random.Random(1)
    for at in range(count):
        tokens = rng.randrange(100, 9000)
        held = rng.randrange(tokens) * (at % 2)
        movement.sent("r", movement.near, tokens - held, held, 0.01, float(at))
        seconds = 0.004 + first_s * (tokens - held) + second_s * held + 0.01 + rng.expovariate(1) * noise_s
        movement.first_token("r", at + seconds)


def test_transfer_of_missing_blocks_is_learned() -> None:
    movement = Movement()
    observe(movement, 2e-5, 0.0)
    assert movement.near.first == pytest.approx(2e-5, rel=0.05)
    assert movement.near.second < 1e-6
    assert movement.near.seconds(5000, 0) == pytest.approx(0.104, rel=0.05)


def test_transfer_of_whole_prompts_is_learned() -> None:
    movement = Movement()
    observe(movement, 2e-5, 2e-5)
    assert movement.near.seconds(0, 5000) == pytest.approx(movement.near.seconds(5000, 0), rel=0.05)


def test_waits_that_do_not_depend_on_the_transfer_do_not_change_its_pace_much() -> None:
    movement = Movement()
    observe(movement, 2e-5, 0.0, noise_s=0.02, count=2000)
    assert movement.near.first == pytest.approx(2e-5, rel=0.25)


def test_first_token_seen_too_late_is_not_learned_from() -> None:
    movement, fresh = Movement(), Movement()
    for at in range(100):
        movement.sent("r", movement.near, 5000, 0, 0.01, float(at))
        movement.first_token("r", at + 0.5, error_s=0.4)
    assert movement == fresh


def test_time_of_a_first_token_is_the_middle_of_its_uncertainty() -> None:
    movement = Movement()
    for at in range(400):
        tokens = (1000, 4000, 9000)[at % 3]
        movement.sent("r", movement.near, tokens, 0, 0.0, float(at))
        movement.first_token("r", at + tokens * 2e-5 + 0.002, error_s=0.004)
    assert movement.near.first == pytest.approx(2e-5, rel=0.05)


def test_request_without_first_token_is_forgotten() -> None:
    movement = Movement()
    movement.sent("r", movement.far, 10, 0, 0.0, 0.0)
    movement.drop("r")
    movement.first_token("r", 1.0)
    assert movement == Movement()


def test_pending_requests_are_bounded() -> None:
    movement = Movement()
    for at in range(PENDING_MAX + 10):
        movement.sent(f"r{at}", movement.near, 10, 0, 0.0, 0.0)
    assert len(movement) == PENDING_MAX


@given(st.lists(st.tuples(st.integers(0, 100_000), st.integers(0, 100_000), st.floats(0, 1000)), max_size=100))
def test_learned_durations_are_never_negative(observed: list[tuple[int, int, float]]) -> None:
    movement = Movement()
    for first, second, seconds in observed:
        movement.tiers.observe(first, second, seconds)
    assert movement.tiers.seconds(100, 100) >= 0
