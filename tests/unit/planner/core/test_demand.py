"""Demand history: level, trend and quantiles from measured errors."""

import random

import pytest

from dynamo.planner.core.demand import DemandHistory


def fed(values: list[float], horizon_s: float = 20.0) -> DemandHistory:
    history = DemandHistory()
    for index, value in enumerate(values):
        history.add(5.0 * (index + 1), 5.0, value)
        history.forecast(5.0 * (index + 1), horizon_s)
    return history


def test_constant_demand_is_forecast_without_variance() -> None:
    forecast = fed([2.0] * 60).forecast(300.0, 20.0)
    assert forecast.mean == pytest.approx(2.0)
    assert forecast.quantile(1.0) == pytest.approx(2.0)


def test_rising_demand_is_extrapolated() -> None:
    assert fed([0.1 * index for index in range(40)]).forecast(200.0, 20.0).mean > 3.6


def test_bursts_raise_the_upper_quantile_while_demand_is_low() -> None:
    forecast = fed(([1.0] * 16 + [4.0] * 8) * 3 + [1.0] * 8).forecast(400.0, 20.0)
    assert forecast.mean < 1.2
    assert forecast.quantile(0.99) > 2.5


def test_errors_of_low_demand_are_not_added_to_the_peak() -> None:
    history = fed(([1.0] * 16 + [4.0] * 8) * 3)
    assert history.forecast(360.0, 20.0).quantile(1.0) <= 4.0 * 1.5


def test_quantiles_grow_with_the_probability_and_are_not_negative() -> None:
    forecast = fed([0.0, 3.0] * 30).forecast(300.0, 20.0)
    values = [forecast.quantile(part / 10) for part in range(11)]
    assert values == sorted(values)
    assert values[0] >= 0


def test_samples_after_a_time_are_forgotten_when_the_clock_is_set_back() -> None:
    history = fed([1.0] * 10)
    history.clear_after(0.0)
    assert history.is_empty


def noisy(rate: float, count: int, rng: random.Random) -> list[float]:
    return [sum(rng.expovariate(1 / 0.2) for _ in range(round(rng.gauss(rate, rate**0.5)))) / 5 for _ in range(count)]


def test_noise_of_arrivals_is_averaged_over_a_long_window() -> None:
    rng, history = random.Random(1), DemandHistory()
    found = []
    for index, work in enumerate(noisy(50, 120, rng)):
        history.add(5.0 * (index + 1), 5.0, work, 0.2)
        found.append(history.forecast(5.0 * (index + 1), 30.0).mean)
    assert max(found[40:]) - min(found[40:]) < 0.6


def test_step_that_noise_does_not_explain_is_followed_at_the_next_tick() -> None:
    history = DemandHistory()
    for index, work in enumerate([0.5] * 40 + [3.0]):
        history.add(5.0 * (index + 1), 5.0, work, 0.2)
    assert history.forecast(205.0, 30.0).mean == pytest.approx(3.0)
