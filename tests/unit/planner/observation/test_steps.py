"""Freshness of forward-pass metrics: a rank that stopped sending is not observed."""

from dynamo.planner.observation.steps import STALE_S, StepFreshness
from dynamo.protocols.load import ForwardPassMetrics, QueuedRequests, ScheduledRequests


def step(counter: int, version: int = 1) -> ForwardPassMetrics:
    return ForwardPassMetrics(version, "1", 0, counter, 0.0, ScheduledRequests(), QueuedRequests())


def test_rank_whose_counter_stands_still_becomes_stale_and_fresh_again() -> None:
    freshness, key = StepFreshness(), ("1", 0)
    assert key in freshness.fresh({key: step(1)}, 0.0)
    assert key in freshness.fresh({key: step(1)}, STALE_S)
    assert freshness.fresh({key: step(1)}, STALE_S + 0.1) == {}
    assert key in freshness.fresh({key: step(2)}, STALE_S + 0.2)


def test_rank_that_vanished_is_forgotten() -> None:
    freshness, key = StepFreshness(), ("1", 0)
    freshness.fresh({key: step(1)}, 0.0)
    freshness.fresh({}, 1.0)
    assert key in freshness.fresh({key: step(1)}, 100.0)


def test_unknown_version_is_not_used() -> None:
    assert StepFreshness().fresh({("1", 0): step(1, version=9)}, 0.0) == {}
