"""AffinitySync: routers of the same workers tell each other which session goes where (serving-plane.md §4.9).

    router A   bound(session, rank) ──▶ session_affinity_events ──▶ router B's affinity, and back

Each message is one binding with its version, in upstream's words. The greatest version is in force everywhere: two routers
that bind one session at once end up with the same worker. It is a best effort: a router that comes late learns a session
with its next turn. Prefill and decode workers have endpoints of their own, and so bindings of their own.
"""

import logging
from typing import Protocol

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.codec import UNREADABLE, msgpack_decoder, msgpack_encode
from dynamo.core.metrics import MetricsRegistry
from dynamo.kv_events.topic import Topic
from dynamo.kv_router.affinity import Affinity, Rank, Version
from dynamo.protocols.discovery import EndpointId
from dynamo.runtime.discovery.base import new_id
from dynamo.runtime.distributed import DistributedRuntime

logger = logging.getLogger(__name__)

TOPIC = "session_affinity_events"


class SessionAffinityUpdate(msgspec.Struct):
    """A session was given to a rank."""

    session_id: str
    worker_id: int
    dp_rank: int | None
    sequence: int
    writer_id: int


class BindingMachine(Protocol):
    """Who binds sessions: a router's machine."""

    affinity: Affinity | None

    def bind(self, session: str, rank: Rank, version: Version, now: float) -> bool:
        """Another router gave a session to a rank. False where that is unknown, or a newer one is known."""


decode_update = msgpack_decoder(SessionAffinityUpdate).decode


class AffinitySync:
    """One router's part in it."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        endpoint: EndpointId,
        machine: BindingMachine,
        clock: Clock,
        writer_id: int | None = None,
    ) -> None:
        """The machine's affinity writes with this id from now on."""
        assert machine.affinity is not None, "a router without sessions has nothing to tell"
        self.writer_id = new_id() if writer_id is None else writer_id
        self._affinity = machine.affinity
        self._affinity.writer = self.writer_id
        self._endpoint = endpoint
        self._machine = machine
        self._clock = clock
        self._topic = Topic(runtime, endpoint, TOPIC, lambda event: self.hear(event.payload))
        self._metrics = AffinitySyncMetrics(runtime.metrics)

    @property
    def is_sound(self) -> bool:
        """False while the others are not heard."""
        return self._topic.is_sound

    async def start(self) -> None:
        """Begins to listen and to speak."""
        await self._topic.start(speaks=True)

    async def close(self) -> None:
        """Ends."""
        await self._topic.close()

    def bound(self, session: str, rank: Rank) -> None:
        """A session's request was given to a rank here."""
        version = self._affinity.version_of(session)
        if version is not None and self._topic.tell(msgpack_encode(SessionAffinityUpdate(session, *rank, *version))):
            self._metrics.told.inc()

    def hear(self, payload: bytes) -> None:
        """What another router says. What cannot be read is left out, and counted."""
        try:
            update = decode_update(payload)
        except UNREADABLE as error:
            self._metrics.unreadable.inc()
            logger.warning("a binding of another router of %s cannot be read: %s", self._endpoint, error)
            return
        if update.writer_id == self.writer_id:
            return
        self._metrics.heard.inc()
        rank = (update.worker_id, update.dp_rank or 0)
        self._machine.bind(update.session_id, rank, (update.sequence, update.writer_id), self._clock.now())


class AffinitySyncMetrics:
    """How much was told and heard."""

    def __init__(self, registry: MetricsRegistry) -> None:
        prefix = "dynamo_router_affinity_sync_"
        self.told = registry.counter(prefix + "bindings_sent_total", "Bindings told to other routers").labels()
        self.heard = registry.counter(prefix + "bindings_received_total", "Bindings heard from other routers").labels()
        self.unreadable = registry.counter(
            prefix + "unreadable_total", "Bindings of other routers that could not be read"
        ).labels()
