"""Every step is published once, numbered per rank; an idle rank publishes every second."""

import asyncio

import pytest

from dynamo.core.codec import msgpack_decode, msgpack_encode
from dynamo.kv_events.forward_pass import FORWARD_PASS_TOPIC, ForwardPassPublisher, PaceListener
from dynamo.kv_router.balanced import Pace
from dynamo.kv_router.prefill_model import PrefillModel
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.load import ForwardPass, ForwardPassMetrics, QueuedRequests, ScheduledRequests
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.memory import MemoryBus, MemoryEventPlane
from dynamo.runtime.request_plane.memory import MemoryHub, MemoryPlane

STEP = ForwardPass(0.02, ScheduledRequests(1, 100, 0.0, 28, 2, 301, 0.25), QueuedRequests(3, 900, 2.5, 1, 50, 0.0))

ENDPOINT = EndpointId.parse("dynamo.backend.generate")


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
    worker_event = [msgpack_decode(one) for one in sent]
    assert [(one["dp_rank"], one["counter_id"]) for one in worker_event] == [(0, 1), (1, 1), (1, 2)]
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


def step(seconds: float, **done: int) -> bytes:
    return msgpack_encode(ForwardPassMetrics(1, "7", 0, 1, seconds, ScheduledRequests(**done), QueuedRequests()))


async def test_forward_pass_listener_receives_every_step_and_skips_malformed_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = MemoryBus()
    runtime = DistributedRuntime(
        None,
        MemoryDiscovery(MemoryStore()),
        lambda dispatcher, _: MemoryPlane(dispatcher, MemoryHub()),
        event_plane=lambda _: MemoryEventPlane(bus),
    )
    pace = Pace()
    listener = PaceListener(runtime, ENDPOINT, pace)
    await listener.start()
    publisher = await runtime.event_plane.publisher(ENDPOINT, FORWARD_PASS_TOPIC)
    publisher.publish(step(0.5, num_prefill_requests=1, sum_prefill_tokens=100))
    await listener.close()
    listener.process(b"\xc1")
    assert "malformed forward-pass metrics from dynamo.backend.generate" in caplog.text
    before = pace.prefill_token_s
    for _ in range(50):
        listener.process(step(1.0, num_prefill_requests=1, sum_prefill_tokens=100))
    assert abs(pace.prefill_token_s - 0.01) < abs(before - 0.01) or pace.prefill_token_s == pytest.approx(0.01)
    listener.process(step(0.0))
    await runtime.shutdown()


async def test_forward_pass_listener_learns_prefill_time_from_prefill_only_steps() -> None:
    runtime = DistributedRuntime(
        None, MemoryDiscovery(MemoryStore()), lambda dispatcher, _: MemoryPlane(dispatcher, MemoryHub())
    )
    prefill = PrefillModel()
    listener = PaceListener(runtime, ENDPOINT, Pace(), prefill)

    listener.process(step(1.0, num_prefill_requests=1, sum_prefill_tokens=100, num_decode_requests=3))
    listener.process(step(1.0, num_decode_requests=3))
    assert prefill.steps == 0

    for _ in range(64):
        listener.process(step(1.0, num_prefill_requests=1, sum_prefill_tokens=100, sum_prefill_kv_tokens=50))
    assert prefill.steps == 64
    assert prefill.seconds(100, 50) == pytest.approx(1.0, rel=0.05)
