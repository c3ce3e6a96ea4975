"""Every step is told once, numbered by its rank; a rank that rests says so every second."""

import asyncio

import pytest

from dynamo.core.codec import msgpack_decode
from dynamo.kv_events.forward_pass import ForwardPassPublisher
from dynamo.protocols.load import ForwardPass, QueuedRequests, ScheduledRequests

STEP = ForwardPass(0.02, ScheduledRequests(1, 100, 0.0, 28, 2, 301, 0.25), QueuedRequests(3, 900, 2.5, 1, 50, 0.0))


async def test_forward_pass_event_equals_that_of_released_dynamo() -> None:
    sent: list[bytes] = []
    publisher = ForwardPassPublisher(sent.append, "5319637113295001620")
    publisher.put(STEP)
    publisher.close()
    assert msgpack_decode(sent[0]) == {
        "version": 1,
        "worker_id": "5319637113295001620",
        "dp_rank": 0,
        "counter_id": 1,
        "wall_time": 0.02,
        "scheduled_requests": {
            "num_prefill_requests": 1,
            "sum_prefill_tokens": 100,
            "var_prefill_length": 0.0,
            "sum_prefill_kv_tokens": 28,
            "num_decode_requests": 2,
            "sum_decode_kv_tokens": 301,
            "var_decode_kv_tokens": 0.25,
        },
        "queued_requests": {
            "num_prefill_requests": 3,
            "sum_prefill_tokens": 900,
            "var_prefill_length": 2.5,
            "num_decode_requests": 1,
            "sum_decode_kv_tokens": 50,
            "var_decode_kv_tokens": 0.0,
        },
    }


async def test_forward_pass_counts_steps_per_rank() -> None:
    sent: list[bytes] = []
    publisher = ForwardPassPublisher(sent.append, "1", ranks=2)
    for rank in (0, 1, 1):
        publisher.put(STEP, rank)
    publisher.close()
    told = [msgpack_decode(one) for one in sent]
    assert [(one["dp_rank"], one["counter_id"]) for one in told] == [(0, 1), (1, 1), (1, 2)]
    with pytest.raises(IndexError):
        publisher.put(STEP, 2)


async def test_forward_pass_sends_heartbeats_for_idle_ranks_only() -> None:
    loop = asyncio.get_running_loop()
    beats: asyncio.Queue[dict[str, object]] = asyncio.Queue()
    publisher = ForwardPassPublisher(lambda data: beats.put_nowait(msgpack_decode(data)), "1", 1, heartbeat_s=0.02)
    began = loop.time()
    first, second = await beats.get(), await beats.get()
    publisher.close()
    assert loop.time() - began >= 0.03
    assert (first["counter_id"], second["counter_id"]) == (1, 2)
    assert first["wall_time"] == 0.0
    assert first["scheduled_requests"] == dict.fromkeys(first["scheduled_requests"], 0)  # type: ignore[call-overload]


async def test_forward_pass_heartbeat_is_due_a_second_after_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    sent: list[bytes] = []
    publisher = ForwardPassPublisher(sent.append, "1")
    publisher.close()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now + 0.9)
    publisher.put(STEP)
    monkeypatch.setattr(loop, "time", lambda: now + 1.0)
    publisher._beat(0)
    assert len(sent) == 1
    monkeypatch.setattr(loop, "time", lambda: now + 1.9)
    publisher._beat(0)
    publisher.close()
    assert len(sent) == 2
