"""Records of KV state agents: hosts, attachment intents, sources and attachments (docs/kv-state-agent.md)."""

import re
from typing import Generic, TypeVar

import msgspec

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.discovery import EndpointId, InstanceAddress, WorkerRank
from dynamo.protocols.kv_events import KvSourceAnswer, KvSourceQuery, KvSourceTooNew, WorkerKvEvent

HOSTS_TOPIC = "kv-state-hosts-v2"
INTENTS_TOPIC = "kv-state-attachment-intents-v2"
SOURCES_TOPIC = "kv-state-sources-v2"
ATTACHMENTS_TOPIC = "kv-state-attachments-v2"
STATE_EVENTS_TOPIC = "kv-state-events-v2"
PROTOCOL_VERSION = "v2"
VLLM_RESIDENCY = "vllm_residency_v1"
"""The engine's events are vLLM's (`kv_events.relay`)."""

T = TypeVar("T")

_DIGEST = r"[0-9a-f]{32}"
_DOMAIN = re.compile(f"({_DIGEST}):({_DIGEST})")
_OWNER = re.compile(f"({_DIGEST}:{_DIGEST})/([0-9a-f]{{16}})/({_DIGEST})")


class StateDigest(msgspec.Struct, frozen=True):
    """An identifier of 16 bytes."""

    digest: tuple[int, ...]
    source: str = "explicit"

    @classmethod
    def parse(cls, text: str) -> "StateDigest":
        return cls(tuple(bytes.fromhex(text)))


class IndexerDomainId(msgspec.Struct, frozen=True):
    """Kind of the cached blocks, and the requests that may use them."""

    cache_semantics: StateDigest
    routing_scope: StateDigest

    @classmethod
    def parse(cls, text: str) -> "IndexerDomainId":
        """Parse `semantics:scope`, each 32 hexadecimal digits. Raise `InvalidArgument` for any other text."""
        found = _DOMAIN.fullmatch(text)
        if found is None:
            raise InvalidArgument(
                f"indexer_domain_id {text!r}: must be <cache-semantics-id>:<routing-scope-id>, 32 hexadecimal digits each"
            )
        return cls(*map(StateDigest.parse, found.groups()))


class CachePool(msgspec.Struct, frozen=True):
    """A domain in one data center."""

    indexer_domain: IndexerDomainId
    dc_id: int


class CacheOwnerId(msgspec.Struct, frozen=True):
    """Identity of one rank's cache, kept when the worker process is replaced."""

    pool: CachePool
    slot: StateDigest

    @classmethod
    def parse(cls, text: str) -> "CacheOwnerId":
        """Parse `semantics:scope/dc/slot`. Raise `InvalidArgument` for any other text."""
        found = _OWNER.fullmatch(text)
        if found is None:
            raise InvalidArgument(
                f"cache_owner_id {text!r}: must be <indexer-domain-id>/<16 hexadecimal digits>/<32 hexadecimal digits>"
            )
        domain, dc_id, slot = found.groups()
        return cls(CachePool(IndexerDomainId.parse(domain), int(dc_id, 16)), StateDigest.parse(slot))


class ComponentScope(msgspec.Struct, frozen=True, tag_field="kind", tag="component"):
    """The component of a host."""

    namespace: str
    component: str


class EndpointScope(msgspec.Struct, frozen=True, tag_field="kind", tag="endpoint"):
    """The endpoint whose blocks are described."""

    endpoint: EndpointId


class StateHost(msgspec.Struct, frozen=True, kw_only=True):
    """An agent to which ranks can be attached."""

    protocol_version: str = PROTOCOL_VERSION
    host_instance: InstanceAddress
    control_target: InstanceAddress
    max_slots: int


class AttachmentIntent(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's request to attach one rank to a host."""

    target_host: InstanceAddress
    producer_instance: InstanceAddress
    intent_incarnation: int
    cache_owner_id: CacheOwnerId
    worker: WorkerRank
    kv_state_endpoint: EndpointId
    indexer_domain_id: IndexerDomainId
    kv_block_size: int
    ingress_protocol: str = VLLM_RESIDENCY
    raw_zmq_endpoint: str
    raw_topic: str = ""


class StateSource(msgspec.Struct, frozen=True, kw_only=True):
    """Event channel and recovery endpoint of one cache owner; it stays when the worker leaves."""

    cache_owner_id: CacheOwnerId
    global_dp_rank: int
    kv_state_endpoint: EndpointId
    indexer_domain_id: IndexerDomainId
    kv_block_size: int
    ingress_protocol: str
    publisher_id: int
    protocol_version: str = PROTOCOL_VERSION
    event_topic: str = STATE_EVENTS_TOPIC
    recovery_control_target: InstanceAddress


class StateAttachment(msgspec.Struct, frozen=True, kw_only=True):
    """The rank whose blocks a source describes now."""

    cache_owner_id: CacheOwnerId
    publisher_id: int
    protocol_version: str = PROTOCOL_VERSION
    recovery_control_target: InstanceAddress
    attachment_generation: int
    producer_instance: InstanceAddress
    intent_incarnation: int
    worker: WorkerRank
    ingress_protocol: str
    raw_zmq_endpoint: str
    raw_topic: str
    ready_at_outbound_cursor: int


class StateRecord(msgspec.Struct, Generic[T], frozen=True, tag_field="type", tag="EventSource"):
    """Discovery record of one of the four kinds, in the bucket of event sources."""

    scope: ComponentScope | EndpointScope
    topic: str
    publisher_id: int
    metadata: T

    @property
    def key(self) -> str:
        return f"{state_prefix(self.scope, self.topic)}{self.publisher_id:x}"


def state_prefix(scope: ComponentScope | EndpointScope, topic: str) -> str:
    """Return the key prefix of a topic's records."""
    if isinstance(scope, ComponentScope):
        return f"namespace/{scope.namespace}/component/{scope.component}/topic/{topic}/"
    one = scope.endpoint
    return f"namespace/{one.namespace}/component/{one.component}/endpoint/{one.name}/topic/{topic}/"


class StateKvEvent(WorkerKvEvent):
    """Event of a worker that is attached to an agent."""

    state_source: CacheOwnerId


class AgentIdentity(msgspec.Struct, frozen=True):
    """The source that a query is for."""

    cache_owner_id: CacheOwnerId
    publisher_id: int
    protocol_version: str = PROTOCOL_VERSION


class AgentExpectation(msgspec.Struct, frozen=True):
    """Source and attachment that the sender of a query has seen; None for any attachment."""

    expected: AgentIdentity
    expected_attachment_generation: int | None = None


class AgentQueryKind(msgspec.Struct, frozen=True):
    """Kind of a query about a cache owner; one field is set."""

    status: AgentExpectation | None = None
    state_agent_recovery: AgentExpectation | None = None


class AgentQuery(KvSourceQuery):
    """A router's query to an agent; `recovery` is a query about the attached worker."""

    kind: str | AgentQueryKind = "recovery"


class AttachedWorker(msgspec.Struct, frozen=True):
    """Present attachment of a slot."""

    generation: int
    worker: WorkerRank
    ready: bool
    ready_at_outbound_cursor: int


class SlotStatus(msgspec.Struct, frozen=True):
    """State of a slot."""

    identity: AgentIdentity
    attachment: AttachedWorker | None
    cache_owner_ready: bool
    outbound_cursor: int


class CacheOwnerReset(msgspec.Struct, frozen=True, tag_field="domain", tag="cache_owner"):
    """Scope of a dump: the blocks of the cache owner, which no worker holds."""


class CacheOwnerDump(msgspec.Struct, frozen=True):
    """Blocks of a cache owner."""

    events: list[WorkerKvEvent]
    last_event_id: int
    reset_scope: CacheOwnerReset


class RecoveryAnswer(msgspec.Struct, frozen=True):
    """Response of the recovery of a cache owner."""

    dump: CacheOwnerDump = msgspec.field(name="TreeDump")


class RecoveryReceipt(msgspec.Struct, frozen=True):
    """Events that a recovery covers."""

    identity: AgentIdentity
    attachment_generation: int | None
    recovered_through_cursor: int


class StateRecovery(msgspec.Struct, frozen=True):
    """Answer to `state_agent_recovery`: about the attached worker if the query names the attachment, else about the cache owner.

    It is only encoded: the two responses have no tags.
    """

    response: RecoveryAnswer | KvSourceAnswer
    receipt: RecoveryReceipt


class StateAgentAnswer(msgspec.Struct, omit_defaults=True):
    """Answer to a query about a cache owner; exactly one field is set."""

    status: SlotStatus | None = msgspec.field(default=None, name="Status")
    recovery: StateRecovery | None = msgspec.field(default=None, name="StateAgentRecovery")
    too_new: KvSourceTooNew | None = msgspec.field(default=None, name="TooNew")
    error: str | None = msgspec.field(default=None, name="Error")
