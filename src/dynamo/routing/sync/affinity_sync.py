"""AffinitySync: exchange of session bindings between routers of the same workers.

    router A   bound(session, rank) ──▶ session_affinity_events ──▶ router B's affinity, and back

Each message is one binding with its version, in upstream's format. The greatest version wins everywhere: two routers
that bind one session concurrently converge to the same worker. Delivery is best effort: a router that starts later
receives a session's binding with its next request. Prefill and decode workers have separate endpoints, and therefore
separate bindings.
"""

import logging
from typing import Protocol

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.codec import UNREADABLE, msgpack_decoder, msgpack_encode
from dynamo.kv_events.topic import Topic
from dynamo.kv_router.affinity import Affinity, Rank, Version
from dynamo.protocols.discovery import EndpointId
from dynamo.routing.metrics import AffinitySyncMetrics
from dynamo.runtime.discovery.base import new_id
from dynamo.runtime.distributed import DistributedRuntime

logger = logging.getLogger(__name__)

TOPIC = "session_affinity_events"


class SessionAffinityUpdate(msgspec.Struct):
    """Binding of a session to a rank."""

    session_id: str
    worker_id: int
    dp_rank: int | None
    sequence: int
    writer_id: int


class BindingMachine(Protocol):
    """Router that binds sessions."""

    affinity: Affinity | None

    def bind(self, session: str, rank: Rank, version: Version, now: float) -> bool:
        """Apply a binding of another router. False for an unknown rank, or if a newer binding is known."""


decode_update = msgpack_decoder(SessionAffinityUpdate).decode


class AffinitySync:
    """Publisher and subscriber of one router's bindings."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        endpoint: EndpointId,
        machine: BindingMachine,
        clock: Clock,
        writer_id: int | None = None,
    ) -> None:
        """Set the writer id of the router's affinity, for all later bindings."""
        assert machine.affinity is not None, "session affinity is disabled for this router"
        self.writer_id = new_id() if writer_id is None else writer_id
        self._affinity = machine.affinity
        self._affinity.writer = self.writer_id
        self._endpoint = endpoint
        self._machine = machine
        self._clock = clock
        self._topic = Topic(runtime, endpoint, TOPIC, lambda event: self.apply(event.payload))
        self._metrics = AffinitySyncMetrics(runtime.metrics)

    @property
    def is_sound(self) -> bool:
        """False while the subscription to the other routers is interrupted."""
        return self._topic.is_sound

    async def start(self) -> None:
        """Start the subscriber and the publisher."""
        await self._topic.start(publishes=True)

    async def close(self) -> None:
        """Stop."""
        await self._topic.close()

    def bound(self, session: str, rank: Rank) -> None:
        """Publish the binding of a session that this router placed on a rank."""
        version = self._affinity.version_of(session)
        if version is not None and self._topic.publish(msgpack_encode(SessionAffinityUpdate(session, *rank, *version))):
            self._metrics.sent.inc()

    def apply(self, payload: bytes) -> None:
        """Apply a binding of another router; an unreadable one is dropped and counted."""
        try:
            update = decode_update(payload)
        except UNREADABLE as error:
            self._metrics.unreadable.inc()
            logger.warning("unreadable session binding for %s: %s", self._endpoint, error)
            return
        if update.writer_id == self.writer_id:
            return
        self._metrics.received.inc()
        rank = (update.worker_id, update.dp_rank or 0)
        self._machine.bind(update.session_id, rank, (update.sequence, update.writer_id), self._clock.now())
