"""A policy file has the settings of the flags, and more; errors in it are named."""

from pathlib import Path

import pytest

from dynamo.core.config import load
from dynamo.core.errors import ConfigError
from dynamo.kv_router.config import RoutingConfig
from dynamo.routing.policy_file import RouterPolicy, check_disaggregation, config_of_stage
from dynamo.routing.settings import DisaggregationOptions

FILE = """
router: {use_kv_events: false, router_ttl_secs: 30, host_cache_hit_weight: 0.5, router_assume_kv_reuse: false}
worker_selection:
  aggregated: steady
  prefill: default
  instances:
    - {name: steady, type: balanced, parameters: {prefill_load_scale: 4, router_temperature: 0.1}}
default_policy_family: interactive
uncached_isl_buckets: [{min_tokens: 0, bucket: all}]
policy_classes: [{name: chat, policy_family: interactive, cache_bucket: all, quantum: 100}]
models:
  big: {default_policy_family: batch, uncached_isl_buckets: [{min_tokens: 0, bucket: all}], policy_classes: [{name: b, policy_family: batch}]}
"""


def read(folder: Path, text: str) -> RouterPolicy:
    path = folder / "policy.yaml"
    path.write_text(text)
    return RouterPolicy.read(str(path))


def test_policy_file_takes_precedence_over_flags(tmp_path: Path) -> None:
    policy = read(tmp_path, FILE)
    config = policy.applied(RoutingConfig(block_size=32))
    assert (config.block_size, config.use_kv_events, config.approximate_ttl_s, config.policy) == (
        32,
        False,
        30,
        "balanced",
    )
    weights = config.weights
    assert (weights.host_cache_hit_weight, weights.assume_kv_reuse, weights.prefill_load_scale) == (0.5, False, 4)
    assert policy.applied(RoutingConfig(), "prefill").weights.prefill_load_scale == 1
    small, big = policy.profile("small"), policy.profile("big")
    assert small is not None
    assert big is not None
    assert (small.class_of(None, 5).name, big.class_of(None, 5).name) == ("chat", "b")


def test_policy_file_may_be_partial(tmp_path: Path) -> None:
    policy = read(tmp_path, "router: {router_event_threads: 4}")
    assert policy.profile("m") is None
    assert policy.applied(RoutingConfig()) == RoutingConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a mapping"),
        ("- 1", "expected a mapping"),
        ("{", "policy.yaml: "),
        ("nonsense: 1", "nonsense: expected one of"),
        ("router: {teleport: 1}", "router.teleport"),
        ("router: {router_ttl_secs: soon}", "Expected `float`"),
        ("router: {serve_indexer: true}", "router.serve_indexer True: expected False"),
        ("router: {router_tracking_hash: keyed-xxh3-v1}", "--router-tracking-key-file"),
        ("router: {shared_cache_type: redis}", "redis"),
        ("policy_classes: [{name: a}]", "default_policy_family, uncached_isl_buckets is missing"),
        ("worker_selection: {aggregated: x}", "no instance has this name"),
        ("worker_selection: {aggregated: x, instances: [{name: x, type: magic}]}", "type 'magic'"),
        ("worker_selection: {aggregated: x, instances: [{name: x, parameters: {speed: 1}}]}", "x.parameters.speed"),
        ("worker_selection: {aggregated: x, instances: [{name: x, parameters: {prefill_load_scale: -1}}]}", "not -1"),
        (
            "{default_policy_family: a, uncached_isl_buckets: [{min_tokens: 0, bucket: all}], policy_classes: [{quantum: x}]}",
            "quantum",
        ),
    ],
)
def test_policy_file_error_names_the_problem(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="--router-policy-config") as raised:
        read(tmp_path, text).applied(RoutingConfig())
    assert message in str(raised.value)


def test_policy_file_error_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        RouterPolicy.read(str(tmp_path / "none.yaml"))


def test_policy_file_selects_shared_caches_keys_sessions_and_indexers(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(
        "router: {shared_cache_type: hicache, router_tracking_hash: keyed-xxh3-v1, router_tracking_key_file: key, "
        "router_tracking_key_id: a, router_prefill_load_model: ais, enable_session_prefix_index: true, "
        "use_remote_indexer: true}"
    )

    found = RouterPolicy.read(str(path)).applied(RoutingConfig())

    assert (found.shared_cache, found.tracking_hash, found.tracking_key_file, found.tracking_key_id) == (
        "hicache",
        "keyed-xxh3-v1",
        "key",
        "a",
    )
    assert found.prefill_load_model == "ais" and found.session_prefixes and found.use_remote_indexer


def options(*argv: str) -> DisaggregationOptions:
    return load(DisaggregationOptions, argv, {})


def test_prefill_tracks_no_active_blocks_and_decode_uses_no_kv_events() -> None:
    config = RoutingConfig(track_output_blocks=True)
    prefill = config_of_stage(config, "prefill", None, options())
    assert (prefill.track_active_blocks, prefill.track_output_blocks, prefill.use_kv_events) == (False, False, True)
    decode = config_of_stage(config, "decode", None, options())
    assert (decode.track_active_blocks, decode.use_kv_events) == (True, False)
    assert config_of_stage(config, "aggregated", None, options()) == config


def test_conditional_disaggregation_enables_kv_events_for_decode() -> None:
    assert config_of_stage(RoutingConfig(), "decode", None, options("--router-conditional-disagg")).use_kv_events


def test_prefill_and_decode_stages_have_separate_policies(tmp_path: Path) -> None:
    given = options("--router-prefill-policy=balanced", "--router-decode-policy=default")
    assert config_of_stage(RoutingConfig(), "prefill", None, given).policy == "balanced"
    assert config_of_stage(RoutingConfig(policy="balanced"), "decode", None, given).policy == "dynamo"
    path = tmp_path / "policy.yaml"
    path.write_text(
        "worker_selection:\n  prefill: calm\n  instances:\n"
        "    - {name: calm, parameters: {prefill_load_scale: 4}}\n"
        "    - {name: wild, parameters: {prefill_load_scale: 8}}\n"
    )
    policy = RouterPolicy.read(str(path))
    assert config_of_stage(RoutingConfig(), "prefill", policy, options()).weights.prefill_load_scale == 4
    named = options("--router-prefill-policy=wild", "--router-decode-policy=calm")
    assert config_of_stage(RoutingConfig(), "prefill", policy, named).weights.prefill_load_scale == 8, "the flag wins"
    assert config_of_stage(RoutingConfig(), "decode", policy, named).weights.prefill_load_scale == 4
    with pytest.raises(ConfigError, match="unknown"):
        check_disaggregation(options("--router-decode-policy=unknown"), "kv", RoutingConfig(), policy)


@pytest.mark.parametrize(
    ("argv", "mode", "config", "expected_message"),
    [
        (("--router-conditional-disagg",), "round-robin", RoutingConfig(), "--router-mode kv"),
        (("--router-conditional-disagg",), "kv", RoutingConfig(use_kv_events=False), "--router-kv-events"),
        (("--router-conditional-disagg-config={}",), "kv", RoutingConfig(), "requires --router-conditional-disagg"),
        (("--router-prefill-policy=default",), "random", RoutingConfig(), "--router-prefill-policy"),
        (("--router-decode-policy=odd",), "kv", RoutingConfig(), "--router-decode-policy odd"),
    ],
)
def test_conflicting_disaggregation_flags_are_refused(
    argv: tuple[str, ...], mode: str, config: RoutingConfig, expected_message: str
) -> None:
    with pytest.raises(ConfigError, match=expected_message):
        check_disaggregation(options(*argv), mode, config, None)


def test_compatible_disaggregation_flags_are_accepted() -> None:
    given = options("--router-conditional-disagg", '--router-conditional-disagg-config={"policy":"prefill_load"}')
    check_disaggregation(given, "kv", RoutingConfig(queue_threshold=2.0), None)
    rule = given.conditional(2.0)
    assert rule is not None
    assert (rule.policy, rule.prefill_busy_threshold) == ("prefill_load", 2.0)
    assert options().conditional(None) is None
