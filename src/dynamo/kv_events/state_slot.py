"""StateSlot: KV state of one cache owner in a KV state agent, across the workers that are attached to it.

    engine ──ZMQ──▶ relay ──▶ cached blocks ──▶ event plane ──▶ routers
                                   ▲                               │ the source or the attachment is new
                                   └────── recovery endpoint ◀─────┘

Event ids count across attachments. Each attachment begins with `cleared` of its worker and ends with it.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from blake3 import blake3

from dynamo.core.codec import decode, json_encode, msgpack_encode
from dynamo.core.tasks import TaskOwner
from dynamo.kv_events.held_blocks import CachedBlocks
from dynamo.kv_events.publisher import KvEventPublisher
from dynamo.kv_events.source import recovery_endpoint, send_dump
from dynamo.kv_events.worker_publishers import event_data
from dynamo.protocols.discovery import EVENT_SOURCES, EndpointId
from dynamo.protocols.kv_events import Cleared, KvEvent, KvSourceAnswer, KvSourceTooNew, NumberedKvEvent
from dynamo.protocols.kv_state import (
    ATTACHMENTS_TOPIC,
    SOURCES_TOPIC,
    STATE_EVENTS_TOPIC,
    AgentIdentity,
    AgentQuery,
    AgentQueryKind,
    AttachedWorker,
    AttachmentIntent,
    CacheOwnerDump,
    CacheOwnerReset,
    EndpointScope,
    RecoveryAnswer,
    RecoveryReceipt,
    SlotStatus,
    StateAgentAnswer,
    StateAttachment,
    StateKvEvent,
    StateRecord,
    StateRecovery,
    StateSource,
)
from dynamo.runtime.component import Endpoint, Serving
from dynamo.runtime.event_plane.base import Publisher
from dynamo.runtime.request_plane.base import Bare, Reply, Request
from dynamo.runtime.server import ServeOptions

logger = logging.getLogger(__name__)

RECORD_ID_BITS = 53  # Record ids must be exact in JSON readers that use doubles.


def record_id(domain: str, *numbers: int) -> int:
    """Return the id of a record: upstream's BLAKE3 hash of a domain and 64-bit numbers, of which routers verify it."""
    digest = blake3(domain.encode() + b"".join(number.to_bytes(8, "big") for number in numbers)).digest()
    return int.from_bytes(digest[:8], "big") & (1 << RECORD_ID_BITS) - 1


def attachment_record_id(publisher_id: int, generation: int) -> int:
    """Return the id of the record of a source's attachment."""
    return record_id("dynamo/kv-state-attachment-record/v2", publisher_id, generation)


class StateSlot:
    """Source of one cache owner's events, from `open` to `close`; a worker is attached to it or not."""

    def __init__(self, control: Endpoint, intent: AttachmentIntent) -> None:
        """`control`: an endpoint of the agent's component. The first intent states what the slot describes."""
        self._control = control
        self._first = intent
        self._tasks = TaskOwner(f"KV state of {intent.kv_state_endpoint} rank {intent.worker.dp_rank}")
        self._publisher: Publisher | None = None
        self._serving: Serving | None = None
        self._source: StateRecord[StateSource] | None = None
        self._attachment: StateRecord[StateAttachment] | None = None
        self._relay: KvEventPublisher | None = None
        self._blocks: CachedBlocks | None = None
        self._pending: list[StateKvEvent] = []
        self.intent: AttachmentIntent | None = None
        """Intent of the attached worker."""
        self.generation = 0
        self.cursor = 0
        """Id of the last event."""

    async def open(self) -> None:
        """Register the event channel, the recovery endpoint and, when both exist, the source."""
        one, runtime = self._first, self._control.runtime
        publisher = self._publisher = await runtime.event_plane.publisher(one.kv_state_endpoint, STATE_EVENTS_TOPIC)
        agent = self._control.id
        path = EndpointId(agent.namespace, agent.component, recovery_endpoint(publisher.id))
        self._serving = await runtime.endpoint(str(path)).serve(self.handle, ServeOptions(is_internal=True))
        metadata = StateSource(
            cache_owner_id=one.cache_owner_id,
            global_dp_rank=one.worker.dp_rank,
            kv_state_endpoint=one.kv_state_endpoint,
            indexer_domain_id=one.indexer_domain_id,
            kv_block_size=one.kv_block_size,
            ingress_protocol=one.ingress_protocol,
            publisher_id=publisher.id,
            recovery_control_target=self._serving.instance.callee(),
        )
        self._source = StateRecord(EndpointScope(one.kv_state_endpoint), SOURCES_TOPIC, publisher.id, metadata)
        await self._control.discovery.put(EVENT_SOURCES, self._source.key, json_encode(self._source))

    async def attach(self, intent: AttachmentIntent) -> None:
        """Follow a worker's engine and register the attachment; a worker that is attached before is detached."""
        await self.detach()
        assert self._publisher is not None, "the slot is open"
        assert self._serving is not None, "the slot is open"
        self.intent = intent
        self.generation += 1
        self._blocks = CachedBlocks(intent.worker.worker_id, intent.worker.dp_rank)
        self._blocks.last_event_id = self.cursor
        self.put(Cleared(), intent.worker.dp_rank, "device")
        self._flush()
        self._relay = KvEventPublisher.into(
            _AttachedEvents(self), self._tasks, intent.kv_block_size, intent.worker.dp_rank
        )
        self._relay.relay(intent.raw_zmq_endpoint, intent.raw_topic)
        metadata = StateAttachment(
            cache_owner_id=intent.cache_owner_id,
            publisher_id=self._publisher.id,
            recovery_control_target=self._serving.instance.callee(),
            attachment_generation=self.generation,
            producer_instance=intent.producer_instance,
            intent_incarnation=intent.intent_incarnation,
            worker=intent.worker,
            ingress_protocol=intent.ingress_protocol,
            raw_zmq_endpoint=intent.raw_zmq_endpoint,
            raw_topic=intent.raw_topic,
            ready_at_outbound_cursor=self.cursor,
        )
        name = attachment_record_id(self._publisher.id, self.generation)
        record = StateRecord(EndpointScope(self._first.kv_state_endpoint), ATTACHMENTS_TOPIC, name, metadata)
        self._attachment = record
        await self._control.discovery.put(EVENT_SOURCES, record.key, json_encode(record))
        logger.info("attached worker %x rank %d", intent.worker.worker_id, intent.worker.dp_rank)

    async def detach(self) -> None:
        """Stop following the engine, clear the worker's blocks, and delete the record of the attachment."""
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.shutdown()
        if self.intent is not None:
            self.put(Cleared(), self.intent.worker.dp_rank, "device")
            self._flush()
        self.intent = self._blocks = None
        record, self._attachment = self._attachment, None
        if record is not None:
            await self._control.discovery.delete(EVENT_SOURCES, record.key)

    async def close(self) -> None:
        """Detach the worker and delete the source, the endpoint and the channel."""
        await self.detach()
        await self._tasks.cancel_and_wait()
        if self._source is not None:
            await self._control.discovery.delete(EVENT_SOURCES, self._source.key)
        if self._serving is not None:
            await self._serving.close(0.0)
        if self._publisher is not None:
            await self._publisher.close()

    def put(self, event: KvEvent, dp_rank: int, tier: str) -> None:
        """Apply and publish a change of the attached worker's cache; without a worker it is dropped."""
        if self.intent is None or self._blocks is None:
            return
        self.cursor += 1
        worker = self.intent.worker
        numbered = NumberedKvEvent(self.cursor, event_data(event), worker.dp_rank)
        made = StateKvEvent(worker.worker_id, tier, "worker", numbered, self.intent.cache_owner_id)
        self._blocks.apply(made)
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append(made)

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if pending and self._publisher is not None:
            self._publisher.publish(msgpack_encode(pending))

    # Queries

    def handle(self, request: Request, reply: Reply) -> None:
        """Answer a router's query. Raise `InvalidArgument` for a malformed query."""
        query = decode(request.body, request.codec, AgentQuery)
        answer: KvSourceAnswer | StateAgentAnswer | None = None
        in_form: Callable[[KvSourceAnswer], StateAgentAnswer] | None = None
        if isinstance(query.kind, AgentQueryKind):
            answer, in_form = self.agent_answer(query, query.kind), partial(self._as_recovery, self.generation)
        if answer is None:
            blocks = self._blocks
            if blocks is None:
                answer = KvSourceAnswer(error="no worker is attached")
            elif (found := blocks.short_answer(query)) is None:
                self._tasks.start(send_dump(blocks, reply, in_form), "KV dump")
                return
            else:
                answer = found if in_form is None or found.events is None else in_form(found)
        reply.item(Bare(answer))
        reply.finish()

    def _as_recovery(self, generation: int, answer: KvSourceAnswer) -> StateAgentAnswer:
        """Return events or a dump of the blocks of the worker of an attachment as an answer to `state_agent_recovery`."""
        covered = answer.dump or answer.events
        assert covered is not None, "errors have no other form"
        receipt = RecoveryReceipt(self._identity(), generation, covered.last_event_id)
        return StateAgentAnswer(recovery=StateRecovery(answer, receipt))

    def agent_answer(self, query: AgentQuery, kind: AgentQueryKind) -> StateAgentAnswer | None:
        """Answer a query about the cache owner: its attachment, or the blocks that outlive a worker (none).

        None for a recovery that names the attachment: it is about the attached worker's blocks.
        """
        expected = kind.status or kind.state_agent_recovery
        identity = self._identity()
        if expected is None or expected.expected != identity:
            return StateAgentAnswer(error="the query is for another source")
        generation = expected.expected_attachment_generation
        if generation is not None and (self.intent is None or generation != self.generation):
            return StateAgentAnswer(error=f"attachment_generation {generation}: the slot's is {self.generation}")
        if kind.status is not None:
            return StateAgentAnswer(status=SlotStatus(identity, self._attached(), True, self.cursor))
        if generation is not None:
            return None
        start = query.start_event_id
        if start is not None and start > self.cursor:
            return StateAgentAnswer(too_new=KvSourceTooNew(start, query.end_event_id or self.cursor, self.cursor))
        if start is not None:
            return StateAgentAnswer(
                error=f"start_event_id {start}: a cache owner has no events, request all of its blocks"
            )
        dump = CacheOwnerDump([], self.cursor, CacheOwnerReset())
        receipt = RecoveryReceipt(identity, generation, self.cursor)
        return StateAgentAnswer(recovery=StateRecovery(RecoveryAnswer(dump), receipt))

    def _identity(self) -> AgentIdentity:
        assert self._publisher is not None, "the slot is open"
        return AgentIdentity(self._first.cache_owner_id, self._publisher.id)

    def _attached(self) -> AttachedWorker | None:
        record = self._attachment
        if record is None:
            return None
        one = record.metadata
        return AttachedWorker(one.attachment_generation, one.worker, True, one.ready_at_outbound_cursor)


class _AttachedEvents:
    """Sink of the events of one attachment."""

    def __init__(self, slot: StateSlot) -> None:
        self._slot = slot
        self._generation = slot.generation

    def put(self, event: KvEvent, dp_rank: int, tier: str) -> None:
        """Pass an event on while the attachment is the slot's present one."""
        if self._slot.generation == self._generation:
            self._slot.put(event, dp_rank, tier)

    async def close(self) -> None:
        """Do nothing: the slot has its own end."""
