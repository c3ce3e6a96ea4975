"""Regression: coefficients of a duration that is linear in two counts."""

import random

import pytest

from dynamo.kv_router.regression import Regression


def fitted(truth: tuple[float, float, float]) -> tuple[float, float, float]:
    """Return the coefficients after observations of `truth`."""
    regression, rng, known = Regression(0.999, 10, 100, 1000), random.Random(3), (0.0, 0.0, 0.0)
    for _ in range(2000):
        x, y = rng.randrange(200), rng.randrange(4000)
        if regression.note(x, y, truth[0] + truth[1] * x + truth[2] * y):
            known = regression.solve(known)
    return known


def test_coefficients_are_found() -> None:
    assert fitted((0.5, 1e-3, 2e-5)) == pytest.approx((0.5, 1e-3, 2e-5), rel=0.02)


def test_coefficient_is_never_negative() -> None:
    assert min(fitted((0.5, -1e-3, 2e-5))) == 0


def test_undetermined_coefficients_keep_their_values() -> None:
    regression, known = Regression(0.999, 10), (0.1, 0.0, 0.0)
    for _ in range(100):
        if regression.note(0.0, 0.0, 0.3):
            known = regression.solve((known[0], 5e-3, 7e-3))
    assert known == pytest.approx((0.3, 5e-3, 7e-3), rel=0.05)


def test_solution_is_due_after_a_fixed_number_of_observations() -> None:
    regression = Regression(0.9, 3)
    assert [regression.note(1, 1, 1) for _ in range(6)] == [False, False, True] * 2
