"""Canonical settings of a command line, and the facts of a card."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.mocker import config as mocker_config
from dynamo.mocker.args import parse_args
from dynamo.mocker.engine_settings import (
    apply_worker_engine_args_overrides,
    build_mocker_engine_args,
    build_runtime_config,
    load_mocker_engine_args,
)
from dynamo.mocker.normalized import normalize_mocker_config


def test_flags_are_converted_to_engine_tables() -> None:
    words = ["--engine-type", "sglang", "--max-model-len", "8", "--sglang-schedule-policy", "lpm", "--reasoning"]
    marks = {"start_thinking_token_id": 1, "end_thinking_token_id": 2, "thinking_ratio": 0.5}
    found = build_mocker_engine_args(parse_args([*words, json.dumps(marks), "--data-parallel-size", "2"]))
    engine = found["engine"]
    assert (engine["backend"], engine["block_size"], engine["max_model_len"], found["dp_size"]) == ("sglang", 1, 8, 2)
    assert engine["sglang"]["schedule_policy"] == "lpm"
    assert found["dynamo"]["reasoning"] == marks
    assert found["dynamo"]["enable_local_indexer"] is True


def test_planner_profile_flag_sets_the_timing_model() -> None:
    found = build_mocker_engine_args(parse_args(["--planner-profile-data", "p.npz"]))
    assert found["engine"]["timing_model"] == {
        "type": "external",
        "provider": "dynamo_profile",
        "config": {"path": "p.npz"},
    }


def test_host_tier_flags_require_the_number_of_host_blocks() -> None:
    words = ["--num-host-blocks", "4", "--kv-bytes-per-token", "1024", "--host-offload-d2h-bandwidth-gbps", "8"]
    engine = build_mocker_engine_args(parse_args(words))["engine"]
    host = {"num_host_blocks": 4, "d2h_bandwidth_gbps": 8.0, "h2d_bandwidth_gbps": 32.0}
    assert engine["native_host_offload"] == host
    assert (engine["kv_cache_bytes_per_token"], engine["kv_transfer_bytes_per_token"]) == (1024, 1024)
    without = Namespace(engine_type="vllm", disaggregation_mode="agg", host_offload_d2h_bandwidth_gbps=8.0)
    with pytest.raises(InvalidArgument, match="--num-host-blocks"):
        build_mocker_engine_args(without)


def test_engine_args_file_replaces_the_flags(tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    file.write_text('{"engine": {"max_num_seqs": 3}}')
    args = parse_args(["--extra-engine-args", str(file), "--max-num-seqs", "9"])
    assert load_mocker_engine_args(args)["engine"]["max_num_seqs"] == 3
    assert load_mocker_engine_args(parse_args(["--max-num-seqs", "9"]))["engine"]["max_num_seqs"] == 9


def test_worker_overrides_do_not_change_the_shared_settings() -> None:
    shared = normalize_mocker_config()
    own = apply_worker_engine_args_overrides(shared, bootstrap_port=9001, kv_bytes_per_token=128, ais_mtp_seed=9)
    assert (own["dynamo"]["bootstrap_port"], shared["dynamo"]["bootstrap_port"]) == (9001, None)
    assert (own["engine"]["kv_transfer_bytes_per_token"], own["engine"]["aic_mtp_seed"]) == (128, 9)


@pytest.mark.parametrize(
    ("mode", "publishes", "has_host"), [("agg", True, False), ("decode", False, False), ("prefill", True, True)]
)
def test_runtime_config_describes_the_engine_by_disaggregation_mode(
    monkeypatch: pytest.MonkeyPatch, mode: str, publishes: bool, has_host: bool
) -> None:
    monkeypatch.setenv("DYN_HTTP_RPC_HOST", "127.0.0.1")
    settings = build_mocker_engine_args(parse_args(["--disaggregation-mode", mode, "--max-model-len", "8"]))
    block, facts = build_runtime_config(apply_worker_engine_args_overrides(settings, bootstrap_port=9001))
    assert (block, facts.context_length, facts.total_kv_blocks) == (64, 8, 16384)
    assert facts.kv_event_publishing_enabled is publishes
    assert facts.enable_local_indexer is publishes
    assert (facts.bootstrap_host, facts.bootstrap_port) == (("127.0.0.1", 9001) if has_host else (None, None))


def test_mocker_config_module_exports_the_upstream_functions() -> None:
    assert mocker_config.build_mocker_engine_args is build_mocker_engine_args
    assert mocker_config.normalize_mocker_config is normalize_mocker_config
