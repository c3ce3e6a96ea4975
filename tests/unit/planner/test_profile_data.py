"""Profile files: both formats give the same steps; wrong files are errors in one line."""

import json
from pathlib import Path

import numpy as np
import pytest

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.profile_data import benchmark_steps, read_decode_profile, read_prefill_profile, read_profile

PREFILL = {"prefill_isl": [100, 2000], "prefill_ttft": [20.0, 250.0]}
DECODE = {"x_kv_usage": [0.1, 0.5], "y_context_length": [500, 1000], "z_itl": [8.0, 12.0], "max_kv_tokens": 10_000}


def write_json(directory: Path, decode: dict[str, object] = DECODE) -> None:
    (directory / "prefill_raw_data.json").write_text(json.dumps(PREFILL))
    (directory / "decode_raw_data.json").write_text(json.dumps(decode))


def test_profile_files_become_steps_of_the_measured_load(tmp_path: Path) -> None:
    write_json(tmp_path)
    prefill, decode = (read_profile(str(tmp_path), role)[1] for role in (EngineRole.PREFILL, EngineRole.DECODE))
    assert (prefill.scheduled_requests.sum_prefill_tokens, prefill.wall_time) == (2000, 0.25)
    load = decode.scheduled_requests
    assert (load.num_decode_requests, load.sum_decode_kv_tokens, decode.wall_time) == (5, 5000, 0.012)


def test_npz_profile_files_equal_the_json_ones(tmp_path: Path) -> None:
    write_json(tmp_path)
    expected = read_profile(str(tmp_path), EngineRole.AGGREGATED)
    assert len(expected) == 4
    for role, arrays in (("prefill", PREFILL), ("decode", {**DECODE, "max_kv_tokens": [10_000]})):
        (tmp_path / f"selected_{role}_interpolation").mkdir()
        np.savez(tmp_path / f"selected_{role}_interpolation" / "raw_data.npz", **arrays)  # type: ignore[arg-type]
        (tmp_path / f"{role}_raw_data.json").unlink()
    assert read_profile(str(tmp_path), EngineRole.AGGREGATED) == expected


def test_role_requires_only_its_own_profile_file(tmp_path: Path) -> None:
    write_json(tmp_path)
    (tmp_path / "prefill_raw_data.json").unlink()
    assert read_profile(str(tmp_path), EngineRole.DECODE) == read_profile(str(tmp_path), EngineRole.AGGREGATED)
    with pytest.raises(ConfigError, match="profile_results_dir: cannot read"):
        read_profile(str(tmp_path), EngineRole.PREFILL)


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
        read_profile(str(tmp_path), EngineRole.DECODE)


def test_absent_profile_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="profile_results_dir: cannot read"):
        read_profile(str(tmp_path / "none"), EngineRole.DECODE)


def test_profile_files_give_the_throughput_for_interpolation(tmp_path: Path) -> None:
    (tmp_path / "prefill_raw_data.json").write_text(json.dumps({**PREFILL, "prefill_thpt_per_gpu": [1000, 900]}))
    (tmp_path / "decode_raw_data.json").write_text(json.dumps({**DECODE, "z_thpt_per_gpu": [50, 60]}))
    assert read_prefill_profile(str(tmp_path)).thpt_per_gpu == [1000.0, 900.0]
    decode = read_decode_profile(str(tmp_path))
    assert (decode.thpt_per_gpu, decode.max_kv_tokens) == ([50.0, 60.0], 10_000)


STEP = {"wall_time": 0.02, "scheduled_requests": {"num_prefill_requests": 1, "sum_prefill_tokens": 300}}
REPLY = {
    "results": [
        {"point": {"point_type": "prefill", "isl": 300}, "fpms": [STEP, {**STEP, "wall_time": 0.0}]},
        {"point": {"point_type": "decode"}, "fpms": [{**STEP, "version": 1, "worker_id": "7"}]},
    ]
}


@pytest.mark.parametrize("reply", [REPLY, json.dumps(REPLY)])
def test_benchmark_reply_gives_the_steps_of_a_role(reply: object) -> None:
    (prefill,) = benchmark_steps(reply, EngineRole.PREFILL)
    assert (prefill.wall_time, prefill.scheduled_requests.sum_prefill_tokens) == (0.02, 300)
    assert [one.worker_id for one in benchmark_steps(reply, EngineRole.DECODE)] == ["7"]
    assert len(benchmark_steps(reply, EngineRole.AGGREGATED)) == 2


def test_benchmark_reply_of_an_engine_without_one_has_no_steps() -> None:
    assert benchmark_steps({"status": "error", "message": "off"}, EngineRole.PREFILL) == []


def test_benchmark_reply_of_another_form_is_one_line() -> None:
    with pytest.raises(InvalidArgument, match="get_perf_metrics"):
        benchmark_steps({"results": 3}, EngineRole.PREFILL)
