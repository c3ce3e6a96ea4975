"""Fit: coefficients that made the points are found again."""

import json
from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.mocker.simulation.timing import FittedTiming
from dynamo.replay.fit import FitConfig, Measured, cross_validation, foretold, main, newton, refined, solve

TRUTH = FittedTiming(step_ms=8.0, request_ms=0.2, kv_token_ms=0.0, prompt_ms=0.0, prompt_token_ms=0.05)
CONFIG = FitConfig()


@pytest.fixture(scope="module")
def points() -> list[Measured]:
    """Return the measurements of an engine with those times."""
    shapes = ((2, 512), (8, 512), (16, 1024))
    return [foretold(Measured(at_once, isl, 32, 1.0, 1.0), TRUTH, CONFIG) for at_once, isl in shapes]


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.replay.fit.REFINEMENTS", 2)


def test_linear_solver_recovers_known_coefficients_without_negative_ones() -> None:
    rows = [[1.0, 2.0, 0.0], [1.0, 5.0, 1.0], [1.0, 9.0, 3.0], [1.0, 1.0, 7.0]]
    truth = (3.0, 0.5, 0.25)
    wanted = [sum(part * factor for part, factor in zip(row, truth, strict=True)) for row in rows]
    assert solve(rows, wanted) == pytest.approx(truth, rel=1e-3)
    assert min(solve([[1.0, 1.0], [1.0, 3.0]], [3.0, 1.0])) >= 0


def test_fitted_timing_predicts_the_measured_points(points: list[Measured], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.replay.fit.REFINEMENTS", 5)
    timing = refined(points, CONFIG)
    for point in points:
        found = foretold(point, timing, CONFIG)
        assert found.tpot_ms == pytest.approx(point.tpot_ms, rel=0.1)
        assert found.ttft_ms == pytest.approx(point.ttft_ms, rel=0.25)


def test_newton_step_removes_linear_errors() -> None:
    columns, left = [[1.0, 2.0, 0.0], [0.0, 1.0, 3.0]], [2.0, 7.0, 9.0]
    assert newton(columns, left, 0.0) == pytest.approx([-2.0, -3.0])


def test_cross_validation_reports_mean_absolute_errors(points: list[Measured]) -> None:
    errors = cross_validation(points, CONFIG)["mean_absolute_error_percent"]
    assert set(errors) == {"ttft_ms", "tpot_ms", "tok_s"}
    assert errors["tpot_ms"] < 40


def test_fit_command_prints_engine_args(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "points.json"
    path.write_text(
        json.dumps(
            [
                {"concurrency": at, "input_tokens": 64, "output_tokens": 16, "ttft_ms": 20 + at, "tpot_ms": 5 + at}
                for at in (1, 2, 4)
            ]
        )
    )
    assert main([str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["extra_engine_args"]["fitted_timing"]["step_ms"] > 0
    assert "tok_s" not in found["cross_validation"]["mean_absolute_error_percent"]


def test_missing_or_too_few_points_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "points.json"
    path.write_text("[]")
    for argv in ([], ["nowhere.json"], [str(path)]):
        with pytest.raises(ConfigError):
            main(argv)
