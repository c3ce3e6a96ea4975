"""Traffic window: requests and averages of an interval, and when they are unknown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.planner.core.router_queue import QueuedPrompts
from dynamo.planner.observation.exposition import SeriesKey
from dynamo.planner.observation.traffic import (
    ISL,
    OSL,
    QUEUED_CACHED,
    QUEUED_ISL,
    QUEUED_REQUESTS,
    STARTED,
    TTFT,
    UPTIME,
    RouterQueues,
    TrafficWindow,
)


def reading(requests: float, uptime_s: float | None = None, model: str = "m") -> dict[SeriesKey, float]:
    """Counters of a frontend whose requests all have 10 input tokens, 5 output tokens and 0.2 s to the first one."""
    labels = (("model", model),)
    found = {SeriesKey(STARTED, labels): requests}
    for name, mean in ((ISL, 10.0), (OSL, 5.0), (TTFT, 0.2)):
        found[SeriesKey(f"{name}_sum", labels)] = requests * mean
        found[SeriesKey(f"{name}_count", labels)] = requests
    return found if uptime_s is None else {**found, SeriesKey(UPTIME, ()): uptime_s}


def test_window_contains_the_increase_between_two_readings() -> None:
    window = TrafficWindow(0.0)
    window.read("a", reading(100), 0.0)
    window.read("a", reading(130), 10.0)
    found = window.close(10.0, 5.0)
    assert found.traffic is not None
    assert [found.traffic.num_req, found.traffic.isl, found.traffic.osl] == pytest.approx([15.0, 10.0, 5.0])
    assert found.ttft_ms == pytest.approx(200)
    assert found.itl_ms is None


def test_next_window_begins_at_the_end_of_a_known_one() -> None:
    window = TrafficWindow(0.0)
    window.read("a", reading(0), 0.0)
    window.read("a", reading(10), 5.0)
    window.close(5.0, 5.0)
    window.read("a", reading(12), 10.0)
    assert (found := window.close(10.0, 5.0).traffic) is not None and found.num_req == 2


def test_unread_frontend_makes_the_window_unknown_and_longer() -> None:
    window = TrafficWindow(0.0)
    window.read("a", reading(0), 0.0)
    window.fail("a")
    missing = window.close(5.0, 5.0)
    assert missing.traffic is None and missing.unknown == "metrics of a could not be read"
    window.read("a", reading(20), 10.0)
    assert (found := window.close(10.0, 5.0).traffic) is not None and found.num_req == 10


def test_traffic_window_without_frontends_or_duration_is_unknown() -> None:
    window = TrafficWindow(1.0)
    assert window.close(1.0, 5.0).unknown == "the window is empty"
    assert window.close(2.0, 5.0).unknown == "no frontend registers its metrics"


def test_frontend_that_started_within_the_window_counts_from_zero() -> None:
    window = TrafficWindow(0.0)
    window.read("a", reading(10, uptime_s=3.0), 5.0)
    assert (found := window.close(5.0, 5.0).traffic) is not None and found.num_req == 10


def test_counter_that_decreased_counts_from_its_reset() -> None:
    window = TrafficWindow(0.0)
    window.read("a", reading(100), 0.0)
    window.read("a", reading(4), 5.0)
    assert (found := window.close(5.0, 5.0).traffic) is not None and found.num_req == 4


def test_requests_of_a_frontend_that_ended_remain_in_the_window() -> None:
    window = TrafficWindow(0.0)
    window.read("a", reading(0), 0.0)
    window.read("a", reading(6), 2.0)
    window.retain([])
    assert (found := window.close(5.0, 5.0).traffic) is not None and found.num_req == 6


def test_requests_without_lengths_are_unknown_traffic() -> None:
    window = TrafficWindow(0.0)
    window.read("a", {SeriesKey(STARTED, ()): 0.0}, 0.0)
    window.read("a", {SeriesKey(STARTED, ()): 3.0}, 5.0)
    assert window.close(5.0, 5.0).unknown == "no request ended in the window: lengths are unknown"


def test_idle_window_has_zero_requests() -> None:
    window = TrafficWindow(0.0)
    window.read("a", reading(7), 0.0)
    window.read("a", reading(7), 5.0)
    assert (found := window.close(5.0, 5.0).traffic) is not None and (found.num_req, found.isl) == (0, 0)


def test_requests_of_other_models_are_not_counted() -> None:
    window = TrafficWindow(0.0, "M")
    for requests, now_s in ((0, 0.0), (8, 5.0)):
        window.read("a", {**reading(requests, model="m"), **reading(requests * 2, model="x")}, now_s)
    assert (found := window.close(5.0, 5.0).traffic) is not None and found.num_req == 8


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1000)), min_size=1, max_size=20))
def test_sum_of_all_windows_is_the_number_of_requests(events: list[tuple[int, int]]) -> None:
    window, counted, seen = TrafficWindow(0.0), [0, 0, 0], 0.0
    for source in range(3):
        window.read(str(source), reading(0), 0.0)
    for now_s, (source, added) in enumerate(events, 1):
        counted[source] += added
        window.read(str(source), reading(counted[source]), float(now_s))
        found = window.close(float(now_s), 1.0).traffic
        assert found is not None
        seen += found.num_req
    assert seen == pytest.approx(sum(counted))


def queue_reading(worker_type: str, requests: float, tokens: float, cached: float) -> dict[SeriesKey, float]:
    labels = (("model", "m"), ("policy_class", "default"), ("worker_type", worker_type))
    values = {QUEUED_REQUESTS: requests, QUEUED_ISL: tokens, QUEUED_CACHED: cached}
    return {SeriesKey(name, labels): value for name, value in values.items()}


def test_queues_are_the_sums_of_the_last_readings_of_all_frontends() -> None:
    window = TrafficWindow(0.0, "m")
    window.read("a", queue_reading("decode", 9, 9000, 0), 0.0)
    window.read("a", queue_reading("decode", 2, 3000, 1000), 5.0)
    window.read("b", queue_reading("decode", 1, 500, 0) | queue_reading("prefill", 4, 4000, 3000), 5.0)
    assert window.queues() == RouterQueues(QueuedPrompts(4, 1000), QueuedPrompts(3, 2500))
    window.fail("a")
    window.retain({"a", "b"})
    assert window.queues().decode == QueuedPrompts(1, 500), "a queue that cannot be read is unknown"
    window.retain(set())
    assert window.queues() == RouterQueues()


def test_queues_of_other_models_are_left_out() -> None:
    window = TrafficWindow(0.0, "other")
    window.read("a", queue_reading("decode", 9, 9000, 0), 0.0)
    assert window.queues() == RouterQueues()
