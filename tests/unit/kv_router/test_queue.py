"""Queued requests leave in the order of priority, and each class gets its share."""

import math
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.errors import ConfigError, RouterQueueLimitExceeded
from dynamo.kv_router.queue import PolicyClass, QueuedRequest, WaitingQueue


def waiting(
    name: str, tokens: int = 10, *, at: float = 0, cached: int = 0, jump: float = 0, strict: int = 0
) -> QueuedRequest[str]:
    return QueuedRequest(
        item=name, prompt_tokens=tokens, cached_tokens=cached, arrived_s=at, priority_jump=jump, strict_priority=strict
    )


def drain(queue: WaitingQueue[str]) -> str:
    found = ""
    while (one := queue.pop(lambda policy, head: True)) is not None:
        found += one.item
    return found


def test_queue_is_first_come_first_served_within_a_priority() -> None:
    queue: WaitingQueue[str] = WaitingQueue()
    for one in (waiting("a", at=1), waiting("b", at=2, jump=5), waiting("c", at=3), waiting("d", at=9, strict=1)):
        queue.push("default", one)
    assert drain(queue) == "dbac"


def test_queue_serves_the_newest_request_first_with_lcfs() -> None:
    queue: WaitingQueue[str] = WaitingQueue([PolicyClass(queue_policy="lcfs")])
    for one in (waiting("a", at=1, jump=5), waiting("b", at=2), waiting("c", at=3), waiting("d", at=0, strict=1)):
        queue.push("default", one)
    assert drain(queue) == "dacb"


def test_queue_serves_the_shortest_weighted_work_first() -> None:
    queue: WaitingQueue[str] = WaitingQueue([PolicyClass(queue_policy="wspt")])
    for one in (waiting("a", 100), waiting("b", 100, cached=95), waiting("c", 50), waiting("d", 100, jump=9)):
        queue.push("default", one)
    assert drain(queue) == "bdca"


def test_queue_deadline_policy_prevents_starvation_of_long_prompts() -> None:
    queue: WaitingQueue[str] = WaitingQueue([PolicyClass(queue_policy="deadline")])
    for name, at, prefill_s in (("L", 0, 2.0), ("s", 1, 0.1), ("a", 19, 0.05), ("b", 21, 0.05), ("c", 25, 0.0)):
        queue.push("default", msgspec.structs.replace(waiting(name, at=at), prefill_s=prefill_s))
    assert drain(queue) == "saLbc"  # `L` is due after 20 s.


def test_queue_shares_classes_by_quantum() -> None:
    queue: WaitingQueue[str] = WaitingQueue(
        [PolicyClass(name="big", quantum=300), PolicyClass(name="small", quantum=100)]
    )
    for number in range(80):
        queue.push("big", waiting("B", 100, at=number))
        queue.push("small", waiting("s", 100, at=number))
    first = Counter(drain(queue)[:80])
    assert first == {"B": 60, "s": 20}


def test_queue_gives_no_credit_to_a_blocked_class() -> None:
    queue: WaitingQueue[str] = WaitingQueue([PolicyClass(name="a", quantum=10), PolicyClass(name="b", quantum=10)])
    for _ in range(3):
        queue.push("a", waiting("a", 10))
        queue.push("b", waiting("b", 10))
    assert [queue.pop(lambda policy, head: policy.name == "b").item for _ in range(2)] == ["b", "b"]  # type: ignore[union-attr]
    assert queue.pop(lambda policy, head: False) is None
    assert sorted(drain(queue)) == ["a", "a", "a", "b"]


def test_queue_refuses_a_full_class_and_names_its_limit() -> None:
    queue: WaitingQueue[str] = WaitingQueue([PolicyClass(request_queue_limit_per_worker=1)])
    queue.push("default", waiting("a"), workers=2)
    queue.push("default", waiting("b"), workers=2)
    with pytest.raises(RouterQueueLimitExceeded, match="request_queue_limit_per_worker 1 x 2 workers"):
        queue.push("default", waiting("c"), workers=2)
    by_tokens: WaitingQueue[str] = WaitingQueue([PolicyClass(raw_isl_token_queue_limit_per_worker=15)])
    by_tokens.push("default", waiting("a", 10))
    with pytest.raises(RouterQueueLimitExceeded, match="raw_isl"):
        by_tokens.push("default", waiting("b", 10))
    small: WaitingQueue[str] = WaitingQueue(requests_max=1)
    small.push("default", waiting("a"))
    with pytest.raises(RouterQueueLimitExceeded, match="1 requests"):
        small.push("default", waiting("b"))


def test_queue_removes_a_cancelled_request() -> None:
    queue: WaitingQueue[str] = WaitingQueue([PolicyClass(raw_isl_token_queue_limit_per_worker=20)])
    for name in "ab":
        queue.push("default", waiting(name, 10))
    assert queue.remove(lambda name: name == "a") == ["a"]
    queue.push("default", waiting("c", 10))
    assert (len(queue), drain(queue)) == (2, "bc")


def test_queue_rank_is_busy_by_tokens_or_by_batch_fraction() -> None:
    assert PolicyClass().limit(100) == math.inf
    assert PolicyClass(prefill_busy_threshold=10).limit(None) == 10
    assert PolicyClass(prefill_busy_threshold_frac=0.5).limit(100) == 50
    assert PolicyClass(prefill_busy_threshold_frac=0).limit(None) == math.inf
    assert PolicyClass(prefill_busy_threshold=10, prefill_busy_threshold_frac=0.5).limit(100) == 10
    with pytest.raises(ConfigError, match="quantum: must be at least 1, not 0"):
        PolicyClass(quantum=0).check()


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(1, 500)), max_size=60),
    st.tuples(st.integers(1, 300), st.integers(1, 300), st.integers(1, 300)),
)
def test_queue_serves_every_request_exactly_once(pushed: list[tuple[str, int]], quanta: tuple[int, int, int]) -> None:
    classes = [PolicyClass(name=name, quantum=quantum) for name, quantum in zip("abc", quanta, strict=True)]
    queue: WaitingQueue[str] = WaitingQueue(classes)
    for number, (name, tokens) in enumerate(pushed):
        queue.push(name, waiting(name, tokens, at=number))
    assert Counter(drain(queue)) == Counter(name for name, _ in pushed)
    assert len(queue) == 0
