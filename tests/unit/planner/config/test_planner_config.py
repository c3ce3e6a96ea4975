"""Planner settings: values, aliases, rules between fields, and errors in one line."""

from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.planner.config.planner_config import Mode, OptimizationTarget, is_multiple, parse, warnings

PLUGIN = {"plugin_id": "a", "plugin_type": "propose", "priority": 1, "endpoint": "grpc://h:1"}


def test_planner_config_defaults_scale_by_load_with_static_thresholds() -> None:
    config = parse({})
    assert (config.mode, config.optimization_target) == (Mode.DISAGG, OptimizationTarget.THROUGHPUT)
    assert (config.enable_load_scaling, config.enable_throughput_scaling) == (True, False)
    assert config.scheduling.scale_interval_seconds == 5.0


def test_planner_config_accepts_the_older_names_of_fields() -> None:
    config = parse({"ttft": 100, "itl": "10", "optimization_target": "sla", "throughput_adjustment_interval": 60})
    assert (config.ttft_ms, config.itl_ms, config.throughput_adjustment_interval_seconds) == (100.0, 10.0, 60)


def test_planner_config_prefers_the_field_name_to_its_alias() -> None:
    assert parse({"ttft": 1, "ttft_ms": 2}).ttft_ms == 2.0


def test_planner_config_ticks_at_the_common_divisor_of_both_intervals() -> None:
    raw = {"optimization_target": "sla", "enable_load_scaling": True, "load_adjustment_interval": 25}
    assert parse({**raw, "throughput_adjustment_interval": 60}).scheduling.scale_interval_seconds == 5.0


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"backend": "x"}, "backend: 'x': must be one of vllm, sglang, trtllm, mocker"),
        ({"max_gpu_budget": 5.5}, "max_gpu_budget: 5.5: must be an integer"),
        ({"min_endpoint": -1}, "min_endpoint: -1: must be an integer at least 0"),
        ({"advisory": "maybe"}, "advisory: 'maybe': must be true or false"),
        ({"ttft_ms": 0}, "ttft_ms: 0.0: must be greater than 0"),
        ({"ttft_ms": "nan"}, "ttft_ms: nan: must be greater than 0"),
        ({"fpm_sample_bucket_size": 15}, "fpm_sample_bucket_size: 15: must be a perfect square, such as 16"),
        ({"scheduling": {"x": 1}}, "scheduling.x: unknown field; must be one of "),
        ({"scheduling": {"scale_interval_seconds": 3}}, "scheduling.scale_interval_seconds: 3: must divide "),
        ({"aic_perf_model": {}}, "aic_perf_model: no longer supported; use ais_perf_model.roles"),
        ({"environment": "global-planner"}, "global_planner_namespace: missing"),
        ({"mode": "agg", "decode_min_endpoint": 1}, "decode_min_endpoint: 1: must be null with mode=agg"),
        ({"mode": "prefill", "decode_min_endpoint": 1}, "decode_min_endpoint: 1: must be null with mode=prefill"),
        ({"optimization_target": "load"}, "prefill_scale_up_queue_tokens: missing"),
        ({"optimization_target": "sla", "enable_throughput_scaling": False}, "enable_throughput_scaling: false"),
        ({"enable_power_awareness": True}, "total_gpu_power_limit: missing"),
        ({"report_interval_hours": "inf"}, "report_interval_hours: inf: must be a positive finite number"),
        ({"model_name": 3}, "model_name: 3: must be text, or null"),
        ([1], r"configuration: [1]: must be an object with named fields"),
        ({"scheduling": {"external_plugins": [{**PLUGIN, "hold_policy": 7}]}}, "external_plugins.0.hold_policy: 7"),
        (
            {"ais_perf_model": {"roles": {"prefill": {"worker_type": "decode"}}}},
            "worker_type: 'decode': must be prefill",
        ),
        ({"ais_perf_model": {"roles": {"prefill": {}}}}, "ais_perf_model.roles.decode: missing"),
    ],
)
def test_planner_config_errors_name_field_value_and_what_is_allowed(raw: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(raw)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_planner_config_requires_a_shorter_load_interval_than_throughput_interval() -> None:
    raw = {"optimization_target": "sla", "enable_load_scaling": True, "load_adjustment_interval": 180}
    with pytest.raises(ConfigError, match="must be less than throughput_adjustment_interval_seconds"):
        parse(raw)


def test_planner_config_accepts_the_name_and_the_number_of_a_hold_policy() -> None:
    for policy in ("accept_when_idle", 0):
        config = parse({"scheduling": {"external_plugins": [{**PLUGIN, "hold_policy": policy}]}})
        assert config.scheduling.external_plugins[0].hold_policy == 0


def test_planner_config_warns_about_objectives_that_are_not_used() -> None:
    assert "ttft_ms and itl_ms are ignored" in warnings(parse({"ttft": 100}))[0]
    assert not warnings(parse({"ttft": 100, "optimization_target": "sla"}))


def test_planner_config_json_form_is_read_back_without_a_difference() -> None:
    raw = {"mode": "agg", "ttft": 80, "scheduling": {"external_plugins": [PLUGIN], "scale_interval_seconds": 2.5}}
    config = parse(raw)
    assert parse(config.as_json()) == config


def test_planner_config_json_form_contains_no_secret() -> None:
    raw = {
        "metric_pulling_prometheus_token": "hidden",
        "plugin_registration": {"auth": {"static_secrets": {"hidden": "subject"}}},
        "scheduling": {"external_plugins": [{**PLUGIN, "auth_token": "hidden"}]},
    }
    assert "hidden" not in str(parse(raw).as_json())


@pytest.mark.parametrize(
    ("value", "base", "expected"),
    [(5, 2.5, True), (180, 0.1, True), (5, 3, False), (5, 10, False), (5, float("inf"), False)],
)
def test_is_multiple_tolerates_the_rounding_of_decimal_intervals(value: float, base: float, expected: bool) -> None:
    assert is_multiple(value, base) is expected
