"""Recent requests: bounded, with failures and slow requests kept longer, and the last error of each worker."""

from dynamo.serving.recent_requests import (
    RECENT_MAX,
    SLOWEST_AGE_S,
    SLOWEST_MAX,
    WORKERS_MAX,
    RecentRequests,
)
from dynamo.serving.request_facts import Move, RequestFacts


def request(name: str, wait_s: float = 0.1, at: float = 1000.0, **changes: object) -> RequestFacts:
    values: dict[str, object] = {
        "request_id": name, "model": "m", "endpoint": "chat_completions", "request_type": "stream", "started_s": 1.0,
        "first_s": 1.0 + wait_s, "ended_s": 2.0 + wait_s, "ended_at": at,
    }  # fmt: skip
    return RequestFacts(**(values | changes))  # type: ignore[arg-type]


def ids(recent: RecentRequests) -> list[str]:
    return [one.request_id for one in recent.all()]


def test_recent_requests_are_newest_first_and_bounded() -> None:
    recent = RecentRequests()
    for number in range(RECENT_MAX + SLOWEST_MAX + 50):
        recent.ended(request(str(number), wait_s=1.0 - number * 1e-5))
    found = ids(recent)
    assert found[0] == str(RECENT_MAX + SLOWEST_MAX + 49)
    assert len(found) == len(set(found)) == RECENT_MAX + SLOWEST_MAX


def test_recent_requests_keep_failures_and_slow_requests_longer() -> None:
    recent = RecentRequests()
    recent.ended(request("slow", wait_s=30.0))
    recent.ended(request("failed", error_type="internal", first_s=0.0))
    for number in range(RECENT_MAX + SLOWEST_MAX):
        recent.ended(request(str(number)))
    assert {"slow", "failed"} <= set(ids(recent))


def test_recent_requests_evict_old_slow_requests() -> None:
    recent = RecentRequests()
    for number in range(SLOWEST_MAX):
        recent.ended(request(f"old-{number}", wait_s=30.0))
    for number in range(RECENT_MAX + SLOWEST_MAX):
        recent.ended(request(f"new-{number}", wait_s=31.0, at=1000.0 + SLOWEST_AGE_S + 1))
    assert not any(name.startswith("old") for name in ids(recent))


def test_slowness_includes_output_beyond_the_usual_pace_of_the_model() -> None:
    recent = RecentRequests()
    for number in range(20):
        recent.ended(request(str(number), output_tokens=11, last_s=1.1 + 0.1))
    stalled, long = request("stalled", output_tokens=11, last_s=4.1), request("long", output_tokens=301, last_s=4.1)
    other = request("other", model="slower model", output_tokens=11, last_s=4.1)
    for one in (stalled, long, other):
        recent.ended(one)
    assert stalled.slow_s > 2.9
    assert (
        long.slow_s < 0.2 and other.slow_s < 0.2
    )  # A long output at the usual pace, and the usual pace of another model.


def test_recent_requests_keep_the_last_error_of_each_worker() -> None:
    recent = RecentRequests()
    recent.ended(request("a", at=5.0, moves=(Move(1.5, 7, "connection lost", 3), Move(1.6, None, "no worker", 3))))
    recent.ended(request("b", at=6.0, workers=(8,), error_type="internal", error="engine failed"))
    recent.ended(request("c", at=7.0, workers=(9,), error_type="validation", error="not the worker's fault"))
    found = {worker: (one.at, one.message) for worker, one in recent.worker_errors.items()}
    assert found == {7: (5.0, "connection lost"), 8: (6.0, "engine failed")}


def test_errors_of_workers_are_bounded() -> None:
    recent = RecentRequests()
    for worker in range(WORKERS_MAX + 10):
        recent.ended(request("a", workers=(worker,), error_type="internal", error="x" * 5000))
    assert len(recent.worker_errors) == WORKERS_MAX
    assert len(recent.worker_errors[WORKERS_MAX].message) == 500


def test_refused_request_is_recorded_without_a_model() -> None:
    recent = RecentRequests()
    recent.refused("chat_completions", "not_found", "Model not found", 1.0)
    (found,) = recent.all()
    assert (found.model, found.error_type, found.error) == ("", "not_found", "Model not found")
