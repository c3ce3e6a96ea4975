"""Warm-up trace: requests become the traffic of intervals; wrong files are errors in one line."""

import json
from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.planner.warm_up import read_warm_up


def write(path: Path, *rows: tuple[float, int, int]) -> str:
    lines = [json.dumps({"timestamp": at, "input_length": isl, "output_length": osl}) for at, isl, osl in rows]
    path.write_text("\n".join(lines))
    return str(path)


def test_warm_up_trace_becomes_counts_and_mean_lengths_of_intervals(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", (5000, 100, 10), (9000, 300, 30), (26_000, 50, 5))
    found = [(one.num_req, one.isl, one.osl) for one in read_warm_up(path, 10.0)]
    assert found == [(2, 200, 20), (0, 0, 0), (1, 50, 5)]


def test_empty_warm_up_trace_has_no_intervals(tmp_path: Path) -> None:
    assert read_warm_up(write(tmp_path / "trace"), 10.0) == []


def test_invalid_line_of_a_warm_up_trace_is_named(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text('{"timestamp": 0, "input_length": 1, "output_length": 1}\n{"timestamp": 1}\n')
    with pytest.raises(ConfigError, match=r"load_predictor_warmup_trace: .*trace:2: .*input_length"):
        read_warm_up(str(tmp_path / "trace"), 10.0)


def test_absent_warm_up_trace_is_an_error() -> None:
    with pytest.raises(ConfigError, match="load_predictor_warmup_trace: cannot read /none"):
        read_warm_up("/none", 10.0)


def test_warm_up_trace_in_another_unit_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", (0, 1, 1), (1e15, 1, 1))
    with pytest.raises(ConfigError, match="must be at most"):
        read_warm_up(path, 10.0)
