"""Frontend metrics of a request."""

import threading

import pytest
from tests.settle import turns, until

from dynamo.core.errors import ConfigError
from dynamo.core.metrics import MetricsRegistry
from dynamo.protocols.engine import CompletionUsage
from dynamo.serving.metrics import FrontendMetrics, LoopDelay, read_buckets
from dynamo.serving.request_state import RequestState


def series(registry: MetricsRegistry) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in registry.render().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def record_of(registry: MetricsRegistry) -> RequestState:
    return RequestState(FrontendMetrics(registry), "completions", "m", stream=True, started_s=100.0, request_id="r")


def test_request_metrics_record_the_stages_of_a_complete_request() -> None:
    registry = MetricsRegistry()
    record = record_of(registry)
    record.prepared_s, record.sent_s = 100.25, 100.5
    record.tokens(1, 101.5)
    record.tokens(4, 102.0)
    record.close("", CompletionUsage(7, 5, 12), 103.0)
    record.close("internal", None, 104.0)
    found = series(registry)
    stages = {name: found[f'dynamo_frontend_stage_duration_seconds_sum{{stage="{name}"}}'] for name in STAGES}
    assert stages == {"preprocess": 0.25, "dispatch": 0.25, "transport_roundtrip": 1.0}
    assert found['dynamo_frontend_time_to_first_token_seconds_sum{model="m"}'] == 1.5
    assert found['dynamo_frontend_inter_token_latency_seconds_count{model="m"}'] == 4
    assert found['dynamo_frontend_output_tokens_total{model="m"}'] == 5
    labels = 'endpoint="completions",error_type="",model="m",request_type="stream",status="success"'
    assert found[f"dynamo_frontend_requests_total{{{labels}}}"] == 1
    assert found['dynamo_frontend_active_requests{model="m"}'] == 0


STAGES = ("preprocess", "dispatch", "transport_roundtrip")


@pytest.mark.parametrize(("prepared_s", "sent_s", "passed"), [(0.0, 0.0, 0), (100.5, 0.0, 1), (100.5, 101.0, 2)])
def test_request_metrics_omit_stages_that_were_not_reached(prepared_s: float, sent_s: float, passed: int) -> None:
    registry = MetricsRegistry()
    record = record_of(registry)
    record.prepared_s, record.sent_s = prepared_s, sent_s
    record.close("unavailable", None, 102.0)
    found = series(registry)
    counts = [found[f'dynamo_frontend_stage_duration_seconds_count{{stage="{name}"}}'] for name in STAGES]
    assert counts == [1] * passed + [0] * (3 - passed)
    assert found['dynamo_frontend_queued_requests{model="m"}'] == 0


def test_metric_buckets_equal_those_of_upstream() -> None:
    """Read off the released frontend."""
    assert read_buckets("REQUEST_DURATION") == (0, 2, 4, 8, 16, 32, 64, 130, 260, 510)
    assert read_buckets("OUTPUT_SEQUENCE") == (0, 100, 210, 430, 880, 1800, 3700, 7600, 16000, 32000)
    assert read_buckets("TTFT")[:4] == (0, 0.0022, 0.0047, 0.01)


def test_failure_metrics_have_a_class_and_a_reason() -> None:
    registry = MetricsRegistry()
    metrics = FrontendMetrics(registry)
    metrics.count_end("completions", "", "unary", "not_found")
    metrics.count_end("completions", "m", "unary", "something new")
    found = series(registry)
    assert found['dynamo_frontend_failures_total{class="NotFound",reason="request.not_found"}'] == 1
    assert found['dynamo_frontend_failures_total{class="Unknown",reason="runtime.unclassified"}'] == 1
    assert any('model="unknown_model"' in name for name in found)


def test_stage_gauge_counts_requests_by_current_stage() -> None:
    registry = MetricsRegistry()
    record = record_of(registry)
    record.route_through(None, record.frontend.phase("aggregated"))

    def counts() -> tuple[float, float]:
        found = series(registry)
        return (
            found['dynamo_frontend_stage_requests{phase="",stage="preprocess"}'],
            found['dynamo_frontend_stage_requests{phase="aggregated",stage="dispatch"}'],
        )

    assert counts() == (1, 0)
    record.prepared_s = 100.1
    assert counts() == (0, 1)
    record.sent_s = 100.2
    assert counts() == (0, 0)
    record.close("", None, 101.0)
    assert not record.frontend.open_requests


def test_last_request_metrics_of_a_removed_worker_are_deleted() -> None:
    registry = MetricsRegistry()
    record = record_of(registry)
    record.workers.append(7)
    record.tokens(1, 101.0)
    record.tokens(1, 101.5)
    record.close("", CompletionUsage(3, 2, 5), 102.0)
    labels = '{dp_rank="none",worker_id="7",worker_type="decode"}'
    found = series(registry)
    assert found[f"dynamo_frontend_worker_last_input_sequence_tokens{labels}"] == 3
    assert found[f"dynamo_frontend_worker_last_time_to_first_token_seconds{labels}"] == 1.0
    assert found[f"dynamo_frontend_worker_last_inter_token_latency_seconds{labels}"] == 0.5
    record.frontend.keep_workers({8})
    assert f"dynamo_frontend_worker_last_input_sequence_tokens{labels}" not in series(registry)


def test_non_text_content_parts_are_counted() -> None:
    registry = MetricsRegistry()
    record = record_of(registry)
    record.count_media({"image_url": [{}, {}], "audio_url": [{}]})
    record.close("", CompletionUsage(3, 2, 5), 102.0)
    found = series(registry)
    sums = [found[f'dynamo_frontend_{word}_per_request_sum{{model="m"}}'] for word in ("images", "videos", "audio")]
    assert sums == [2, 0, 1]


def test_metric_buckets_are_read_from_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_METRICS_TTFT_COUNT", "4")
    monkeypatch.setenv("DYN_METRICS_TTFT_MIN", "0.1")
    monkeypatch.setenv("DYN_METRICS_TTFT_MAX", "10")
    assert read_buckets("TTFT") == (0.0, 0.46, 2.2, 10.0)
    monkeypatch.setenv("DYN_METRICS_TTFT_MAX", "0.01")
    with pytest.raises(ConfigError, match="DYN_METRICS_TTFT"):
        read_buckets("TTFT")


def value(registry: MetricsRegistry, series: str) -> float:
    lines = dict(line.rsplit(" ", 1) for line in registry.render().splitlines() if not line.startswith("#"))
    return float(lines[series])


async def test_loop_delay_counts_delays_and_reports_long_ones_as_stalls() -> None:
    registry = MetricsRegistry()
    delay = LoopDelay(registry, "dynamo_frontend")
    for late_s in (-0.001, 0.0005, 0.04, 0.3):
        delay.observe(late_s)
    assert value(registry, "dynamo_frontend_event_loop_delay_seconds_count") == 4
    assert value(registry, 'dynamo_frontend_event_loop_delay_seconds_bucket{le="0.001"}') == 2
    assert value(registry, "dynamo_frontend_event_loop_stall_total") == 1


async def test_loop_delay_reports_a_blocking_callback_as_a_stall() -> None:
    registry = MetricsRegistry()
    delay = LoopDelay(registry, "p")
    delay.start()
    await turns()
    threading.Event().wait(0.16)  # The fault itself: it blocks the loop.
    await until(lambda: value(registry, "p_event_loop_delay_seconds_count"))
    delay.close()
    assert value(registry, "p_event_loop_stall_total") == 1
