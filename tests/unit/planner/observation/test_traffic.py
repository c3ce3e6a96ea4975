"""Traffic window: increases over frontends that restart, appear, vanish and fail."""

import pytest

from dynamo.planner.observation.exposition import samples_of
from dynamo.planner.observation.traffic import NAMES, Samples, TrafficWindow

A, B = "http://a/metrics", "http://b/metrics"


def reading(requests: float, isl: float = 0.0, *, uptime_s: float = 1e6, model: str = "m") -> Samples:
    """Return the samples of a frontend after that many requests of 10 prompt and 5 output tokens, plus `isl` tokens."""
    frontend = "dynamo_frontend_"
    lines = [
        f'{frontend}requests_started_total{{model="{model}"}} {requests}',
        f'{frontend}input_sequence_tokens_sum{{model="{model}"}} {10 * requests + isl}',
        f'{frontend}input_sequence_tokens_count{{model="{model}"}} {requests}',
        f'{frontend}output_sequence_tokens_sum{{model="{model}"}} {5 * requests}',
        f'{frontend}output_sequence_tokens_count{{model="{model}"}} {requests}',
        f'{frontend}time_to_first_token_seconds_sum{{model="{model}"}} {0.2 * requests}',
        f'{frontend}time_to_first_token_seconds_count{{model="{model}"}} {requests}',
        f"dynamo_component_uptime_seconds {uptime_s}",
    ]
    return samples_of("\n".join(lines), NAMES)


def requests_of(window: TrafficWindow, now_s: float, interval_s: float = 10.0) -> float | None:
    traffic = window.close(now_s, interval_s).traffic
    return None if traffic is None else traffic.num_req


def test_traffic_is_the_increase_since_the_window_began_over_all_frontends() -> None:
    window = TrafficWindow(0.0)
    window.read(A, reading(100), 0.0)
    window.read(B, reading(1000), 0.0)
    window.read(A, reading(120), 5.0)
    window.read(A, reading(130), 10.0)
    window.read(B, reading(1010), 10.0)
    found = window.close(10.0, 10.0)
    assert found.traffic is not None
    assert (found.traffic.num_req, found.traffic.isl, found.traffic.osl) == (40.0, 10.0, 5.0)
    assert found.ttft_ms == pytest.approx(200.0)
    assert (found.itl_ms, found.traffic.kv_hit_rate) == (None, None)


def test_unknown_is_never_zero() -> None:
    window = TrafficWindow(0.0)
    assert window.close(10.0, 10.0).unknown == "no frontend registers its metrics"
    window.read(A, reading(5), 10.0)
    window.fail(B)
    assert window.close(20.0, 10.0).unknown == f"metrics of {B} could not be read"


def test_idle_frontend_has_zero_requests() -> None:
    window = TrafficWindow(0.0)
    window.read(A, reading(5), 0.0)
    window.read(A, reading(5), 10.0)
    found = window.close(10.0, 10.0).traffic
    assert found is not None
    assert (found.num_req, found.isl) == (0.0, 0.0)


def test_requests_of_a_missed_window_are_scaled_to_the_interval() -> None:
    window = TrafficWindow(0.0)
    window.read(A, reading(0), 0.0)
    window.fail(A)
    assert requests_of(window, 10.0) is None
    window.read(A, reading(40), 20.0)
    assert requests_of(window, 20.0) == 20.0


def test_counter_that_decreases_was_reset() -> None:
    window = TrafficWindow(0.0)
    window.read(A, reading(100), 0.0)
    window.read(A, reading(7, uptime_s=3), 10.0)
    assert requests_of(window, 10.0) == 7.0


def test_frontend_that_vanishes_keeps_its_share_of_the_window() -> None:
    window = TrafficWindow(0.0)
    window.read(A, reading(100), 0.0)
    window.read(B, reading(0), 0.0)
    window.read(A, reading(130), 5.0)
    window.retain([B])
    window.read(B, reading(2), 10.0)
    assert requests_of(window, 10.0) == 32.0
    window.read(B, reading(3), 20.0)
    assert requests_of(window, 20.0) == 1.0


def test_new_frontend_counts_whole_only_if_it_started_in_the_window() -> None:
    window = TrafficWindow(100.0)
    window.read(A, reading(50, uptime_s=5), 110.0)
    window.read(B, reading(9000, uptime_s=500), 110.0)
    assert requests_of(window, 110.0) == 50.0


def test_failed_frontend_that_is_gone_no_longer_blocks_the_window() -> None:
    window = TrafficWindow(0.0)
    window.read(A, reading(0), 0.0)
    window.fail(B)
    window.retain([A])
    window.read(A, reading(4), 10.0)
    assert requests_of(window, 10.0) == 4.0


def test_only_the_planned_model_is_counted() -> None:
    window = TrafficWindow(0.0, "M")
    window.read(A, {**reading(0), **reading(0, model="other")}, 0.0)
    window.read(A, {**reading(3), **reading(90, model="other")}, 10.0)
    assert requests_of(window, 10.0) == 3.0


def test_lengths_are_unknown_while_no_request_has_ended() -> None:
    window = TrafficWindow(0.0)
    started = 'dynamo_frontend_requests_started_total{model="m"} '
    window.read(A, samples_of(started + "1", NAMES), 0.0)
    window.read(A, samples_of(started + "3", NAMES), 10.0)
    assert "no request ended" in window.close(10.0, 10.0).unknown
