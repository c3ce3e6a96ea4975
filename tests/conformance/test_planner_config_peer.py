"""Planner settings compared with the released planner's: the same values are accepted, with the same result."""

import random
from typing import Any

import pytest
from tests.conformance.planner_cases import released

from dynamo.core.errors import ConfigError
from dynamo.planner.config.planner_config import parse

pytestmark = pytest.mark.conformance

PLUGIN = {"plugin_id": "a", "plugin_type": "propose", "priority": 1, "endpoint": "grpc://h:1"}
VALUES: dict[str, list[Any]] = {
    "environment": ["kubernetes", "virtual", "global-planner", "Kubernetes", 1],
    "global_planner_namespace": ["gp", "", None, 1],
    "backend": ["vllm", "sglang", "trtllm", "mocker", "VLLM", None],
    "mode": ["disagg", "prefill", "decode", "agg", "both"],
    "optimization_target": ["throughput", "latency", "load", "sla", "cost"],
    "pre_deployment_sweeping_mode": ["none", "rapid", "thorough", None, "x"],
    "enable_throughput_scaling": [True, False, "yes", 2],
    "enable_load_scaling": [True, False, "on", "nope"],
    "throughput_adjustment_interval": [60, 180, "30", 2.5],
    "throughput_adjustment_interval_seconds": [60, 7, "30"],
    "load_adjustment_interval": [5, 7, 180, 200, 0, "x"],
    "max_throughput_scaling_replicas": [1, 0, "3"],
    "max_gpu_budget": [8, -1, "5", 5.0, 5.5, True, None, " 5 ", "5.0"],
    "min_gpu_budget": [0, 10, -1, [1]],
    "min_endpoint": [0, 1, -1, "2"],
    "prefill_min_endpoint": [None, 1, 0, 3],
    "decode_min_endpoint": [None, 2, 0],
    "control_api_port": [0, 9086, 65535, 65536, -1],
    "prefill_engine_num_gpu": [None, 0, 4, "x"],
    "decode_engine_num_gpu": [None, 2, 1.5],
    "ttft": [0, -5, 200, "300", "abc", True],
    "ttft_ms": [100.5, 0],
    "itl": [0, -1, 20, None],
    "load_predictor": ["constant", "arima", "prophet", "kalman", "lstm"],
    "load_predictor_log1p": [True, 0, "maybe"],
    "prophet_window_size": [0, 10, "10"],
    "kalman_q_level": [1, "0.5", "x"],
    "kalman_min_points": [-3, 5, 2.5],
    "throughput_metrics_source": ["frontend", "router", "worker"],
    "model_name": [None, "m", 3],
    "max_num_fpm_samples": [0, 32],
    "fpm_sample_bucket_size": [16, 15, 1, 0, 64],
    "load_scaling_down_sensitivity": [0, 100, 101, -1],
    "load_min_observations": [-1, 5],
    "prefill_scale_up_queue_tokens": [None, 10, 0, -1],
    "prefill_scale_down_queue_tokens": [None, 10, 3, -1],
    "decode_scale_up_kv_rate": [None, 50, 101, 0.5],
    "decode_scale_down_kv_rate": [None, 20, 60, -0.1],
    "speculative_nextn": [0, 3, -1],
    "advisory": [True, "T", "off", 1.0, "", 2],
    "enable_power_awareness": [True, False],
    "total_gpu_power_limit": [None, 0, 1000, "900"],
    "report_interval_hours": [None, 0, -1, 12, "6", "nan", "inf"],
    "report_write_gzip_log": [True, "x"],
    "live_dashboard_port": [0, 8080],
    "metric_pulling_prometheus_request_timeout_seconds": [0, 1.5],
    "metric_pulling_prometheus_extra_query_params": [None, {"a": "b"}, {"a": 1}],
    "metric_reporting_prometheus_port": [0, 9090, "x"],
    "aic_perf_model": [None],
    "unknown_field": [1],
    "scheduling": [
        {},
        None,
        {"scale_interval_seconds": 1},
        {"scale_interval_seconds": 2.5},
        {"scale_interval_seconds": 7},
        {"scale_interval_seconds": 0},
        {"tick_max_duration_seconds": 0},
        {"unknown": 1},
        {"gateway": {"enabled": "yes"}},
        {"gateway": {"listen": 1}},
        {"external_plugins": [PLUGIN]},
        {"external_plugins": [{**PLUGIN, "hold_policy": "HOLD_LAST"}]},
        {"external_plugins": [{**PLUGIN, "hold_policy": "accept_when_idle"}]},
        {"external_plugins": [{**PLUGIN, "hold_policy": 7}]},
        {"external_plugins": [{**PLUGIN, "plugin_type": "observe"}]},
        {"external_plugins": [{**PLUGIN, "plugin_id": ""}]},
        {"external_plugins": [{**PLUGIN, "execution_interval_seconds": -1}]},
        {"external_plugins": [{"plugin_id": "a"}]},
    ],
    "plugin_registration": [
        {},
        {"heartbeat_missed_threshold": 0},
        {"auth": {"trusted_sources": ["static_secret"], "static_secrets": {"s": "subject"}}},
        {"auth": {"trusted_sources": ["other"]}},
        {"transport": {"request_timeout_seconds": 0}},
        {"transport": {"max_message_size_bytes": "1024"}},
        {"admin": {"mode": "none"}},
        {
            "in_process_plugins": [
                {"module": "m", "class": "C", "plugin_id": "a", "plugin_type": "propose", "priority": 1}
            ]
        },
        {"in_process_plugins": [{"module": "m"}]},
    ],
}
NOT_COMPARED = {"scheduling", "plugin_registration"}
"""Their JSON forms contain secrets in the released planner, and not in ours."""
STRICTER = [{"throughput_adjustment_interval": 0}, {"throughput_adjustment_interval_seconds": -1}]
"""Accepted by the released planner, which then divides by the interval; refused here."""


def cases() -> list[dict[str, Any]]:
    """Return each value alone, and random combinations of a few."""
    rng = random.Random(14)
    alone = [{name: value} for name, values in VALUES.items() for value in values]
    mixed = []
    for _ in range(1800):
        names = rng.sample(sorted(set(VALUES) - {"aic_perf_model"}), rng.randint(2, 7))
        mixed.append({name: rng.choice(VALUES[name]) for name in names})
    return [*alone, *mixed]


def test_planner_config_accepts_the_values_that_the_released_planner_accepts() -> None:
    given = cases()
    assert len(given) >= 2000
    differences = []
    for raw, expected in zip(given, released("config", given), strict=True):
        try:
            config = parse(raw).as_json()
        except ConfigError as error:
            if "error" not in expected or "\n" in str(error):
                differences.append((raw, str(error)))
            continue
        if "error" in expected:
            differences.append((raw, expected["error"]))
            continue
        wrong = {
            name: (value, config[name])
            for name, value in expected["config"].items()
            if name not in NOT_COMPARED and config[name] != value
        }
        cadence = expected["config"]["scheduling"]["scale_interval_seconds"]
        if wrong or config["scheduling"]["scale_interval_seconds"] != cadence:
            differences.append((raw, wrong))
    assert not differences, f"{len(differences)}: {differences[:5]}"


def test_planner_config_errors_name_a_field_that_the_released_planner_names() -> None:
    given = [{name: value} for name, values in VALUES.items() for value in values]
    unnamed = []
    for raw, expected in zip(given, released("config", given), strict=True):
        fields = [field for field in expected.get("fields", ()) if field]
        if not fields:
            continue
        with pytest.raises(ConfigError) as refused:
            parse(raw)
        if not any(field.split(".")[-1] in str(refused.value) for field in fields):
            unnamed.append((fields, str(refused.value)))
    assert not unnamed, unnamed[:5]


@pytest.mark.parametrize("raw", STRICTER)
def test_planner_config_refuses_intervals_that_the_released_planner_cannot_use(raw: dict[str, Any]) -> None:
    assert "config" in released("config", [raw])[0]
    with pytest.raises(ConfigError, match="greater than 0"):
        parse(raw)
