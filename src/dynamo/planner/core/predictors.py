"""Load predictors: one value per interval in, the value of the next interval out.

All of them treat NaN as 0, skip leading zeros (an idle deployment before its first request), and repeat the last value until
they have enough points. Units are the caller's: requests per interval, or tokens per request.
"""

import datetime as dt
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from dynamo.core.errors import ConfigError
from dynamo.planner.config.planner_config import PlannerConfig, Predictor

POINTS_MIN = 5
"""Points before ARIMA or Prophet is fitted."""
HISTORY_MAX = 4096
"""Points that ARIMA keeps, 8.5 days at 180 s: a refit takes time in proportion to them."""
START = dt.datetime(2024, 1, 1)  # noqa: DTZ001 - Prophet takes naive times; only differences matter
"""Time of the first point in Prophet's calendar."""
INITIAL_VARIANCE = 1000.0
"""Variance of level and trend before the first update: larger than any measurement noise, so that data decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorState:
    """State of any predictor as plain data; a fitted model is not part of it."""

    values: tuple[float, ...]
    """In the predictor's scale."""
    total: int
    skips_zeros: bool
    is_log: bool
    estimate: tuple[float, ...] = ()
    """Of the Kalman filter: level, trend, and the variance of the level, the covariance and the variance of the trend."""


class LoadPredictor(Protocol):
    """A sequence of equidistant values that can be extrapolated by one."""

    def add(self, value: float) -> None:
        """Add the value of the interval that ended."""
        ...

    def predict(self) -> float:
        """Return the value of the next interval; 0 without values."""
        ...

    def last(self) -> float:
        """Return the last value; 0 without values."""
        ...

    def skip_idle(self) -> None:
        """Skip zeros until the next value that is not, as at the start (after a warm-up trace)."""
        ...

    def state(self) -> PredictorState:
        """Return the state for a checkpoint."""
        ...

    def restore(self, state: PredictorState) -> None:
        """Set the state to that of a checkpoint."""
        ...


class _History:
    """Values of a predictor, in its own scale, without the zeros before the first request."""

    def __init__(self, points_min: int, size_max: int, *, is_log: bool) -> None:
        self.points_min = points_min
        self.is_log = is_log
        self.values: deque[float] = deque(maxlen=size_max)
        self.total = 0
        """Values so far, with those that are no longer kept."""
        self._skips_zeros = True

    def add(self, value: float) -> bool:
        """Keep a value; return False if it is a skipped zero."""
        finite = value if math.isfinite(value) else 0.0
        if self._skips_zeros and finite == 0:
            return False
        self._skips_zeros = False
        self.values.append(math.log1p(max(0.0, finite)) if self.is_log else finite)
        self.total += 1
        return True

    def skip_idle(self) -> None:
        self._skips_zeros = True

    def state(self) -> PredictorState:
        return PredictorState(
            values=tuple(self.values), total=self.total, skips_zeros=self._skips_zeros, is_log=self.is_log
        )

    def restore(self, state: PredictorState) -> None:
        self.values.clear()
        self.values.extend(state.values)
        self.total, self._skips_zeros = state.total, state.skips_zeros

    def last(self) -> float:
        return self.restored(self.values[-1]) if self.values else 0.0

    def restored(self, value: float) -> float:
        """Return a value of the history's scale as a load."""
        return math.expm1(value) if self.is_log else value

    @property
    def suffices(self) -> bool:
        return bool(self.values) and len(self.values) >= self.points_min


class ConstantPredictor:
    """Predicts the last value."""

    def __init__(self, config: PlannerConfig) -> None:
        self._history = _History(1, 1, is_log=False)

    def add(self, value: float) -> None:
        """Add the value of the interval that ended."""
        self._history.add(value)

    def predict(self) -> float:
        """Return the last value."""
        return self._history.last()

    def last(self) -> float:
        """Return the last value."""
        return self._history.last()

    def skip_idle(self) -> None:
        """Skip zeros until the next value that is not."""
        self._history.skip_idle()

    def state(self) -> PredictorState:
        """Return the state for a checkpoint."""
        return self._history.state()

    def restore(self, state: PredictorState) -> None:
        """Set the state to that of a checkpoint."""
        self._history.restore(state)


class KalmanPredictor:
    """Local linear trend model, a level and its change per interval, estimated by a Kalman filter.

    State transition F = [[1, 1], [0, 1]], observation H = [1, 0], process noise diag(q_level, q_trend), measurement noise r;
    the covariance is updated in Joseph's form (R. E. Kalman, 1960; A. Harvey, Structural Time Series Models, 1989).
    """

    def __init__(self, config: PlannerConfig) -> None:
        self._history = _History(
            config.kalman_min_points, max(1, config.kalman_min_points), is_log=config.load_predictor_log1p
        )
        self._level_noise = max(1e-12, config.kalman_q_level)
        self._trend_noise = max(1e-12, config.kalman_q_trend)
        self._measurement_noise = max(1e-9, config.kalman_r)
        self._level, self._trend = 0.0, 0.0
        self._covariance = (INITIAL_VARIANCE, 0.0, INITIAL_VARIANCE)
        """Variance of the level, covariance, variance of the trend."""

    def add(self, value: float) -> None:
        """Add the value of the interval that ended; the first one sets the level."""
        if not self._history.add(value):
            return
        measured = self._history.values[-1]
        if self._history.total == 1:
            self._level = measured
            return
        self._advance()
        self._update(measured)

    def predict(self) -> float:
        """Return the level after one more interval."""
        if not self._history.suffices:
            return self._history.last()
        return max(0.0, self._history.restored(self._level + self._trend))

    def last(self) -> float:
        """Return the last value."""
        return self._history.last()

    def skip_idle(self) -> None:
        """Skip zeros until the next value that is not."""
        self._history.skip_idle()

    def state(self) -> PredictorState:
        """Return the state for a checkpoint."""
        return replace(self._history.state(), estimate=(self._level, self._trend, *self._covariance))

    def restore(self, state: PredictorState) -> None:
        """Set the state to that of a checkpoint."""
        self._history.restore(state)
        if len(state.estimate) == 5:
            self._level, self._trend = state.estimate[:2]
            self._covariance = (state.estimate[2], state.estimate[3], state.estimate[4])

    def _advance(self) -> None:
        level, both, trend = self._covariance
        self._level += self._trend
        self._covariance = (level + 2 * both + trend + self._level_noise, both + trend, trend + self._trend_noise)

    def _update(self, measured: float) -> None:
        level, both, trend = self._covariance
        noise = self._measurement_noise
        total = level + noise
        gain_level, gain_trend = level / total, both / total
        error = measured - self._level
        self._level += gain_level * error
        self._trend += gain_trend * error
        kept = 1 - gain_level
        self._covariance = (
            kept * kept * level + gain_level * gain_level * noise,
            kept * (both - gain_trend * level) + gain_level * gain_trend * noise,
            trend - 2 * gain_trend * both + gain_trend * gain_trend * (level + noise),
        )


class ArimaPredictor:
    """ARIMA whose order is selected automatically at the first prediction; later values update its coefficients.

    A selection without autoregressive and moving-average terms (p = q = 0) predicts a constant; it is repeated once on
    log(1 + value), which stabilizes the variance of bursts. Extra `planner` (pmdarima).
    """

    def __init__(self, config: PlannerConfig) -> None:
        self._fit = _auto_arima()
        self._raw = _History(POINTS_MIN, HISTORY_MAX, is_log=False)
        self._is_log = config.load_predictor_log1p
        self._model: Any = None
        self._pending: list[float] = []

    def add(self, value: float) -> None:
        """Add the value of the interval that ended."""
        if self._raw.add(value) and self._model is not None:
            self._pending.append(self._scaled(self._raw.values[-1]))
            if self._raw.total % HISTORY_MAX == 0:
                self._model = None  # Its copy of the history is longer than ours: select again.

    def predict(self) -> float:
        """Return the forecast of one interval; the last value where no model can be fitted."""
        values = list(self._raw.values)
        if not self._raw.suffices:
            return self.last()
        if min(values) == max(values):
            return max(0.0, values[0])
        try:
            return self._forecast(values)
        except (
            ValueError,
            TypeError,
            RuntimeError,
            ArithmeticError,
            LookupError,
        ):  # A numerical failure of the library.
            self._model = None
            return self.last()

    def last(self) -> float:
        """Return the last value."""
        return max(0.0, self._raw.last())

    def skip_idle(self) -> None:
        """Skip zeros until the next value that is not."""
        self._raw.skip_idle()

    def state(self) -> PredictorState:
        """Return the state for a checkpoint."""
        return replace(self._raw.state(), is_log=self._is_log)

    def restore(self, state: PredictorState) -> None:
        """Set the state to that of a checkpoint; the next prediction selects a model."""
        self._raw.restore(state)
        self._is_log, self._model, self._pending = state.is_log, None, []

    def _forecast(self, values: Sequence[float]) -> float:
        if self._model is None:
            self._select(values)
        elif self._pending:
            self._model.update(self._pending)
        self._pending = []
        forecast = float(self._model.predict(n_periods=1)[0])
        return max(0.0, math.expm1(forecast) if self._is_log else forecast)

    def _select(self, values: Sequence[float]) -> None:
        self._model = self._fit([self._scaled(value) for value in values])
        p, _, q = self._model.order
        if not self._is_log and p == q == 0:
            self._is_log = True
            self._model = self._fit([self._scaled(value) for value in values])

    def _scaled(self, value: float) -> float:
        return math.log1p(max(0.0, value)) if self._is_log else value


class ProphetPredictor:
    """Prophet (piecewise linear trend and daily and weekly seasons) over a sliding window. Extra `prophet`."""

    def __init__(self, config: PlannerConfig) -> None:
        self._fit_and_predict = _prophet()
        self._history = _History(POINTS_MIN, config.prophet_window_size, is_log=config.load_predictor_log1p)
        self._step = dt.timedelta(seconds=config.throughput_adjustment_interval_seconds)

    def add(self, value: float) -> None:
        """Add the value of the interval that ended."""
        self._history.add(value)

    def predict(self) -> float:
        """Return the forecast of one interval; the model is fitted at each call."""
        history = self._history
        if not history.suffices:
            return history.last()
        first = history.total - len(history.values)
        times = [START + self._step * (first + index) for index in range(len(history.values) + 1)]
        forecast = self._fit_and_predict(times, list(history.values))
        return max(0.0, history.restored(forecast))

    def last(self) -> float:
        """Return the last value."""
        return self._history.last()

    def skip_idle(self) -> None:
        """Skip zeros until the next value that is not."""
        self._history.skip_idle()

    def state(self) -> PredictorState:
        """Return the state for a checkpoint."""
        return self._history.state()

    def restore(self, state: PredictorState) -> None:
        """Set the state to that of a checkpoint."""
        self._history.restore(state)


def _auto_arima() -> Callable[[Sequence[float]], Any]:
    """Return the library's selection. Raise `ConfigError` if the library is not installed."""
    try:
        import numpy as np
        import pmdarima
    except ImportError as error:
        raise _missing(Predictor.ARIMA, "planner", error) from None

    def fit(values: Sequence[float]) -> Any:
        return pmdarima.auto_arima(np.asarray(values), suppress_warnings=True, error_action="ignore")

    return fit


def _prophet() -> Callable[[Sequence[dt.datetime], Sequence[float]], float]:
    """Return a function of n + 1 times and n values. Raise `ConfigError` if the library is not installed."""
    try:
        import pandas as pd
        import prophet
    except ImportError as error:
        raise _missing(Predictor.PROPHET, "prophet", error) from None

    def fit_and_predict(times: Sequence[dt.datetime], values: Sequence[float]) -> float:
        model = prophet.Prophet()
        model.fit(pd.DataFrame({"ds": list(times[:-1]), "y": list(values)}))
        return float(model.predict(pd.DataFrame({"ds": [times[-1]]}))["yhat"].iloc[0])

    return fit_and_predict


def _missing(predictor: Predictor, extra: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"load_predictor: {predictor.value!r}: requires the package {error.name}; "
        f"install dynamo-serve[{extra}], or set load_predictor to kalman or constant"
    )


PREDICTORS: Mapping[Predictor, Callable[[PlannerConfig], LoadPredictor]] = {
    Predictor.CONSTANT: ConstantPredictor,
    Predictor.ARIMA: ArimaPredictor,
    Predictor.PROPHET: ProphetPredictor,
    Predictor.KALMAN: KalmanPredictor,
}


def make_predictor(config: PlannerConfig) -> LoadPredictor:
    """Return the configured predictor. Raise `ConfigError` if its package is not installed."""
    return PREDICTORS[config.load_predictor](config)
