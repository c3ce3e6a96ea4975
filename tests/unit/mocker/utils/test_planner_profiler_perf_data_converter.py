"""Conversion of a profiler's results into the mocker's lookup tables."""

import json
from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.mocker.profile import profiled
from dynamo.mocker.utils.planner_profiler_perf_data_converter import (
    ConverterOptions,
    convert_profile_results_to_npz,
    is_mocker_format_npz,
    is_profile_results_dir,
)


def results(folder: Path) -> Path:
    prefill = {"prefill_isl": [100.0, 1000.0], "prefill_ttft": [10.0, 50.0]}
    decode = {
        "x_kv_usage": [0.1, 0.5, 0.9],
        "y_context_length": [100.0, 500.0, 900.0],
        "z_itl": [5.0, 8.0, 12.0],
        "max_kv_tokens": 10_000,
    }
    (folder / "prefill_raw_data.json").write_text(json.dumps(prefill))
    (folder / "decode_raw_data.json").write_text(json.dumps(decode))
    return folder


def test_converted_npz_file_has_the_times_of_the_profile_directory(tmp_path: Path) -> None:
    source, file = results(tmp_path), tmp_path / "tables" / "perf_data.npz"
    file.parent.mkdir()
    assert is_profile_results_dir(source)
    assert convert_profile_results_to_npz(source, file, resolution=7) == file
    assert is_mocker_format_npz(file)
    found, expected = profiled(str(file)), profiled(str(source), grid=7)
    assert found == expected
    assert len(found.step_times_ms) == 7


def test_invalid_files_and_directories_are_not_recognized_as_profiles(tmp_path: Path) -> None:
    assert not is_profile_results_dir(tmp_path)
    (tmp_path / "x.npz").write_bytes(b"x")
    assert not is_mocker_format_npz(tmp_path / "x.npz")
    assert not is_mocker_format_npz(tmp_path / "missing.npz")
    with pytest.raises(FileNotFoundError, match="no profiling results"):
        convert_profile_results_to_npz(tmp_path, tmp_path / "out.npz")


def test_converter_options_are_validated() -> None:
    with pytest.raises(ConfigError, match="--profile_results_dir is missing"):
        ConverterOptions()
    with pytest.raises(ConfigError, match="--resolution 1"):
        ConverterOptions(profile_results_dir="x", resolution=1)
