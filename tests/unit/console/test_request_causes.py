"""Request causes: the part of a request that took the longest is named with its reason."""

import pytest

from dynamo.console.request_causes import Cause, FoundCause, cause_of, lost_spans
from dynamo.console.worker_paces import WorkerPaces
from dynamo.serving.request_facts import Move, RequestFacts


def facts(**changes: object) -> RequestFacts:
    """A request of 1.1 s whose parts are all short but for those that are changed."""
    values: dict[str, object] = {
        "request_id": "r", "model": "m", "endpoint": "e", "request_type": "stream", "started_s": 100.0, "prepared_s": 100.01,
        "route_s": (100.01, 100.02), "sent_s": 100.03, "first_s": 100.1, "last_s": 100.2, "ended_s": 100.21, "ended_at": 2000.0,
        "prompt_tokens": 640, "output_tokens": 11, "workers": (0xAB,),
    }  # fmt: skip
    return RequestFacts(**(values | changes))  # type: ignore[arg-type]


def later(seconds: float, **changes: object) -> RequestFacts:
    """A request whose times from the first token on are shifted."""
    return facts(first_s=100.1 + seconds, last_s=100.2 + seconds, ended_s=100.21 + seconds, **changes)


def cause(one: RequestFacts, *others: RequestFacts) -> FoundCause:
    return cause_of(one, one.ended_s, WorkerPaces(others))


QUEUED = {"route_s": (100.01, 105.0), "queue_s": 4.9, "sent_s": 105.01, "queue_depth": 3}
MOVE = Move(103.0, 0xEF, "connection lost", 4, 100.15, 104.0)


@pytest.mark.parametrize(
    ("one", "expected", "word"),
    [
        (later(5.0, **QUEUED), Cause.ROUTER_QUEUE, "no worker had capacity, with 3 other"),
        (later(5.0, route_s=(100.01, 105.0), sent_s=105.01), Cause.ROUTING, "the choice of a worker"),
        (later(5.0, sent_s=105.0), Cause.DISPATCH, "sending"),
        (later(5.0), Cause.PREFILL, "worker ab computed 640 of 640 tokens"),
        (later(5.0, tokens_ahead=5000.0), Cause.WORKER_QUEUE, "5,000 prompt tokens of earlier requests"),
        (later(5.0, tokens_ahead=100.0), Cause.PREFILL, "640"),
        (facts(last_s=110.0, ended_s=110.0), Cause.OUTPUT, "11 tokens at 990 ms each"),
        (facts(ended_s=110.0), Cause.RESPONSE, "completing"),
        (facts(prepared_s=109.0, route_s=(0.0, 0.0), sent_s=0.0, first_s=0.0, last_s=0.0, ended_s=109.0), Cause.PREPROCESS, "tokenizer"),
        (facts(moves=(MOVE,), last_s=105.0, ended_s=105.0), Cause.MIGRATION, "worker ef failed after 4 tokens (connection lost)"),
    ],
)  # fmt: skip
def test_cause_is_the_longest_part(one: RequestFacts, expected: Cause, word: str) -> None:
    found = cause(one)
    assert (found.cause, word in found.text) == (expected, True), found


def test_separate_prefill_has_a_queue_a_prompt_and_a_transfer() -> None:
    base = {"prefill_worker": 0xCD, "route_s": (0.0, 0.0)}
    queued = later(5.0, prefill_s=(100.01, 105.0), prefill_queue_s=4.8, sent_s=105.01, **base)
    computed = later(5.0, prefill_s=(100.01, 105.0), sent_s=105.01, **base)
    transferred = later(5.0, prefill_s=(100.01, 100.02), sent_s=100.03, **base)
    assert cause(queued).text.startswith("the queue of the prefill router")
    assert cause(computed).text.startswith("the prompt: worker cd computed")
    assert cause(transferred).cause is Cause.TRANSFER


def test_output_of_a_slow_worker_is_blamed_on_it_together_with_its_prompt() -> None:
    others = [facts(workers=(worker,)) for worker in (1, 2, 3, 4, 5)]
    slow = facts(first_s=102.0, last_s=112.0, ended_s=112.0)
    found = cause(slow, *others)
    assert found.cause is Cause.SLOW_WORKER
    assert found.text == "worker ab, which is slow: 1.0 s per output token, other workers 10 ms"
    assert found.seconds == pytest.approx(11.97)
    assert cause(slow).cause is Cause.OUTPUT  # Without other workers there is no comparison.


def test_prompt_of_a_slow_worker_is_blamed_on_it() -> None:
    others = [facts(workers=(worker,)) for worker in (1, 2, 3, 4, 5)]
    found = cause(later(9.0), *others)
    assert (found.cause, "per prompt token" in found.text) == (Cause.SLOW_WORKER, True)
    queued = cause(later(9.0, tokens_ahead=9000.0), *others)
    assert queued.cause is Cause.WORKER_QUEUE


def test_unusual_wait_behind_other_requests_is_a_queue_of_the_worker() -> None:
    usual = [facts() for _ in range(6)]
    found = cause(later(9.0, requests_ahead=8), *usual)
    assert (found.cause, found.text) == (
        Cause.WORKER_QUEUE,
        "the queue of worker ab: 8 earlier requests were in flight to it",
    )
    assert cause(later(9.0), *usual).cause is Cause.PREFILL


def test_time_lost_by_moves_is_counted_once() -> None:
    moves = (Move(103.0, 1, "x", 4, 101.0, 0.0), Move(105.0, 2, "y", 4, 101.0, 106.0))
    assert lost_spans(facts(moves=moves), 110.0) == [(101.0, 105.0), (105.0, 106.0)]
    found = cause(facts(moves=moves, last_s=110.0, ended_s=110.0))
    assert found.seconds == pytest.approx(5.0)
    assert "the first of 2 failures" in found.text


def test_failure_before_the_first_token_loses_the_time_since_it_was_sent() -> None:
    found = cause(later(5.0, moves=(Move(104.0, 1, "x", 0, 0.0, 105.1),)))
    assert (found.cause, "before the first token" in found.text) == (Cause.MIGRATION, True)
    assert found.seconds == pytest.approx(5.07)


def test_running_request_waits_in_the_queue_until_it_is_sent() -> None:
    waiting = facts(route_s=(0.0, 0.0), sent_s=0.0, first_s=0.0, last_s=0.0, ended_s=0.0, ended_at=0.0)
    assert cause_of(waiting, 107.0, WorkerPaces()).cause is Cause.ROUTER_QUEUE
