"""The KV router avoids failed workers while another one is available."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.errors import Overloaded
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.load import KvMetrics
from dynamo.protocols.model_card import ModelDeploymentCard, ModelRecord, RuntimeConfig
from dynamo.routing.busy import Thresholds
from dynamo.serving import served_model
from dynamo.serving.served_model import LOADS_MAX, ServedModel, load, workers_to_avoid

WORKERS = st.frozensets(st.integers(0, 5))


@given(WORKERS, WORKERS, WORKERS)
def test_worker_that_failed_the_request_is_always_avoided(
    workers: frozenset[int], exclude: frozenset[int], unsound: frozenset[int]
) -> None:
    assert workers_to_avoid(workers, exclude, unsound) >= exclude


@given(WORKERS, WORKERS, WORKERS)
def test_some_worker_remains_unless_all_failed_the_request(
    workers: frozenset[int], exclude: frozenset[int], unsound: frozenset[int]
) -> None:
    left = workers - workers_to_avoid(workers, exclude, unsound)
    assert left == (workers - exclude - unsound or workers - exclude)


def test_unsound_worker_is_chosen_if_the_others_failed_the_request_and_one_has_departed() -> None:
    failed_and_left, failed, unsound = 1, 2, 3
    assert workers_to_avoid([failed, unsound], frozenset({failed_and_left, failed}), frozenset({failed, unsound})) == {
        failed_and_left,
        failed,
    }


def served(worker: int, thresholds: Thresholds, **runtime: Any) -> ServedModel:
    client = SimpleNamespace(instance_ids=lambda: [worker], on_change=lambda _: None)
    made = ServedModel(EndpointId("n", "c", "generate"), client, None)  # type: ignore[arg-type]
    made.busy.thresholds = thresholds
    card = ModelDeploymentCard(display_name="m", slug="m", runtime_config=RuntimeConfig(**runtime))
    made.records["key"] = (
        ModelRecord(namespace="n", component="c", endpoint="generate", instance_id=worker, card_json=card),
        "sum",
    )
    return made


def test_requests_are_refused_while_every_prefill_worker_is_busy() -> None:
    decode = served(1, Thresholds())
    limits = Thresholds(active_prefill_tokens_threshold=10, active_decode_blocks_threshold=0.0).of_prefill()
    decode.prefill_sets = [served(2, limits), served(3, limits)]
    decode._card = decode.records["key"][0].card_json
    decode.prefill_sets[0].busy.apply(KvMetrics(2, 0, 5, 11, None))
    decode.admit()
    decode.prefill_sets[1].busy.apply(KvMetrics(3, 0, 5, 10, None))
    decode.admit()
    decode.prefill_sets[1].busy.apply(KvMetrics(3, 0, 5, 11, None))
    with pytest.raises(Overloaded, match="every prefill worker of model `m` is over --active-prefill-tokens-threshold"):
        decode.admit()


def test_ranks_of_a_worker_rotate() -> None:
    one, several = served(1, Thresholds()), served(2, Thresholds(), data_parallel_size=2, data_parallel_start_rank=4)
    assert (one.next_rank(1), several.next_rank(9)) == (None, None)
    assert {several.next_rank(2) for _ in range(2)} == {4, 5}


async def test_thread_that_reads_the_files_of_a_model_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def read(*_: object) -> SimpleNamespace:
        threads.append(threading.current_thread())
        return SimpleNamespace()

    monkeypatch.setattr(served_model, "load", read)
    made = served(1, Thresholds())
    await made.follow()
    (thread,) = threads
    assert thread is not threading.current_thread()
    thread.join(10.0)  # A thread of the loop's pool would not end.
    assert not thread.is_alive()


def test_few_models_are_read_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, may_end = threading.Semaphore(0), threading.Event()
    count, lock, peak = 0, threading.Lock(), 0

    def read(*_: object) -> None:
        nonlocal count, peak
        with lock:
            count += 1
            peak = max(peak, count)
        reading.release()
        may_end.wait(10.0)
        with lock:
            count -= 1

    monkeypatch.setattr(served_model, "_load", read)
    threads = [threading.Thread(target=load, args=(None, None, ())) for _ in range(LOADS_MAX * 3)]
    for thread in threads:
        thread.start()
    for _ in range(LOADS_MAX):
        assert reading.acquire(timeout=10.0)
    assert not reading.acquire(timeout=0.01)
    may_end.set()
    for thread in threads:
        thread.join(10.0)
    assert (peak, count) == (LOADS_MAX, 0)
