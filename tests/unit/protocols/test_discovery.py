"""Discovery records: upstream's JSON, and addresses read strictly."""

import msgspec
import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.discovery import (
    EndpointId,
    EventChannel,
    EventScope,
    EventSource,
    EventTransport,
    Instance,
    TransportAddress,
    ZmqConfig,
    record_key,
)

# As a released 1.6.1 worker wrote it.
THEIR_INSTANCE = (
    b'{"type":"Endpoint","component":"back_end","endpoint":"generate","namespace":"ns-a",'
    b'"instance_id":11369931390465548912,"transport":{"tcp":"127.0.0.1:41915/9dca1c5bf1432270/ns-a/back_end/generate"},'
    b'"device_type":"cuda","request_plane_codec":"msgpack"}'
)
THEIR_CHANNEL = (
    b'{"type":"EventChannel","scope":{"kind":"endpoint","endpoint":{"namespace":"dynamo","component":"backend",'
    b'"name":"generate"}},"topic":"kv-events","instance_id":7162463481746681,'
    b'"transport":{"kind":"Zmq","config":{"endpoint":"tcp://127.0.0.1:42111"}}}'
)

THEIR_SOURCE = (
    b'{"type":"EventSource","scope":{"kind":"endpoint","endpoint":{"namespace":"dynamo","component":"backend",'
    b'"name":"generate"}},"topic":"kv-events","publisher_id":4511743610425335,"metadata":{"kv_state_endpoint":'
    b'{"namespace":"dynamo","component":"backend","name":"generate"},"worker":{"worker_id":15733141617680442055,'
    b'"dp_rank":0},"publisher_id":4511743610425335,"recovery_target":{"component":"backend",'
    b'"endpoint":"worker_kv_query_source_1007682b378ff7","namespace":"dynamo","instance_id":15733141617680442055,'
    b'"transport":{"tcp":"127.0.0.1:46849/da5758f18ac1e2c7/dynamo/backend/worker_kv_query_source_1007682b378ff7"},'
    b'"device_type":"cuda","request_plane_codec":"msgpack"}}}'
)


@pytest.mark.parametrize("text", ["ns.comp.ep", "dyn://ns.comp.ep"])
def test_endpoint_id_is_parsed_from_both_spellings(text: str) -> None:
    endpoint = EndpointId.parse(text)
    assert endpoint == EndpointId("ns", "comp", "ep")
    assert (endpoint.path, str(endpoint)) == ("ns/comp/ep", "ns.comp.ep")


@pytest.mark.parametrize("text", ["", "a", "a.b", "a.b.c.d", "a..c", "dyn://", "a b.c.d"])
def test_malformed_endpoint_id_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"expected namespace\.component\.endpoint"):
        EndpointId.parse(text)


@pytest.mark.parametrize(
    ("text", "path", "handler_path"),
    [
        ("examples/pipeline.back.gen", "examples/pipeline/back/gen", "examples%2Fpipeline/back/gen"),
        ("a/.c.d", "a//c/d", "a%2F/c/d"),
        ("ns.c/x.e%2F", "ns/c/x/e%2F", "ns/c%2Fx/e%252F"),
    ],
)
def test_slashes_in_names_are_escaped_in_handler_paths_only(text: str, path: str, handler_path: str) -> None:
    endpoint = EndpointId.parse(text)
    assert (endpoint.path, endpoint.handler_path) == (path, handler_path)
    assert EndpointId.of_handler_path(handler_path) == endpoint


def test_instance_record_equals_that_of_upstream() -> None:
    instance = msgspec.json.decode(THEIR_INSTANCE, type=Instance)
    assert instance.transport.tcp == "127.0.0.1:41915/9dca1c5bf1432270/ns-a/back_end/generate"
    assert instance.response_frames == 0
    assert instance.key == "ns-a/back_end/generate/9dca1c5bf1432270"
    assert msgspec.json.encode(instance) == THEIR_INSTANCE


def test_instance_record_has_response_frames_as_its_only_additional_key() -> None:
    ours = msgspec.structs.replace(msgspec.json.decode(THEIR_INSTANCE, type=Instance), response_frames=1)
    assert msgspec.json.encode(ours) == THEIR_INSTANCE[:-1] + b',"response_frames":1}'


def test_record_with_unknown_keys_is_decoded() -> None:
    later = THEIR_INSTANCE[:-1] + b',"later":{"x":1}}'
    assert msgspec.json.decode(later, type=Instance) == msgspec.json.decode(THEIR_INSTANCE, type=Instance)
    old = b'{"type":"Endpoint","component":"c","endpoint":"e","namespace":"n","instance_id":1,"transport":{"nats_tcp":"s"}}'
    instance = msgspec.json.decode(old, type=Instance)
    assert (instance.transport, instance.request_plane_codec) == (TransportAddress(nats_tcp="s"), None)


def test_event_channel_record_equals_that_of_upstream() -> None:
    channel = EventChannel(
        EventScope("endpoint", EndpointId("dynamo", "backend", "generate")),
        "kv-events",
        7162463481746681,
        EventTransport(ZmqConfig("tcp://127.0.0.1:42111")),
    )
    assert msgspec.json.encode(channel) == THEIR_CHANNEL
    assert msgspec.json.decode(THEIR_CHANNEL, type=EventChannel) == channel
    assert channel.key == "namespace/dynamo/component/backend/endpoint/generate/topic/kv-events/197238fb8bd4f9"


def test_event_source_record_equals_that_of_upstream() -> None:
    source = msgspec.json.decode(THEIR_SOURCE, type=EventSource)
    assert msgspec.json.encode(source) == THEIR_SOURCE
    assert source.key == "namespace/dynamo/component/backend/endpoint/generate/topic/kv-events/1007682b378ff7"
    assert source.metadata.recovery_target.endpoint_id.name == "worker_kv_query_source_1007682b378ff7"


def test_instance_reference_in_other_records_has_no_type() -> None:
    instance = msgspec.structs.replace(msgspec.json.decode(THEIR_INSTANCE, type=Instance), response_frames=1)
    assert msgspec.json.encode(instance.callee()) == THEIR_INSTANCE.replace(b'"type":"Endpoint",', b"")


def test_record_key_ends_with_the_hexadecimal_instance_id() -> None:
    assert record_key(EndpointId("n", "c", "e"), 255) == "n/c/e/ff"
