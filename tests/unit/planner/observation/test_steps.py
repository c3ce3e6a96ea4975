"""Freshness of forward passes: ranks that send nothing, and unknown versions."""

from typing import Any, cast

from dynamo.planner.observation.steps import STALE_S, StepFreshness, StepSubscriber
from dynamo.protocols.load import FORWARD_PASS_VERSION, ForwardPassMetrics, QueuedRequests, ScheduledRequests
from dynamo.protocols.planner import RankKey


def step(counter: int, version: int = FORWARD_PASS_VERSION) -> dict[RankKey, ForwardPassMetrics]:
    return {("1", 0): ForwardPassMetrics(version, "1", 0, counter, 0.1, ScheduledRequests(), QueuedRequests())}


def test_rank_whose_counter_does_not_change_becomes_stale() -> None:
    freshness = StepFreshness()
    assert freshness.fresh(step(1), 0.0)
    assert freshness.fresh(step(1), STALE_S)
    assert not freshness.fresh(step(1), STALE_S + 1)
    assert freshness.fresh(step(2), STALE_S + 2)


def test_restarted_counter_is_fresh() -> None:
    freshness = StepFreshness()
    freshness.fresh(step(100), 0.0)
    assert freshness.fresh(step(1), STALE_S + 1)


def test_reappearing_rank_is_counted_from_its_start() -> None:
    freshness = StepFreshness()
    freshness.fresh(step(1), 0.0)
    freshness.fresh({}, 1.0)
    assert freshness.fresh(step(1), STALE_S + 1)


def test_steps_of_an_unknown_version_are_skipped() -> None:
    assert not StepFreshness().fresh(step(1, FORWARD_PASS_VERSION + 1), 0.0)


def subscriber(*steps: ForwardPassMetrics) -> StepSubscriber:
    made = StepSubscriber(cast(Any, None))
    for one in steps:
        made._observe((one.worker_id, one.dp_rank), one)
    return made


def measured(counter: int, tokens: int) -> ForwardPassMetrics:
    scheduled = ScheduledRequests(num_prefill_requests=1 if tokens else 0, sum_prefill_tokens=tokens)
    return ForwardPassMetrics(FORWARD_PASS_VERSION, "1", 0, counter, 0.1, scheduled, QueuedRequests())


async def test_last_step_with_prompts_is_returned_once() -> None:
    found = subscriber(measured(1, 100), measured(2, 200), measured(3, 0))
    assert [one.counter_id for one in found.take_prompts().values()] == [2]
    assert found.take_prompts() == {}
