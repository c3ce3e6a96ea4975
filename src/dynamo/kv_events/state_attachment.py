"""StateAttachment: intents of a worker's ranks to be attached to a KV state agent (docs/kv-state-agent.md).

The intents name one host. A host that leaves the registry is replaced by another one, as soon as there is one.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo.core.codec import UNREADABLE, json_decoder, json_encode
from dynamo.core.tasks import TaskOwner
from dynamo.protocols.discovery import EVENT_SOURCES, EndpointId, InstanceAddress, WorkerRank
from dynamo.protocols.kv_state import (
    ATTACHMENTS_TOPIC,
    HOSTS_TOPIC,
    INTENTS_TOPIC,
    PROTOCOL_VERSION,
    AttachmentIntent,
    CacheOwnerId,
    ComponentScope,
    IndexerDomainId,
    StateAttachment,
    StateHost,
    StateRecord,
)
from dynamo.runtime.component import Endpoint
from dynamo.runtime.discovery.base import Put, Synced
from dynamo.runtime.event_plane.envelope import new_publisher_id

logger = logging.getLogger(__name__)

_decode_host = json_decoder(StateRecord[StateHost]).decode
_decode_attachment = json_decoder(StateRecord[StateAttachment]).decode


@dataclass(frozen=True, slots=True)
class AttachedRank:
    """One rank to attach."""

    cache_owner_id: CacheOwnerId
    global_dp_rank: int
    kv_state_endpoint: EndpointId
    indexer_domain_id: IndexerDomainId
    kv_block_size: int
    raw_zmq_endpoint: str
    raw_topic: str = ""


class AttachmentOwner:
    """Intents of the ranks of one worker, from `start` to `close`."""

    def __init__(self, endpoint: Endpoint, worker_id: int, ranks: Sequence[AttachedRank]) -> None:
        self._endpoint = endpoint
        self._worker_id = worker_id
        self._ranks = ranks
        self._tasks = TaskOwner(f"KV state attachment of {worker_id:x}")
        self._hosts: dict[str, StateRecord[StateHost]] = {}
        self._target: str | None = None
        """Key of the host that the intents name."""
        self._intents: dict[str, StateRecord[AttachmentIntent]] = {}
        self._attached: dict[str, int] = {}
        """Incarnation of the intent of each registered attachment, by key."""
        self._has_attached = asyncio.Event()

    async def start(self) -> None:
        """Register the intents and wait until every rank is attached. The caller limits the time."""
        await self._endpoint.runtime.request_plane.listen()
        self._tasks.supervise(self._watch, "hosts")
        await self._has_attached.wait()

    async def close(self) -> None:
        """Withdraw the intents."""
        await self._tasks.cancel_and_wait()
        await self._withdraw()

    async def _watch(self) -> None:
        unconfirmed = {*self._hosts, *self._attached}
        is_synced = False
        async for change in self._endpoint.discovery.watch(EVENT_SOURCES):
            if isinstance(change, Synced):
                is_synced = True
                for key in unconfirmed:
                    self._hosts.pop(key, None)
                    self._attached.pop(key, None)
                unconfirmed.clear()
            else:
                unconfirmed.discard(change.key)
                self._hosts.pop(change.key, None)
                self._attached.pop(change.key, None)
                if isinstance(change, Put):
                    self._add(change.key, change.value)
            if is_synced:
                await self._choose()
            if self._intents and {one.publisher_id for one in self._intents.values()} <= set(self._attached.values()):
                self._has_attached.set()

    def _add(self, key: str, value: bytes) -> None:
        try:
            if f"/topic/{HOSTS_TOPIC}/" in key:
                record = _decode_host(value)
                if record.metadata.protocol_version == PROTOCOL_VERSION:
                    self._hosts[key] = record
            elif f"/topic/{ATTACHMENTS_TOPIC}/" in key:
                self._attached[key] = _decode_attachment(value).metadata.intent_incarnation
        except UNREADABLE as error:
            logger.warning("malformed KV state record %s: %s", key, error)

    async def _choose(self) -> None:
        """Name a host in the intents: one of this namespace, on this machine if there is one."""
        if self._target in self._hosts:
            return
        await self._withdraw()
        producer = self._producer()
        machine = _machine_of(producer)
        candidates = [
            (_machine_of(record.metadata.host_instance) != machine, key)
            for key, record in self._hosts.items()
            if record.metadata.host_instance.namespace == self._endpoint.id.namespace
        ]
        if not candidates:
            return
        self._target = min(candidates)[1]
        host = self._hosts[self._target].metadata.host_instance
        scope = ComponentScope(host.namespace, host.component)
        for rank in self._ranks:
            incarnation = new_publisher_id()
            intent = AttachmentIntent(
                target_host=host,
                producer_instance=producer,
                intent_incarnation=incarnation,
                cache_owner_id=rank.cache_owner_id,
                worker=WorkerRank(self._worker_id, rank.global_dp_rank),
                kv_state_endpoint=rank.kv_state_endpoint,
                indexer_domain_id=rank.indexer_domain_id,
                kv_block_size=rank.kv_block_size,
                raw_zmq_endpoint=rank.raw_zmq_endpoint,
                raw_topic=rank.raw_topic,
            )
            record = StateRecord(scope, INTENTS_TOPIC, incarnation, intent)
            self._intents[record.key] = record
            await self._endpoint.discovery.put(EVENT_SOURCES, record.key, json_encode(record))

    async def _withdraw(self) -> None:
        intents, self._intents, self._target = self._intents, {}, None
        for key in intents:
            await self._endpoint.discovery.delete(EVENT_SOURCES, key)

    def _producer(self) -> InstanceAddress:
        """Return the worker's instance of its endpoint."""
        one, runtime = self._endpoint.id, self._endpoint.runtime
        address = runtime.request_plane.address(f"{runtime.instance_id:x}/{one.path}")
        return InstanceAddress(one.component, one.name, one.namespace, runtime.instance_id, address)


def _machine_of(instance: InstanceAddress) -> str:
    """Return the host in an instance's address."""
    return instance.transport.address.partition("/")[0].rpartition(":")[0]
