"""Discovery records: the instances, event channels and event sources that processes register."""

import re

import msgspec

from dynamo.core.errors import InvalidArgument

INSTANCES = "v1/instances"
MODEL_CARDS = "v1/mdc"
EVENT_CHANNELS = "v1/event_channels"
EVENT_SOURCES = "v1/event_sources"
METRICS_SOURCES = "v1/metrics_sources"
"""Addresses of metrics; released processes neither write nor read them."""

PLANNER_COMPONENT, PLANNER_STATUS_ENDPOINT = "Planner", "status"
"""A planner serves its state and last decisions at the endpoint `<namespace>.Planner.status`."""

RESPONSE_FRAMES = 2
"""Version of the batched response frames: version 1 carries responses, version 2 adds heartbeats at any time.

A released peer ignores the key that advertises it.
"""

_NAME = re.compile(r"[^\s.]+")


class EndpointId(msgspec.Struct, frozen=True):
    """The name of an endpoint: `namespace.component.endpoint`."""

    namespace: str
    component: str
    name: str

    @classmethod
    def parse(cls, text: str) -> "EndpointId":
        """Parse `ns.comp.ep` or `dyn://ns.comp.ep`. Raise `InvalidArgument` for any other text."""
        parts = text.removeprefix("dyn://").split(".")
        if len(parts) != 3 or not all(_NAME.fullmatch(part) for part in parts):
            raise InvalidArgument(f"endpoint {text!r}: expected namespace.component.endpoint")
        return cls(*parts)

    @property
    def path(self) -> str:
        """`ns/comp/ep`, the prefix of keys."""
        return f"{self.namespace}/{self.component}/{self.name}"

    @property
    def handler_path(self) -> str:
        """`ns/comp/ep` of handler paths, in which a name's own `/` and `%` are escaped."""
        return "/".join(
            name.replace("%", "%25").replace("/", "%2F") for name in (self.namespace, self.component, self.name)
        )

    @classmethod
    def of_handler_path(cls, path: str) -> "EndpointId":
        """Return the endpoint of a handler path. Raise `ValueError` for a path that does not have three parts."""
        namespace, component, name = (part.replace("%2F", "/").replace("%25", "%") for part in path.split("/"))
        return cls(namespace, component, name)

    def __str__(self) -> str:
        return f"{self.namespace}.{self.component}.{self.name}"


def record_key(endpoint: EndpointId, instance_id: int) -> str:
    """Return the key of an instance in `v1/instances` and of its card in `v1/mdc`."""
    return f"{endpoint.path}/{instance_id:x}"


class TransportAddress(msgspec.Struct, frozen=True, omit_defaults=True):
    """The address of an instance; exactly one field is set. `tcp` is `host:port/<instance hex>/<ns>/<comp>/<ep>`."""

    tcp: str | None = None
    nats_tcp: str | None = None

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return "tcp" if self.tcp is not None else "nats_tcp"

    @property
    def address(self) -> str:
        """The value of the field that is set."""
        return self.tcp or self.nats_tcp or ""


class InstanceAddress(msgspec.Struct, frozen=True, omit_defaults=True):
    """One instance of an endpoint, as embedded in other records."""

    component: str
    endpoint: str
    namespace: str
    instance_id: int
    transport: TransportAddress
    device_type: str | None = None
    request_plane_codec: str | None = None
    """Codec of the requests that the worker accepts: `msgpack` or `json`; a record without it means json."""
    response_frames: int = 0
    """Version of the batched response frames that the instance supports; 0 is upstream's framing only."""

    @property
    def endpoint_id(self) -> EndpointId:
        return EndpointId(self.namespace, self.component, self.endpoint)

    @property
    def key(self) -> str:
        return record_key(self.endpoint_id, self.instance_id)

    def __str__(self) -> str:
        return f"{self.endpoint_id.path}/{self.instance_id}"


class Instance(InstanceAddress, frozen=True, omit_defaults=True, tag_field="type", tag="Endpoint"):
    """The discovery record of one instance of an endpoint."""

    def callee(self) -> InstanceAddress:
        """Return the form for other records, without the fields that upstream does not define."""
        return InstanceAddress(*msgspec.structs.astuple(msgspec.structs.replace(self, response_frames=0)))


class EventScope(msgspec.Struct, frozen=True):
    """The endpoint that the events of a channel concern."""

    kind: str
    endpoint: EndpointId


class ZmqConfig(msgspec.Struct, frozen=True):
    """The address to which a publisher's ZMQ socket is bound."""

    endpoint: str


class NatsConfig(msgspec.Struct, frozen=True):
    """The subject prefix of an endpoint; `.` and the topic follow."""

    subject_prefix: str


class EventTransport(msgspec.Struct, frozen=True, tag_field="kind", tag="Zmq"):
    """A channel over the publisher's ZMQ socket, to which subscribers connect."""

    config: ZmqConfig


class NatsEventTransport(msgspec.Struct, frozen=True, tag_field="kind", tag="Nats"):
    """A channel over a NATS subject that all publishers of its topic share."""

    config: NatsConfig


class EventChannel(msgspec.Struct, frozen=True, tag_field="type", tag="EventChannel"):
    """One publisher of one topic."""

    scope: EventScope
    topic: str
    instance_id: int
    """The id of the publisher, which differs from the worker's id."""
    transport: EventTransport | NatsEventTransport

    @property
    def key(self) -> str:
        return f"{topic_prefix(self.scope.endpoint, self.topic)}{self.instance_id:x}"


class WorkerRank(msgspec.Struct, frozen=True):
    """One data-parallel rank of a worker."""

    worker_id: int
    dp_rank: int


class EventSourceMetadata(msgspec.Struct, frozen=True):
    """The worker whose blocks a source reports, and the endpoint that returns lost events."""

    kv_state_endpoint: EndpointId
    """The endpoint that receives the requests which use these blocks."""
    worker: WorkerRank
    publisher_id: int
    recovery_target: InstanceAddress


class EventSource(msgspec.Struct, frozen=True, tag_field="type", tag="EventSource"):
    """A publisher of KV events that can be queried for its current blocks; routers subscribe only to these."""

    scope: EventScope
    topic: str
    publisher_id: int
    metadata: EventSourceMetadata

    @property
    def key(self) -> str:
        return f"{topic_prefix(self.scope.endpoint, self.topic)}{self.publisher_id:x}"


def topic_prefix(endpoint: EndpointId, topic: str) -> str:
    """Return the key prefix of all publishers of a topic."""
    return f"namespace/{endpoint.namespace}/component/{endpoint.component}/endpoint/{endpoint.name}/topic/{topic}/"


class MetricsAddress(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="MetricsAddress"):
    """The discovery record of a process whose metrics a planner scrapes; several processes of a frontend share a URL."""

    component: str
    """What the process is: `frontend`."""
    url: str
    """URL of the exposition, as other hosts reach it."""
    instance_id: int
    namespace: str = ""
    """Namespace that the process serves; empty: all."""

    @property
    def key(self) -> str:
        return f"{self.component}/{self.instance_id:x}"
