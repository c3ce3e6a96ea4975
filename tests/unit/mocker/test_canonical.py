"""Upstream's JSON settings become the mocker's own, and beat its flags."""

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo.backend.disagg import DisaggregationMode
from dynamo.core.config import load
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.mocker.canonical import settings_of, with_extra
from dynamo.mocker.config import MockerConfig


def configured(tmp_path: Path, settings: Any, *argv: str) -> MockerConfig:
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(settings))
    return with_extra(load(MockerConfig, [*argv, f"--extra-engine-args={path}"], {}, "mocker"))


def test_engine_args_file_takes_precedence_over_flags(tmp_path: Path) -> None:
    config = configured(
        tmp_path,
        {
            "engine": {
                "backend": "sglang",
                "num_gpu_blocks": 99,
                "worker_type": "decode",
                "max_model_len": None,
                "sglang": {"schedule_policy": "lpm", "max_prefill_tokens": 100},
                "kv_transfer_bytes_per_token": 12,
                "prefill_schedule_interval": 1,
            },
            "dp_size": 2,
            "dynamo": {"handoff_session_timeout_ms": 5, "enable_local_indexer": True},
        },
        "--num-gpu-blocks-override=5",
        "--is-prefill-worker",
        "--max-model-len=77",
    )
    limits = config.limits()
    assert (limits.engine_type, limits.num_blocks, limits.block_tokens) == ("sglang", 99, 1)
    assert (limits.sglang.schedule_policy, limits.sglang.max_prefill_tokens) == ("lpm", 100)
    assert (config.role, config.data_parallel_size, config.handoff_timeout_ms) == (DisaggregationMode.DECODE, 2, 5)
    assert config.max_model_len == 77, "null asks for nothing"
    assert limits.transfer.bytes_per_token == 12


def test_host_tier_settings_are_read_from_their_table(tmp_path: Path) -> None:
    table = {"num_host_blocks": 8, "d2h_bandwidth_gbps": 4, "h2d_bandwidth_gbps": 0}
    engine = {"native_host_offload": table, "kv_cache_bytes_per_token": 1000}
    host = configured(tmp_path, {"engine": engine}).limits().host
    assert host is not None
    assert (host.num_blocks, host.block_bytes, host.to_host_gbps, host.to_device_gbps) == (8, 64_000, 4, 0)


def test_flat_settings_form_is_accepted() -> None:
    assert settings_of({"num_gpu_blocks": 5, "dp_size": 3}) == {"num_gpu_blocks": 5, "data_parallel_size": 3}


def test_timing_model_is_a_profile_or_the_polynomial() -> None:
    external = {"type": "external", "provider": "dynamo_profile", "config": {"path": "p.npz"}}
    assert settings_of({"engine": {"timing_model": external}}) == {"planner_profile_data": "p.npz"}
    assert settings_of({"engine": {"timing_model": {"type": "polynomial"}}}) == {}
    with pytest.raises(InvalidArgument, match="timing_model"):
        settings_of({"engine": {"timing_model": {"type": "external", "provider": "ais", "config": {}}}})


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ([], "expected an object"),
        ({"engine": {"zzz": 1}}, "zzz"),
        ({"engine": {"native_host_offload": {"scope": "pod"}}}, "native_host_offload.scope"),
        ({"engine": {"prefill_decode_interval": 3}}, "prefill_decode_interval"),
        ({"engine": {"max_num_seqs": 0}}, "--max-num-seqs 0"),
        ({"engine": {"max_num_seqs": "many"}}, "max|supported"),
    ],
)
def test_unsupported_setting_is_refused_by_name(tmp_path: Path, settings: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        configured(tmp_path, settings)


def test_missing_engine_args_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none"):
        with_extra(load(MockerConfig, [f"--extra-engine-args={tmp_path / 'none.json'}"], {}, "mocker"))
