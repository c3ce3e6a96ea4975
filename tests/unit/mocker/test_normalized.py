"""Canonical settings of a simulated engine."""

import json
from typing import Any

import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.mocker.canonical import settings_of
from dynamo.mocker.normalized import normalize_mocker_config


def test_normalized_config_contains_every_default() -> None:
    found = normalize_mocker_config()
    assert found["engine"]["num_gpu_blocks"] == 16384
    assert found["engine"]["timing_model"] == {"type": "polynomial"}
    assert found["dynamo"]["handoff_session_timeout_ms"] == 300_000
    assert "native_host_offload" not in found["engine"]


@pytest.mark.parametrize(("engine", "block"), [("vllm", 64), ("sglang", 1), ("trtllm", 32)])
def test_block_size_depends_on_the_engine(engine: str, block: int) -> None:
    assert normalize_mocker_config({"engine": {"backend": engine}})["engine"]["block_size"] == block
    assert normalize_mocker_config({"engine": {"backend": engine, "block_size": 8}})["engine"]["block_size"] == 8


def test_normalization_is_idempotent_for_objects_and_json_text() -> None:
    given = {"engine": {"timing_model": {"type": "fixed", "prefill_ms": 1.0, "decode_ms": 2.0}}, "dp_size": 2}
    found = normalize_mocker_config(given)
    assert normalize_mocker_config(found) == found
    assert normalize_mocker_config(json.dumps(found)) == found


def test_mocker_accepts_normalized_settings() -> None:
    given = {"engine": {"native_host_offload": {"num_host_blocks": 4}, "max_model_len": 8}}
    found = settings_of(normalize_mocker_config(given))
    assert (found["num_host_blocks"], found["max_model_len"]) == (4, 8)
    assert found["host_offload_d2h_bandwidth_gbps"] == 32.0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"engine_type": "sglang"}, "engine_type"),
        ({"engine": {"num_gpu_blocks": "bad"}}, "num_gpu_blocks"),
        ({"engine": {"max_model_len": 0}}, "max_model_len must be positive"),
        ({"engine": {"speedup_ratio": -1.0}}, "engine.speedup_ratio is -1.0"),
        ({"engine": {"native_host_offload": {"num_host_blocks": 0}}}, "num_host_blocks is 0"),
        ({"engine": {"timing_model": {"type": "other"}}}, "other"),
        ({"engine": {"timing_model": {"type": "fixed"}}}, "prefill_ms"),
        ({"engine": {"timing_model": {"type": "external", "provider": "x", "config": {}}}}, "x"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization is nan"),
        ({"dp_size": 0}, "dp_size is 0"),
        ({"dynamo": {"planner_profile_data": "x"}}, "planner_profile_data"),
        ("{", "truncated"),
    ],
)
def test_invalid_setting_is_refused_by_name(settings: Any, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        normalize_mocker_config(settings)
