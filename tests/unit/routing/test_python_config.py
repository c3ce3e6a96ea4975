"""Upstream's settings in Python mean the same as the flags."""

from pathlib import Path
from typing import Any

import pytest

from dynamo.llm import KvRouterConfig


def test_defaults_are_those_of_the_flags() -> None:
    config = KvRouterConfig().meaning(16)
    assert config.block_size == 16
    assert config.use_kv_events and config.track_active_blocks and config.weights.assume_kv_reuse
    assert (config.weights.overlap_score_credit, config.weights.prefill_load_scale) == (1.0, 1.0)
    assert (config.weights.host_cache_hit_weight, config.weights.disk_cache_hit_weight) == (0.75, 0.25)
    assert config.queue_threshold is None and config.affinity_ttl_s is None


def test_the_older_weight_is_the_prefill_scale_and_nothing_of_it_means_no_credit() -> None:
    assert KvRouterConfig(2.0).prefill_load_scale == 2.0
    assert KvRouterConfig(2.0).overlap_score_weight == 2.0
    off = KvRouterConfig(0.0)
    assert off.overlap_score_credit == 0.0
    assert not off.meaning(16).use_kv_events  # Nobody would look at them.


def test_a_copy_with_overrides_leaves_the_first_as_it_was() -> None:
    first = KvRouterConfig(router_temperature=0.5)
    other = first.with_overrides(overlap_score_credit=0.5, decode_active_request_weight=2.0)
    assert (other.overlap_score_credit, other.decode_active_request_weight, other.router_temperature) == (0.5, 2.0, 0.5)
    assert (first.overlap_score_credit, first.decode_active_request_weight) == (1.0, 0.0)
    assert first.with_overrides(0.0).overlap_score_credit == 0.0
    assert first.copy() == first and first.copy() is not first


def test_json_says_the_same() -> None:
    assert KvRouterConfig.from_json('{"overlap_score_credit": 0.5}').overlap_score_credit == 0.5
    for text in ("{", "[]", '{"foo": 1}', '{"router_temperature": -1}'):
        with pytest.raises(ValueError, match="Failed to parse KvRouterConfig JSON"):
            KvRouterConfig.from_json(text)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"overlap_score_credit": -1}, "overlap_score_credit"),
        ({"router_temperature": float("inf")}, "router_temperature"),
        ({"host_cache_hit_weight": 2}, "host_cache_hit_weight"),
        ({"router_queue_policy": "lifo"}, "router_queue_policy"),
        ({"router_approximate_cache_policy": "lru"}, "use_kv_events=False"),
        ({"use_kv_events": False, "router_predicted_ttl_secs": 2.0}, "router_predicted_ttl_secs"),
        ({"router_event_threads": 0}, "router_event_threads"),
        ({"shared_cache_type": "redis"}, "shared_cache_type"),
        ({"shared_cache_multiplier": 2.0}, "shared_cache_multiplier"),
        ({"router_prefill_load_model": "guess"}, "router_prefill_load_model"),
        ({"router_tracking_hash": "md5"}, "router_tracking_hash"),
        ({"router_tracking_hash": "keyed-xxh3-v1"}, "router_tracking_key_file"),
        ({"router_tracking_key_id": "2026"}, "keyed-xxh3-v1"),
    ],
)
def test_a_value_that_is_out_of_range_or_not_known_is_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        KvRouterConfig(**given)


def test_a_policy_file_beats_what_is_said_here(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("router: {use_kv_events: false}\n")
    assert not KvRouterConfig(router_policy_config=path).meaning(16).use_kv_events
    with pytest.raises(ValueError, match=r"missing\.yaml"):
        KvRouterConfig(router_policy_config=str(tmp_path / "missing.yaml")).meaning(16)
    with pytest.raises(ValueError, match=r"missing\.yaml"):
        KvRouterConfig(router_policy_config=str(tmp_path / "missing.yaml")).profile()


def test_shared_caches_sessions_and_keys_mean_what_the_flags_mean() -> None:
    config = KvRouterConfig(
        shared_cache_type="hicache",
        shared_cache_multiplier=0.25,
        enable_session_prefix_index=True,
        router_tracking_hash="keyed-xxh3-v1",
        router_tracking_key_file=Path("key"),
        router_tracking_key_id="2026",
    ).meaning(16)

    assert (config.shared_cache, config.weights.shared_cache_multiplier, config.session_prefixes) == (
        "hicache",
        0.25,
        True,
    )
    assert (config.tracking_hash, config.tracking_key_file, config.tracking_key_id) == (
        "keyed-xxh3-v1",
        "key",
        "2026",
    )


def test_the_prefill_model_wants_to_know_the_engine() -> None:
    wanted = KvRouterConfig(router_prefill_load_model="ais")
    with pytest.raises(ValueError, match="backend, system, model"):
        wanted.meaning(16)

    engine = {"backend": "vllm", "system": "unknown", "model": "m", "worker_type": "aggregated"}
    assert wanted.meaning(16, ais_perf_config=engine).prefill_load_model == "ais"
    with pytest.raises(ValueError, match="ais_perf_config"):
        wanted.meaning(16, ais_perf_config=3)
    assert KvRouterConfig().meaning(16).prefill_load_model == "none"
