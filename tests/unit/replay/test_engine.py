"""Engine args: step times from a profile."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.core.errors import ConfigError
from dynamo.replay.engine import EngineArgs, engine_args, profiled

PROFILE = {
    "prefill_isl": [100.0, 200.0],
    "prefill_ttft_ms": [10.0, 30.0],
    "decode_active_kv_tokens": [1000.0, 5000.0],
    "decode_context_length": [50.0, 500.0],
    "decode_itl": [[5.0, 6.0], [7.0, 9.0]],
}


def test_profile_times_are_interpolated_and_extrapolated_between_points(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {name: np.array(values) for name, values in PROFILE.items()}
    np.savez(tmp_path / "data.npz", **arrays)
    timing = profiled(str(tmp_path))
    assert [timing.prefill_ms(tokens) for tokens in (0, 1, 100, 150, 300)] == pytest.approx([0, 0, 10, 20, 50])
    assert timing.decode_ms(1000, 0, 20) == 5
    assert timing.decode_ms(1000, 0, 2) == 6
    assert timing.decode_ms(3000, 0, 6) == pytest.approx(7.5)
    assert timing.decode_ms(9000, 0, 18) == pytest.approx(12)
    assert timing.decode_ms(0, 0, 0) == 0


def test_json_profile_is_read_and_scaled_by_the_speedup_ratios(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps(PROFILE))
    timing = EngineArgs(planner_profile_data=str(path), speedup_ratio=2, decode_speedup_ratio=5).timing()
    assert timing.prefill_ms(150) == 10
    assert timing.decode_ms(1000, 0, 20) == 0.5


def test_fitted_timing_model_replaces_the_polynomials() -> None:
    timing = engine_args('{"fitted_timing": {"step_ms": 8, "request_ms": 0.5, "kv_token_ms": 0.001}}').timing()
    assert timing.decode_ms(1000, 0, 4) == 11
    assert timing.prefill_ms(50) == 0


@pytest.mark.parametrize("change", [{"decode_itl": [[1.0]]}, {"prefill_isl": []}, {"prefill_ttft_ms": None}])
def test_incomplete_profile_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps({name: value for name, value in {**PROFILE, **change}.items() if value is not None}))
    with pytest.raises(ConfigError):
        profiled(str(path))
    with pytest.raises(ConfigError):
        profiled(str(tmp_path / "nowhere.npz"))
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match="expected one"):
        profiled(str(tmp_path))


def test_upstream_engine_tables_describe_the_same_engine() -> None:
    text = """{
        "engine": {"backend": "sglang", "worker_type": "decode", "num_gpu_blocks": 500, "max_num_seqs": 8,
                   "sglang": {"schedule_policy": "lpm"}, "timing_model": {"type": "polynomial"},
                   "kv_transfer_bytes_per_token": 7, "max_model_len": null},
        "dp_size": 2,
        "dynamo": {"enable_local_indexer": true, "handoff_session_timeout_ms": 5, "reasoning": null}
    }"""
    expected = EngineArgs(
        engine_type="sglang",
        block_size=1,
        num_gpu_blocks=500,
        max_num_seqs=8,
        sglang_schedule_policy="lpm",
        kv_bytes_per_token=7,
        dp_size=2,
    )
    assert engine_args(text) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"engine": {"g3_offload": {}}}', "--extra-engine-args: g3_offload"),
        ('{"engine": {"max_model_len": 0}}', "max_model_len is 0"),
        ('{"engine": {"max_num_seqs": 0}}', "max_num_seqs is 0"),
        ('{"engine": {"block_size": "x"}}', "block_size"),
    ],
)
def test_invalid_engine_table_is_refused_by_name(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        engine_args(text)
