"""The churn benchmark leaves no state, and detects leaked state."""

from benchmarks.router_churn import Churn


def test_router_state_is_empty_after_all_workers_and_requests_are_removed() -> None:
    churn = Churn()
    churn.lap(1200)
    assert not any(churn.left().values())
    assert churn.requests == 1200


def test_remaining_router_state_is_reported() -> None:
    churn = Churn()
    churn._join()
    churn._request()
    left = churn.left()
    assert (left["workers"], left["requests"]) == (1, 1)
    assert left["blocks"] > 0
