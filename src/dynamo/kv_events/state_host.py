"""AgentHost: a KV state agent, which attaches workers to its slots as their intents ask (docs/kv-state-agent.md)."""

import asyncio
import logging
from typing import Any

from dynamo.core.codec import UNREADABLE, json_decoder, json_encode
from dynamo.core.tasks import TaskOwner
from dynamo.kv_events.state_slot import StateSlot, record_id
from dynamo.protocols.discovery import EVENT_SOURCES, EndpointId, InstanceAddress
from dynamo.protocols.kv_state import (
    HOSTS_TOPIC,
    INTENTS_TOPIC,
    VLLM_RESIDENCY,
    AttachmentIntent,
    CacheOwnerId,
    ComponentScope,
    StateHost,
    StateRecord,
    state_prefix,
)
from dynamo.runtime.component import Endpoint, Serving
from dynamo.runtime.discovery.base import Put, Synced
from dynamo.runtime.request_plane.base import Bare, Reply, Request
from dynamo.runtime.server import ServeOptions

logger = logging.getLogger(__name__)

SlotKey = tuple[CacheOwnerId, int, EndpointId]
"""Cache owner, rank and KV state endpoint of a slot."""

_decode_intent = json_decoder(StateRecord[AttachmentIntent]).decode


def intent_problem(record: StateRecord[AttachmentIntent]) -> str | None:
    """Return why an intent cannot be honoured, None if it can."""
    intent = record.metadata
    if record.publisher_id != intent.intent_incarnation:
        return f"intent_incarnation {intent.intent_incarnation}: must be the record's id {record.publisher_id}"
    if intent.kv_block_size < 1:
        return f"kv_block_size {intent.kv_block_size}: must be at least 1"
    if not intent.raw_zmq_endpoint.startswith("tcp://"):
        return f"raw_zmq_endpoint {intent.raw_zmq_endpoint!r}: must begin with tcp://"
    if intent.ingress_protocol != VLLM_RESIDENCY:
        return f"ingress_protocol {intent.ingress_protocol!r}: must be {VLLM_RESIDENCY}"
    if intent.indexer_domain_id != intent.cache_owner_id.pool.indexer_domain:
        return "indexer_domain_id: must be that of cache_owner_id"
    return None


class AgentHost:
    """Slots of one agent, from `start` to `close`."""

    def __init__(self, endpoint: Endpoint, max_slots: int) -> None:
        self._endpoint = endpoint
        self._max_slots = max_slots
        self._tasks = TaskOwner(f"KV state agent {endpoint}")
        self._serving: Serving | None = None
        self._record: StateRecord[StateHost] | None = None
        self._slots: dict[SlotKey, StateSlot] = {}
        self._keys: dict[str, SlotKey] = {}
        """Slot of each registered intent."""
        self._failed: set[str] = set()
        self._rejected = 0
        self.ended = asyncio.Event()
        """Set when the host no longer follows intents."""

    async def start(self) -> None:
        """Serve the control endpoint, register the host, and follow intents."""
        self._serving = await self._endpoint.serve(self._handle, ServeOptions(is_internal=True))
        callee = self._serving.instance.callee()
        one = self._endpoint.id
        scope = ComponentScope(one.namespace, one.component)
        metadata = StateHost(host_instance=callee, control_target=callee, max_slots=self._max_slots)
        name = record_id("dynamo/kv-state-host/v2", callee.instance_id)
        self._record = StateRecord(scope, HOSTS_TOPIC, name, metadata)
        await self._endpoint.discovery.put(EVENT_SOURCES, self._record.key, json_encode(self._record))
        self._tasks.supervise(self._watch, "intents").add_done_callback(lambda _: self.ended.set())

    async def close(self) -> None:
        """Leave the registry and close all slots."""
        if self._record is not None:
            await self._endpoint.discovery.delete(EVENT_SOURCES, self._record.key)
        await self._tasks.cancel_and_wait()
        for slot in self._slots.values():
            await slot.close()
        self._slots.clear()
        if self._serving is not None:
            await self._serving.close(0.0)
        self.ended.set()

    def status(self) -> dict[str, Any]:
        """Return the counts of slots by state."""
        active = sum(slot.intent is not None for slot in self._slots.values())
        is_healthy = self._serving is not None and self._tasks.is_sound and not self.ended.is_set()
        found: dict[str, Any] = {
            "healthy": is_healthy,
            "total_slots": len(self._slots),
            "active_slots": active,
            "detached_slots": len(self._slots) - active,
            "failed_slots": len(self._failed),
            "capacity_rejected_total": self._rejected,
        }
        return found if is_healthy else {**found, "error": "KV state-agent host supervisor is not running"}

    def _handle(self, request: Request, reply: Reply) -> None:
        reply.item(Bare(self.status()))
        reply.finish()

    async def _watch(self) -> None:
        assert self._record is not None, "the host is registered"
        prefix = state_prefix(self._record.scope, INTENTS_TOPIC)
        unconfirmed = set(self._keys)
        async for change in self._endpoint.discovery.watch(EVENT_SOURCES):
            if isinstance(change, Synced):
                for key in unconfirmed:
                    await self._remove(key)
                unconfirmed.clear()
            elif change.key.startswith(prefix):
                unconfirmed.discard(change.key)
                if isinstance(change, Put):
                    await self._add(change.key, change.value)
                else:
                    await self._remove(change.key)

    async def _add(self, key: str, value: bytes) -> None:
        try:
            record = _decode_intent(value)
        except UNREADABLE as error:
            logger.warning("malformed KV state record %s: %s", key, error)
            return
        intent = record.metadata
        if key in self._keys or not self._is_own(intent.target_host):
            return
        problem = intent_problem(record)
        if problem is not None:
            self._failed.add(key)
            logger.error("cannot attach worker %x: %s", intent.worker.worker_id, problem)
            return
        place = (intent.cache_owner_id, intent.worker.dp_rank, intent.kv_state_endpoint)
        slot = self._slots.get(place)
        if slot is None:
            if len(self._slots) >= self._max_slots:
                self._rejected += 1
                logger.error(
                    "cannot attach worker %x: all %d slots are used; raise --max-slots",
                    intent.worker.worker_id,
                    self._max_slots,
                )
                return
            slot = StateSlot(self._endpoint, intent)
            await slot.open()
            self._slots[place] = slot
        self._keys[key] = place
        await slot.attach(intent)

    async def _remove(self, key: str) -> None:
        self._failed.discard(key)
        place = self._keys.pop(key, None)
        slot = None if place is None else self._slots.get(place)
        if slot is not None and slot.intent is not None and key.endswith(f"/{slot.intent.intent_incarnation:x}"):
            await slot.detach()

    def _is_own(self, target: InstanceAddress) -> bool:
        assert self._record is not None, "the host is registered"
        return target.instance_id == self._record.metadata.host_instance.instance_id
