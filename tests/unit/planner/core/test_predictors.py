"""Load predictors: idle starts, NaN, trends, missing packages."""

import builtins
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.errors import ConfigError
from dynamo.planner.config.planner_config import PlannerConfig, Predictor
from dynamo.planner.core import predictors
from dynamo.planner.core.predictors import (
    ArimaPredictor,
    ConstantPredictor,
    KalmanPredictor,
    ProphetPredictor,
    make_predictor,
)

LOADS = st.lists(st.floats(0, 1e6), max_size=40)


class ScriptedModel:
    """Model of a given order that predicts the sum of its training values."""

    def __init__(self, values: Sequence[float], order: tuple[int, int, int]) -> None:
        self.values = list(values)
        self.order = order

    def update(self, values: Sequence[float]) -> None:
        self.values += values

    def predict(self, n_periods: int) -> list[float]:
        return [sum(self.values)]


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Orders that successive selections return; the last one repeats."""
    found = [(1, 0, 0)]
    monkeypatch.setattr(
        predictors,
        "_auto_arima",
        lambda: lambda values: ScriptedModel(values, found.pop(0) if len(found) > 1 else found[0]),
    )
    return found


def test_predictor_skips_zeros_before_the_first_request_and_again_after_a_warm_up() -> None:
    predictor = ConstantPredictor(PlannerConfig())
    for value in (0.0, math.nan, 4.0, 0.0):
        predictor.add(value)
    assert predictor.predict() == 0.0
    predictor.add(7.0)
    predictor.skip_idle()
    predictor.add(0.0)
    assert predictor.predict() == 7.0


def test_predictor_without_values_predicts_zero() -> None:
    assert KalmanPredictor(PlannerConfig()).predict() == 0.0


def test_kalman_predictor_repeats_the_last_value_until_it_has_enough_points() -> None:
    predictor = KalmanPredictor(PlannerConfig(kalman_min_points=3))
    predictor.add(3)
    predictor.add(9)
    assert predictor.predict() == 9.0


@pytest.mark.parametrize("log1p", [False, True])
def test_kalman_predictor_continues_a_linear_trend(log1p: bool) -> None:
    predictor = KalmanPredictor(PlannerConfig(load_predictor_log1p=log1p))
    for step in range(200):
        predictor.add(math.expm1(0.01 * step + 1) if log1p else 10 + 2.0 * step)
    expected = math.expm1(0.01 * 200 + 1) if log1p else 410.0
    assert predictor.predict() == pytest.approx(expected, rel=1e-2)


@given(LOADS)
def test_kalman_predictor_never_predicts_a_negative_load_and_repeats_itself(values: list[float]) -> None:
    predictor = KalmanPredictor(PlannerConfig())
    for value in values:
        predictor.add(value)
    first = predictor.predict()
    assert first >= 0
    assert predictor.predict() == first


def test_arima_predictor_updates_its_model_with_the_values_since_the_last_prediction(orders: list[Any]) -> None:
    predictor = ArimaPredictor(PlannerConfig())
    for value in (1, 2, 3, 4, 5):
        predictor.add(value)
    assert predictor.predict() == 15.0
    predictor.add(6)
    predictor.add(7)
    assert predictor.predict() == 28.0


def test_arima_predictor_selects_again_on_logarithms_if_the_first_selection_is_a_constant(orders: list[Any]) -> None:
    orders[:] = [(0, 1, 0), (1, 0, 0)]
    predictor = ArimaPredictor(PlannerConfig())
    for value in (1, 2, 3, 4, 5):
        predictor.add(value)
    assert predictor.predict() == pytest.approx(2 * 3 * 4 * 5 * 6 - 1)


def test_arima_predictor_returns_the_value_of_a_constant_history_without_a_model(orders: list[Any]) -> None:
    predictor = ArimaPredictor(PlannerConfig())
    for _ in range(6):
        predictor.add(4)
    assert predictor.predict() == 4.0


def test_arima_predictor_repeats_the_last_value_if_the_model_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(values: Sequence[float]) -> Any:
        raise ValueError("singular")

    monkeypatch.setattr(predictors, "_auto_arima", lambda: fail)
    predictor = ArimaPredictor(PlannerConfig())
    for value in (1, 2, 3, 4, 9):
        predictor.add(value)
    assert predictor.predict() == 9.0


def test_arima_predictor_keeps_a_bounded_history(orders: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictors, "HISTORY_MAX", 8)
    predictor = ArimaPredictor(PlannerConfig())
    for value in range(1, 20):
        predictor.add(value)
        predictor.predict()
    assert len(predictor._model.values) <= 16


def test_prophet_predictor_fits_the_window_at_the_times_of_its_points(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def record(times: Any, values: Any) -> float:
        calls.append((times, values))
        return -1.0

    monkeypatch.setattr(predictors, "_prophet", lambda: record)
    predictor = ProphetPredictor(PlannerConfig(prophet_window_size=5))
    for value in (0, 1, 2, 3, 4, 5, 6):
        predictor.add(value)
    assert predictor.predict() == 0.0
    times, values = calls[0]
    assert values == [2, 3, 4, 5, 6]
    assert [(one - predictors.START).total_seconds() for one in times] == [180, 360, 540, 720, 900, 1080]


@pytest.mark.parametrize(
    ("predictor", "package", "extra"),
    [(Predictor.ARIMA, "pmdarima", "planner"), (Predictor.PROPHET, "pandas", "prophet")],
)
def test_missing_package_of_a_predictor_is_one_line_with_the_extra(
    predictor: Predictor, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any, **options: Any) -> Any:
        if name == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *more, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=rf"requires the package {package}; install dynamo-serve\[{extra}\]"):
        make_predictor(PlannerConfig(load_predictor=predictor))


@pytest.mark.parametrize("kind", [Predictor.CONSTANT, Predictor.KALMAN])
@given(before=st.lists(st.floats(0, 1e6), max_size=12), after=st.lists(st.floats(0, 1e6), max_size=6))
def test_restored_predictor_continues_as_the_saved_one(
    kind: Predictor, before: list[float], after: list[float]
) -> None:
    config = PlannerConfig(load_predictor=kind, load_predictor_log1p=True)
    saved, restored = make_predictor(config), make_predictor(config)
    for value in before:
        saved.add(value)
    restored.restore(saved.state())
    assert restored.state() == saved.state()
    for value in after:
        saved.add(value)
        restored.add(value)
    assert (restored.predict(), restored.last()) == (saved.predict(), saved.last())


def test_restored_arima_predictor_selects_its_model_from_the_saved_history(orders: list[Any]) -> None:
    saved = make_predictor(PlannerConfig(load_predictor=Predictor.ARIMA))
    for value in (1.0, 5.0, 2.0, 8.0, 3.0, 9.0):
        saved.add(value)
    saved.predict()
    first, second = (make_predictor(PlannerConfig(load_predictor=Predictor.ARIMA)) for _ in range(2))
    for one in (first, second):
        one.restore(saved.state())
    assert first.predict() == second.predict()
    assert first.state() == saved.state()
