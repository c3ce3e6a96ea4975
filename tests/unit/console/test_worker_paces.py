"""Worker speeds: comparison of a request with those of other workers, only with enough samples of both."""

import pytest

from dynamo.console.worker_paces import DECODE, PREFILL, WorkerPaces, prompt_pace_s
from dynamo.serving.request_facts import Move, RequestFacts


def facts(worker: int, itl_s: float = 0.01, first_s: float = 0.5, **changes: object) -> RequestFacts:
    values: dict[str, object] = {
        "request_id": "r", "model": "m", "endpoint": "e", "request_type": "stream", "started_s": 1.0, "sent_s": 1.0,
        "first_s": 1.0 + first_s, "last_s": 1.0 + first_s + 10 * itl_s, "ended_s": 9.0, "ended_at": 50.0,
        "prompt_tokens": 100, "output_tokens": 11, "workers": (worker,),
    }  # fmt: skip
    return RequestFacts(**(values | changes))  # type: ignore[arg-type]


def test_a_worker_is_slow_if_its_tokens_take_three_times_those_of_others() -> None:
    paces = WorkerPaces([*(facts(1) for _ in range(5)), facts(2, itl_s=0.2)])
    found = paces.compared(DECODE, "m", 2, 0.2)
    assert found is not None and found.is_slow
    assert found.others_s == pytest.approx(0.01)
    similar = paces.compared(DECODE, "m", 2, 0.02)
    assert similar is not None and not similar.is_slow


def test_few_requests_of_other_workers_or_models_are_not_compared() -> None:
    paces = WorkerPaces([*(facts(1) for _ in range(4)), *(facts(3, model="other") for _ in range(9))])
    assert paces.compared(DECODE, "m", 2, 0.2) is None
    assert paces.compared(DECODE, "m", None, 0.2) is None


def test_one_slow_request_of_a_usual_worker_is_not_blamed_on_it() -> None:
    paces = WorkerPaces([*(facts(1) for _ in range(9)), *(facts(2) for _ in range(3)), facts(2, itl_s=0.2)])
    assert paces.compared(DECODE, "m", 2, 0.2) is None
    assert paces.is_unusual(PREFILL, "m", 1, 0.005) is False
    assert paces.is_unusual(PREFILL, "m", 1, 0.05) is True


def test_running_and_moved_requests_have_no_pace() -> None:
    moved = facts(1, moves=(Move(1.2, 5, "lost", 3),))
    paces = WorkerPaces([*(facts(1, ended_at=0.0) for _ in range(9)), *(moved for _ in range(9))])
    assert paces.compared(DECODE, "m", 2, 0.2) is None


def test_pace_of_a_prompt_is_that_of_the_worker_that_computed_it() -> None:
    assert prompt_pace_s(facts(1)) == pytest.approx(0.005)
    assert prompt_pace_s(facts(1, cached_tokens=90)) is None  # Ten tokens take as long as one.
    separate = facts(1, prefill_worker=7, prefill_s=(1.0, 3.0), prefill_queue_s=1.0)
    assert prompt_pace_s(separate) == pytest.approx(0.01)
    paces = WorkerPaces([separate] * 5)
    assert paces.compared(PREFILL, "m", 8, 1.0) is not None
    assert paces.compared(PREFILL, "m", 7, 1.0) is None
