"""Profile files: both formats give the same steps; wrong files are errors in one line."""

import json
from pathlib import Path

import numpy as np
import pytest

from dynamo.core.errors import ConfigError
from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.profile_data import read_profile

PREFILL = {"prefill_isl": [100, 2000], "prefill_ttft": [20.0, 250.0]}
DECODE = {"x_kv_usage": [0.1, 0.5], "y_context_length": [500, 1000], "z_itl": [8.0, 12.0], "max_kv_tokens": 10_000}


def write_json(directory: Path, decode: dict[str, object] = DECODE) -> None:
    (directory / "prefill_raw_data.json").write_text(json.dumps(PREFILL))
    (directory / "decode_raw_data.json").write_text(json.dumps(decode))


def test_profile_files_become_steps_of_the_measured_load(tmp_path: Path) -> None:
    write_json(tmp_path)
    steps = read_profile(str(tmp_path))
    prefill, decode = steps[EngineRole.PREFILL][1], steps[EngineRole.DECODE][1]
    assert (prefill.scheduled_requests.sum_prefill_tokens, prefill.wall_time) == (2000, 0.25)
    load = decode.scheduled_requests
    assert (load.num_decode_requests, load.sum_decode_kv_tokens, decode.wall_time) == (5, 5000, 0.012)


def test_npz_profile_files_equal_the_json_ones(tmp_path: Path) -> None:
    write_json(tmp_path)
    expected = read_profile(str(tmp_path))
    for role, arrays in (("prefill", PREFILL), ("decode", {**DECODE, "max_kv_tokens": [10_000]})):
        (tmp_path / f"selected_{role}_interpolation").mkdir()
        np.savez(tmp_path / f"selected_{role}_interpolation" / "raw_data.npz", **arrays)  # type: ignore[arg-type]
        (tmp_path / f"{role}_raw_data.json").unlink()
    assert read_profile(str(tmp_path)) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"z_itl": [1.0]}, "must have the same length"),
        ({"z_itl": [1.0, float("nan")]}, "must be finite"),
        ({"y_context_length": [0, 1]}, "must be greater than 0"),
        ({"z_itl": ["a", "b"]}, "must contain arrays of numbers"),
    ],
)
def test_wrong_profile_file_is_an_error_that_names_the_array(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    write_json(tmp_path, {**DECODE, **change})
    with pytest.raises(ConfigError, match=message):
        read_profile(str(tmp_path))


def test_absent_profile_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="profile_results_dir: cannot read"):
        read_profile(str(tmp_path / "none"))
