"""ReplicaSync: routers of the same workers tell each other what they gave to whom (serving-plane.md §4.9).

    router A   added ─ prefilled ─ freed ──▶ active_sequences_events ──▶ router B's active load, and back

Each knows its own requests as they are, and the others' as far as it heard: a router that comes late begins without
them, and what a lost `Free` leaves behind expires with all that nobody ended. What a router that is gone placed is
forgotten when it leaves the registry. How outputs grow is not told.
"""

import asyncio
import logging
import struct
from typing import Literal, Protocol

from dynamo.core.clock import Clock
from dynamo.core.codec import msgpack_decoder, msgpack_encode
from dynamo.core.metrics import MetricsRegistry
from dynamo.kv_events.topic import Topic
from dynamo.protocols.active_sequences import (
    MARK_PREFILL_COMPLETED,
    ActiveSequenceEvent,
    ActiveSequenceEvents,
    AddedSequence,
    AddRequest,
    Duration,
    PrefillLoadHint,
    SequenceWorker,
)
from dynamo.protocols.discovery import EndpointId
from dynamo.runtime.discovery.base import new_id
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.base import Event

logger = logging.getLogger(__name__)

TOPIC = "active_sequences_events"
BATCH_MAX, BATCH_S = 256, 0.001
TOLD_MIN = 4096  # Requests of others that are remembered before it is looked whether they still run.

decode_events = msgpack_decoder(ActiveSequenceEvents).decode

Rank = tuple[int, int]
Mark = Literal["MarkPrefillCompleted", "Free"]
FREED: Literal["Free"] = "Free"


class ActiveMachine(Protocol):
    """Who counts the requests: a router's machine."""

    def is_active(self, request_id: str) -> bool:
        """Whether it is counted."""

    def share(
        self,
        request_id: str,
        rank: Rank,
        sequence: bytes,
        prefill_tokens: int,
        now: float,
        prefill_s: float | None = None,
    ) -> bool:
        """Another router placed a request. False for an unknown rank."""

    def prefilled(self, request_id: str, now: float | None = None) -> bool:
        """The first token came."""

    def finish(self, request_id: str, now: float = 0.0) -> bool:
        """The request ended."""


class ReplicaSync:
    """One router's part in it."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        endpoint: EndpointId,
        machine: ActiveMachine,
        clock: Clock,
        router_id: int | None = None,
    ) -> None:
        self.router_id = new_id() if router_id is None else router_id
        self._endpoint = endpoint
        self._machine = machine
        self._clock = clock
        self._topic = Topic(runtime, endpoint, TOPIC, self._hear, self._gone)
        self._own: dict[str, Rank] = {}
        """The requests that others were told of, and where they are."""
        self._others: dict[str, int] = {}
        """By request, the router that placed it."""
        self._kept = 0
        """How many of them still ran when that was looked at last."""
        self._speakers: dict[int, int] = {}
        """By publisher, the router that speaks through it."""
        self._unsent: list[ActiveSequenceEvent] = []
        self._timer: asyncio.TimerHandle | None = None
        self._metrics = SyncMetrics(runtime.metrics)

    @property
    def is_sound(self) -> bool:
        """False while the others are not heard."""
        return self._topic.is_sound

    async def start(self) -> None:
        """Begins to listen and to speak."""
        await self._topic.start(speaks=True)

    async def close(self) -> None:
        """Says what was not said, and ends."""
        self.flush()
        await self._topic.close()

    # What is told.

    def added(
        self,
        request_id: str,
        rank: Rank,
        sequence: bytes | None,
        prefill_tokens: int,
        *,
        tracks_prefill: bool = True,
        expected_output_tokens: int | None = None,
        prefill_s: float | None = None,
    ) -> None:
        """The router itself placed a request; `sequence` are the packed sequence hashes of its blocks.

        `prefill_s` is how long its prompt is expected to take.
        """
        self._others.pop(request_id, None)
        self._own[request_id] = rank
        hashes = None if sequence is None else list(struct.unpack(f">{len(sequence) // 8}Q", sequence))
        duration = None if prefill_s is None else Duration.of(prefill_s)
        hint = PrefillLoadHint(prefill_tokens, duration) if tracks_prefill else None
        self._tell(request_id, rank, AddRequest(AddedSequence(hashes, tracks_prefill, expected_output_tokens, hint)))

    def prefilled(self, request_id: str) -> None:
        """The first token of an own request came."""
        rank = self._own.get(request_id)
        if rank is not None:
            self._tell(request_id, rank, MARK_PREFILL_COMPLETED)

    def freed(self, request_id: str) -> None:
        """An own request ended."""
        rank = self._own.pop(request_id, None)
        if rank is not None:
            self._tell(request_id, rank, FREED)

    def flush(self) -> None:
        """Sends what has not been sent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        unsent, self._unsent = self._unsent, []
        if unsent and self._topic.tell(msgpack_encode(ActiveSequenceEvents(unsent))):
            self._metrics.told.inc(len(unsent))

    def _tell(self, request_id: str, rank: Rank, data: AddRequest | Mark) -> None:
        event = ActiveSequenceEvent(request_id, SequenceWorker(*rank), data, self.router_id)
        self._unsent.append(event)
        if len(self._unsent) >= BATCH_MAX:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BATCH_S, self.flush)

    # What is heard.

    def _hear(self, event: Event) -> None:
        try:
            told = decode_events(event.payload).events
        except ValueError as error:
            self._metrics.unreadable.inc()
            logger.warning("what another router of %s says cannot be read: %s", self._endpoint, error)
            return
        for one in told:
            if one.router_id != self.router_id:
                self.hear(one, event.publisher_id)

    def hear(self, told: ActiveSequenceEvent, publisher_id: int = 0) -> None:
        """One event of another router, or of a worker."""
        self._metrics.heard.inc()
        request_id = told.request_id
        if told.data == MARK_PREFILL_COMPLETED:
            self._machine.prefilled(request_id, self._clock.now())
        elif told.data == FREED:
            if self._others.pop(request_id, None) is not None:
                self._machine.finish(request_id, self._clock.now())
        elif isinstance(told.data, AddRequest) and request_id not in self._own:
            self._share(told, told.data.added)
            self._speakers[publisher_id] = told.router_id

    def _share(self, told: ActiveSequenceEvent, added: AddedSequence) -> None:
        hint = added.prefill_load_hint
        tokens = hint.initial_effective_prefill_tokens if hint is not None and added.track_prefill_tokens else 0
        expected = None if hint is None else hint.expected_prefill_duration
        sequence = added.token_sequence or []
        packed = struct.pack(f">{len(sequence)}Q", *sequence)
        rank = (told.worker.worker_id, told.worker.dp_rank)
        prefill_s = None if expected is None else expected.seconds
        if self._machine.share(told.request_id, rank, packed, tokens, self._clock.now(), prefill_s):
            if len(self._others) >= max(TOLD_MIN, 2 * self._kept):
                self._prune()
            self._others[told.request_id] = told.router_id

    def _prune(self) -> None:
        """Forgets who placed requests that have expired or whose worker left."""
        is_active = self._machine.is_active
        self._others = {one: router for one, router in self._others.items() if is_active(one)}
        self._kept = len(self._others)

    def _gone(self, publisher_id: int) -> None:
        """A router left: nobody will say what became of its requests."""
        router_id = self._speakers.pop(publisher_id, None)
        if router_id is None:
            return
        for request_id in [one for one, router in self._others.items() if router == router_id]:
            del self._others[request_id]
            self._machine.finish(request_id)


class SyncMetrics:
    """How much was told and heard."""

    def __init__(self, registry: MetricsRegistry) -> None:
        prefix = "dynamo_router_replica_sync_"
        self.told = registry.counter(prefix + "events_sent_total", "Events told to other routers").labels()
        self.heard = registry.counter(prefix + "events_received_total", "Events heard from other routers").labels()
        self.unreadable = registry.counter(
            prefix + "unreadable_total", "Messages of other routers that could not be read"
        ).labels()
