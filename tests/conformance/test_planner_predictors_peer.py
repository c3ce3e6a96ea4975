"""Load predictors compared with the released planner's on the same random histories."""

import math
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.planner_peer import planner_home
from tests.conformance.planner_cases import released

from dynamo.planner.config.planner_config import parse
from dynamo.planner.core.predictors import make_predictor

pytestmark = pytest.mark.conformance


@pytest.fixture
def _libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the numerical libraries of the released planner's environment importable, after our own packages."""
    added = [str(path) for path in Path(planner_home()).glob("lib/python*/site-packages")]
    monkeypatch.setattr(sys, "path", [*sys.path, *added])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def history(rng: random.Random, length: int) -> list[float | None]:
    """Return a history of one of five shapes; None: NaN."""
    shape = rng.randrange(5)
    scale = 10 ** rng.uniform(0, 4)
    values: list[float | None] = []
    for step in range(length):
        base = (1.0, 1 + step / 5, 1 + math.sin(step / 3), float(rng.random() < 0.2), rng.random())[shape]
        noise = rng.gauss(1, 0.1) if shape else 1.0
        values.append(None if rng.random() < 0.03 else max(0.0, base * scale * noise))
    return [*([0.0] * rng.randrange(3)), *values]


def cases(kind: str, count: int, lengths: tuple[int, int], **more: Any) -> list[dict[str, Any]]:
    rng = random.Random(len(kind))
    return [
        {
            "config": {
                "load_predictor": kind,
                "load_predictor_log1p": rng.random() < 0.5,
                "kalman_q_level": rng.choice([1.0, 0.1, 5.0]),
                "kalman_r": rng.choice([10.0, 0.0, 1.0]),
                "kalman_min_points": rng.choice([0, 1, 3, 5]),
                "prophet_window_size": rng.choice([4, 10, 50]),
            },
            "values": history(rng, rng.randint(*lengths)),
            "reset_at": rng.choice([None, 3]),
            **more,
        }
        for _ in range(count)
    ]


def compare(given: list[dict[str, Any]], relative: float) -> None:
    differences = []
    for case, expected in zip(given, released("predictor", given), strict=True):
        predictor = make_predictor(parse(case["config"]))
        found = []
        for index, value in enumerate(case["values"]):
            if index == case["reset_at"]:
                predictor.skip_idle()
            predictor.add(math.nan if value is None else value)
            if index >= case.get("predict_from", 0):
                found.append(predictor.predict())
        found.append(predictor.last())
        if found != pytest.approx(expected, rel=relative, abs=relative):
            differences.append((case, found, expected))
    assert not differences, f"{len(differences)} of {len(given)}: {differences[0]}"


def test_constant_and_kalman_predictors_equal_the_released_ones() -> None:
    compare(cases("constant", 2000, (0, 30)), 1e-9)
    compare(cases("kalman", 2000, (0, 30)), 1e-7)


# ARIMA and Prophet are the same library on both sides and take seconds per case, so that a few cases show the use of it.


@pytest.mark.usefixtures("_libraries")
def test_arima_predictor_equals_the_released_one() -> None:
    compare(cases("arima", 6, (5, 12)), 1e-6)


@pytest.mark.usefixtures("_libraries")
def test_prophet_predictor_equals_the_released_one() -> None:
    compare(cases("prophet", 10, (8, 14), predict_from=12), 1e-4)
