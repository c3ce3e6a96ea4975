"""KvRouterOptions: what the flags make of the router."""

import pytest

from dynamo.routing.options import KvRouterOptions, router_config


@pytest.mark.parametrize(
    ("given", "threshold", "order"),
    [
        ({}, None, "fcfs"),
        ({"queue_threshold": 2.0}, 2.0, "fcfs"),
        ({"queue_threshold": 2.0, "queue_policy": "wspt"}, 2.0, "wspt"),
        ({"router_policy": "balanced"}, 1.0, "wspt"),
        ({"router_policy": "balanced", "queue_threshold": 2.0}, 2.0, "wspt"),
        ({"router_policy": "balanced", "queue_policy": "fcfs"}, 1.0, "fcfs"),
    ],
)
def test_balanced_lets_requests_wait_in_the_router_unless_it_is_said_otherwise(
    given: dict[str, object], threshold: float | None, order: str
) -> None:
    config = router_config(KvRouterOptions(**given), 16)  # type: ignore[arg-type]
    assert (config.queue_threshold, config.queue_policy) == (threshold, order)
