"""A rendering fails when its steps, its characters or its time are used up."""

import pytest

from dynamo.text.chat_template.bounds import FULL, Bounds, Budget, TemplateRefused


def test_bounds_check_their_deadline_within_loops_and_macros() -> None:
    now = iter(range(0, 1000, 3))
    bounds = Bounds(FULL, lambda: float(next(now)))
    assert [bounds.loop([1]) for _ in range(3)] == [[1]] * 3
    with pytest.raises(TemplateRefused, match="takes longer than 10 s"):
        bounds.loop([1])
    with pytest.raises(TemplateRefused, match="takes longer than 10 s"):
        bounds.call()
    with pytest.raises(TemplateRefused, match="takes longer than 10 s"):
        bounds.charge(10_000)
    long = Bounds(FULL, iter([0.0, 1.0, *[20.0] * 99]).__next__)
    with pytest.raises(TemplateRefused, match="takes longer than 10 s"):
        list(long.loop(range(100)))


def test_bounds_count_iterations_of_loops_without_length() -> None:
    three = Budget(turns=2, chars=100, value_chars=100, seconds=1.0)
    with pytest.raises(TemplateRefused, match="more than 2 steps"):
        Bounds(three).loop([1, 2, 3])
    values = Bounds(three).loop(iter([1, 2, 3]))
    with pytest.raises(TemplateRefused):
        list(values)


def test_bounds_limit_the_total_number_of_characters() -> None:
    bounds = Bounds(Budget(turns=2, chars=250, value_chars=100, seconds=1.0))
    bounds.charge(100)
    bounds.charge(100)
    with pytest.raises(TemplateRefused, match="more than 250 characters in total"):
        bounds.charge(100)
