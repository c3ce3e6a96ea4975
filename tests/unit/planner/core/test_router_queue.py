"""Router queue: its share of each rank."""

from hypothesis import given
from hypothesis import strategies as st

from dynamo.planner.core.router_queue import EMPTY, QueuedPrompts, with_queue
from dynamo.protocols.load import FORWARD_PASS_VERSION, ForwardPassMetrics, QueuedRequests, ScheduledRequests


def passed(worker_id: str, queued: QueuedRequests) -> ForwardPassMetrics:
    return ForwardPassMetrics(FORWARD_PASS_VERSION, worker_id, 0, 1, 0.01, ScheduledRequests(), queued)


@given(st.integers(1, 9), st.integers(0, 50), st.integers(1, 10_000))
def test_shares_add_up_to_the_queue_and_differ_by_one(ranks: int, requests: int, tokens: int) -> None:
    passes = {(f"{rank}", 0): passed(f"{rank}", QueuedRequests(1, 100, num_decode_requests=2)) for rank in range(ranks)}
    found = [one.queued_requests for one in with_queue(passes, QueuedPrompts(requests, tokens)).values()]
    assert sum(one.num_prefill_requests - 1 for one in found) == requests
    assert sum(one.sum_prefill_tokens - 100 for one in found) == tokens
    assert max(one.sum_prefill_tokens for one in found) - min(one.sum_prefill_tokens for one in found) <= 1
    assert {one.num_decode_requests for one in found} == {2}


def test_empty_queue_changes_nothing_and_a_queue_without_ranks_is_left_out() -> None:
    passes = {("1", 0): passed("1", QueuedRequests())}
    assert with_queue(passes, EMPTY) == passes
    assert with_queue({}, QueuedPrompts(1, 1)) == {}
