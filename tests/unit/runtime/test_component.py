"""Names: the older API yields the same endpoint."""

from typing import Any

import pytest
from tests.settle import turns

from dynamo.core.codec import msgpack_decode
from dynamo.core.errors import InvalidArgument
from dynamo.llm import WorkerType
from dynamo.runtime.component import ACTIVE_SEQUENCES_TOPIC
from dynamo.runtime.context import Context
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.base import Event
from dynamo.runtime.event_plane.memory import MemoryBus, MemoryEventPlane

TIMEOUT_S = 5.0


async def test_first_token_marks_the_prefill_of_a_request_as_completed() -> None:
    plane = MemoryEventPlane(MemoryBus())
    runtime = DistributedRuntime(None, MemoryDiscovery(MemoryStore()), "mem", event_plane=lambda _: plane)
    endpoint: Any = runtime.endpoint("ns.backend.generate")
    subscriber = await plane.subscriber(endpoint.id, ACTIVE_SEQUENCES_TOPIC)
    assert await endpoint.first_token_source(WorkerType.Prefill) is None
    source = await endpoint.first_token_source(WorkerType.Decode)
    context = Context("r1")
    source.bind(context, 2)
    context.notify_first_token()
    context.notify_first_token()
    event = await anext(aiter(subscriber))
    assert isinstance(event, Event)
    worker = endpoint.connection_id()
    assert msgpack_decode(event.payload) == {
        "events": [
            {
                "request_id": "r1",
                "worker": {"worker_id": worker, "dp_rank": 2},
                "data": "MarkPrefillCompleted",
                "router_id": worker,
                "lora_name": None,
            }
        ]
    }
    await runtime.shutdown()


async def test_namespace_and_component_path_returns_the_same_endpoint_as_its_address() -> None:
    runtime = DistributedRuntime(None, "mem", "mem", event_plane="mem")
    component = runtime.namespace("ns").component("comp")
    await component.create_service()
    assert component.endpoint("ep").id == runtime.endpoint("dyn://ns.comp.ep").id
    assert (str(runtime.namespace("ns")), str(component)) == ("ns", "ns.comp")
    await runtime.shutdown()


@pytest.mark.parametrize("name", ["", "a.b"])
async def test_namespace_component_and_endpoint_names_refuse_a_separator(name: str) -> None:
    runtime = DistributedRuntime(None, "mem", "mem", event_plane="mem")
    with pytest.raises(InvalidArgument):
        runtime.namespace(name)
    with pytest.raises(InvalidArgument):
        runtime.namespace("ns").component(name)
    with pytest.raises(InvalidArgument):
        runtime.namespace("ns").component("comp").endpoint(name)
    await runtime.shutdown()


async def test_endpoint_instance_is_visible_without_being_served() -> None:
    runtime = DistributedRuntime(None, "mem", "mem", event_plane="mem")
    endpoint = runtime.endpoint("ns.comp.ep")
    client = await endpoint.client()
    await endpoint.register_endpoint_instance()
    assert await client.wait_for_instances(TIMEOUT_S) == [endpoint.connection_id()]
    await endpoint.unregister_endpoint_instance()
    await turns()
    assert client.instance_ids() == []
    await runtime.shutdown()


async def test_wait_for_instances_raises_a_timeout_error() -> None:
    runtime = DistributedRuntime(None, "mem", "mem", event_plane="mem")
    client = await runtime.endpoint("ns.comp.ep").client()
    with pytest.raises(TimeoutError, match=r"ns\.comp\.ep"):
        await client.wait_for_instances(0.01)
    with pytest.raises(TimeoutError, match="last_match_count=0"):
        await client.wait_for_instance_by_runtime_data("k", "v", 0.01)
    await runtime.shutdown()


async def test_typed_metrics_are_accepted() -> None:
    runtime = DistributedRuntime(None, MemoryDiscovery(MemoryStore()), "mem", event_plane="mem")
    metrics = runtime.endpoint("ns.c.e").metrics
    metrics.register_prometheus_typed_callback(list)
    with pytest.raises(TypeError, match="callable"):
        metrics.register_prometheus_typed_callback(None)  # type: ignore[arg-type]
    await runtime.shutdown()
