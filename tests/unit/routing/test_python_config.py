"""Upstream's settings in Python mean the same as the flags."""

import logging
from pathlib import Path
from typing import Any

import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.model_card import ModelDeploymentCard
from dynamo.routing.busy import Thresholds
from dynamo.routing.python_config import KvRouterConfig, RouterConfig, WantedRouting, wanted_routing
from dynamo.runtime.push_router import RouterMode


def test_python_router_config_defaults_equal_those_of_the_flags() -> None:
    config = KvRouterConfig().meaning(16)
    assert config.block_size == 16
    assert config.use_kv_events and config.track_active_blocks and config.weights.assume_kv_reuse
    assert (config.weights.overlap_score_credit, config.weights.prefill_load_scale) == (1.0, 1.0)
    assert (config.weights.host_cache_hit_weight, config.weights.disk_cache_hit_weight) == (0.75, 0.25)
    assert config.queue_threshold is None and config.affinity_ttl_s is None


def test_python_router_config_maps_the_older_weight_to_prefill_scale() -> None:
    assert KvRouterConfig(2.0).prefill_load_scale == 2.0
    assert KvRouterConfig(2.0).overlap_score_weight == 2.0
    off = KvRouterConfig(0.0)
    assert off.overlap_score_credit == 0.0
    assert not off.meaning(16).use_kv_events  # The router would not use them.


def test_python_router_config_copy_with_overrides_leaves_the_original() -> None:
    first = KvRouterConfig(router_temperature=0.5)
    other = first.with_overrides(overlap_score_credit=0.5, decode_active_request_weight=2.0)
    assert (other.overlap_score_credit, other.decode_active_request_weight, other.router_temperature) == (0.5, 2.0, 0.5)
    assert (first.overlap_score_credit, first.decode_active_request_weight) == (1.0, 0.0)
    assert first.with_overrides(0.0).overlap_score_credit == 0.0
    assert first.copy() == first and first.copy() is not first


def test_python_router_config_round_trips_json() -> None:
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
def test_python_router_config_error_names_an_invalid_value(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        KvRouterConfig(**given)


def test_python_router_config_policy_file_takes_precedence(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("router: {use_kv_events: false}\n")
    assert not KvRouterConfig(router_policy_config=path).meaning(16).use_kv_events
    with pytest.raises(ValueError, match=r"missing\.yaml"):
        KvRouterConfig(router_policy_config=str(tmp_path / "missing.yaml")).meaning(16)
    with pytest.raises(ValueError, match=r"missing\.yaml"):
        KvRouterConfig(router_policy_config=str(tmp_path / "missing.yaml")).profile()


def test_python_router_config_shared_caches_sessions_and_keys_match_the_flags() -> None:
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


def test_python_router_config_prefill_model_requires_the_engine() -> None:
    wanted = KvRouterConfig(router_prefill_load_model="ais")
    with pytest.raises(ValueError, match="backend, system, model"):
        wanted.meaning(16)

    engine = {"backend": "vllm", "system": "unknown", "model": "m", "worker_type": "aggregated"}
    assert wanted.meaning(16, ais_perf_config=engine).prefill_load_model == "ais"
    with pytest.raises(ValueError, match="ais_perf_config"):
        wanted.meaning(16, ais_perf_config=3)
    assert KvRouterConfig().meaning(16).prefill_load_model == "none"


def card(router_config: Any) -> ModelDeploymentCard:
    return ModelDeploymentCard(display_name="m", slug="m", router_config=router_config)


@pytest.mark.parametrize("mode", list(RouterMode))
def test_routing_config_of_a_worker_card_round_trips(mode: RouterMode) -> None:
    config = RouterConfig(mode, active_prefill_tokens_threshold=5)
    assert wanted_routing(card(config.on_card())) == WantedRouting(mode, Thresholds(active_prefill_tokens_threshold=5))
    assert wanted_routing(card(RouterConfig(mode).on_card())) == WantedRouting(mode)
    config = RouterConfig(mode, enforce_disagg=True, session_affinity_ttl_secs=60, session_affinity_mode="soft")
    assert wanted_routing(card(config.on_card())) == WantedRouting(
        mode, enforce_disagg=True, affinity_ttl_s=60, affinity_mode="soft"
    )


def test_card_without_routing_config_uses_the_frontend_defaults() -> None:
    assert wanted_routing(ModelDeploymentCard(display_name="m", slug="m")) == WantedRouting()


@pytest.mark.parametrize(
    "wanted",
    [
        {"router_mode": "later", "kv_router_config": {"router_temperature": 1.0}},
        {"router_mode": 5},
        {"router_mode": "later", "session_affinity_ttl_secs": 0, "session_affinity_mode": "soft"},
        {"router_mode": "later", "session_affinity_ttl_secs": "x", "enforce_disagg": "yes"},
        {"load_threshold_config": 5},
        {"router_mode": "later", "load_threshold_config": {"active_decode_blocks_threshold": 7.0}},
        {"router_mode": "later", "load_threshold_config": {"active_decode_blocks_threshold": "x"}},
    ],
)
def test_unsupported_or_invalid_routing_is_logged_and_ignored(wanted: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert wanted_routing(card(wanted)) == WantedRouting()
    assert "model m" in caplog.text


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("config", object()),
        ("session_affinity_ttl_secs", 0),
        ("session_affinity_mode", "firm"),
        ("active_decode_blocks_threshold", 2.0),
    ],
)
def test_unsupported_router_config_argument_is_refused_by_name(argument: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=argument):
        RouterConfig(RouterMode.Random, **{argument: value})


def test_kv_router_config_of_a_worker_card_round_trips() -> None:
    kv = KvRouterConfig(router_temperature=0.5, decode_active_request_weight=2.0, router_queue_threshold=3.0)
    output = RouterConfig(RouterMode.KV, kv).on_card()
    assert output["router_mode"] == "k_v", "as the released system spells it"
    assert wanted_routing(card(output)).kv == kv
    assert "decode_active_request_weight" not in RouterConfig(RouterMode.KV, KvRouterConfig()).on_card()
    assert wanted_routing(card(output | {"router_mode": "random"})).kv is None, "random routing has no KV settings"
    assert wanted_routing(card({"router_mode": "kv"})) == WantedRouting(RouterMode.KV), "as we once said"


@pytest.mark.parametrize(
    "wrong", [{"router_temperature": -1}, {"router_queue_policy": "later"}, {"router_ttl_secs": "x"}, 5]
)
def test_invalid_kv_router_settings_are_logged_and_ignored(wrong: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = wanted_routing(card({"router_mode": "k_v", "kv_router_config": wrong}))
    assert found == WantedRouting(RouterMode.KV)
    assert "unreadable KV router settings" in caplog.text


def test_router_config_refuses_a_mode_that_is_not_a_router_mode() -> None:
    with pytest.raises(InvalidArgument, match="mode"):
        RouterConfig("random")  # type: ignore[arg-type]
