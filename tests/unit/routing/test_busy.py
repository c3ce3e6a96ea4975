"""Overloaded workers, and the threshold of each."""

import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.load import KvMetrics
from dynamo.routing.busy import BusyWorkers, Capacity, Thresholds

CAPACITY = Capacity(kv_blocks=100, batched_tokens=1000)


def load(worker: int = 1, blocks: int | None = 0, tokens: int | None = 0, rank: int = 0) -> KvMetrics:
    return KvMetrics(
        worker_id=worker, dp_rank=rank, active_decode_blocks=blocks, active_prefill_tokens=tokens, kv_used_blocks=0
    )


@pytest.mark.parametrize(
    ("thresholds", "calm", "busy", "knob"),
    [
        (Thresholds(active_decode_blocks_threshold=0.5), load(blocks=50), load(blocks=51), "--active-decode-blocks-threshold"),
        (Thresholds(active_decode_blocks_threshold=0), load(blocks=0), load(blocks=1), "--active-decode-blocks-threshold"),
        (Thresholds(active_prefill_tokens_threshold=9), load(tokens=9), load(tokens=10), "--active-prefill-tokens-threshold"),
        (
            Thresholds(active_prefill_tokens_threshold_frac=1.5),
            load(tokens=1500),
            load(tokens=1501),
            "--active-prefill-tokens-threshold-frac",
        ),
    ],
)  # fmt: skip
def test_busy_threshold_has_an_exact_border_and_reports_its_name(
    thresholds: Thresholds, calm: KvMetrics, busy: KvMetrics, knob: str
) -> None:
    workers = BusyWorkers(thresholds, CAPACITY)
    workers.apply(calm)
    assert workers.why(1) is None
    workers.apply(busy)
    assert workers.why(1) == knob


def test_busy_detection_is_off_without_thresholds() -> None:
    workers = BusyWorkers(Thresholds(), CAPACITY)
    workers.apply(load(blocks=100, tokens=10**6))
    assert workers.busy([1]) == frozenset()
    assert not workers.thresholds.is_set


def test_busy_detection_treats_unknown_load_as_not_busy() -> None:
    thresholds = Thresholds(active_decode_blocks_threshold=0, active_prefill_tokens_threshold_frac=0)
    workers = BusyWorkers(thresholds, Capacity(None, None))
    assert workers.why(7) is None
    workers.apply(load(blocks=5, tokens=5))
    assert workers.why(1) is None
    workers.capacity = CAPACITY
    workers.apply(load(blocks=None, tokens=None))
    assert workers.why(1) is None


def test_busy_detection_counts_requests_sent_before_the_worker_reports_them() -> None:
    workers = BusyWorkers(Thresholds(active_prefill_tokens_threshold=9), CAPACITY)
    workers.apply(load(tokens=0))
    workers.book({(1, 0): (10, 0, 1), (2, 0): (0, 5, 1)})
    assert workers.busy([1, 2]) == {1}
    workers.book({})
    assert workers.busy([1, 2]) == frozenset()


def test_busy_worker_has_only_busy_ranks() -> None:
    workers = BusyWorkers(Thresholds(active_prefill_tokens_threshold=0), CAPACITY)
    workers.apply(load(tokens=1, rank=0))
    workers.apply(load(tokens=0, rank=1))
    assert workers.why(1) is None
    workers.apply(load(tokens=1, rank=1))
    assert workers.busy([1, 2]) == {1}


def test_busy_detection_removes_a_departed_worker() -> None:
    workers = BusyWorkers(Thresholds(active_prefill_tokens_threshold=0), CAPACITY)
    workers.apply(load(worker=1, tokens=1))
    workers.apply(load(worker=2, tokens=1))
    workers.keep([2])
    assert workers.busy([1, 2]) == {2}


@pytest.mark.parametrize(
    "bad",
    [
        Thresholds(active_decode_blocks_threshold=1.1),
        Thresholds(active_decode_blocks_threshold=-0.1),
        Thresholds(active_prefill_tokens_threshold=-1),
        Thresholds(active_prefill_tokens_threshold_frac=-1.0),
    ],
)
def test_busy_threshold_error_names_a_value_out_of_range(bad: Thresholds) -> None:
    with pytest.raises(InvalidArgument, match="active_"):
        bad.check()


def test_busy_threshold_sees_the_prompts_in_the_routers_queue() -> None:
    workers = BusyWorkers(Thresholds(active_prefill_tokens_threshold=100), CAPACITY)
    loads = {(1, 0): (80.0, 0.0, 1), (2, 0): (10.0, 0.0, 1)}
    workers.book(loads, queued_tokens=60)
    assert workers.busy([1, 2]) == {1}
    workers.book(loads, queued_tokens=200)
    assert workers.busy([1, 2]) == {1, 2}
