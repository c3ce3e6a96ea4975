"""A router that counts seconds learns them from the steps that workers publish."""

import pytest

from dynamo.core.codec import msgpack_encode
from dynamo.kv_events.forward_pass import FORWARD_PASS_TOPIC
from dynamo.kv_events.forward_pass_listener import PaceListener
from dynamo.kv_router.balanced import Pace
from dynamo.kv_router.prefill_model import PrefillModel
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.load import ForwardPassMetrics, QueuedRequests, ScheduledRequests
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.memory import MemoryBus, MemoryEventPlane
from dynamo.runtime.request_plane.memory import MemoryHub, MemoryPlane

ENDPOINT = EndpointId.parse("dynamo.backend.generate")


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
