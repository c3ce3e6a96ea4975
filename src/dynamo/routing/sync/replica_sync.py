"""ReplicaSync: exchange of active requests between routers of the same workers.

    router A   added ─ prefilled ─ freed ──▶ active_sequences_events ──▶ router B's active load, and back

Each router has exact data of its own requests, and data of the others' as far as events arrive: a router that starts
later begins without them, and a request whose `Free` was lost expires like any request that is never released. The
requests of a router that leaves discovery are dropped. The growth of outputs is not published.
"""

import asyncio
import logging
import struct
from typing import Literal, Protocol

from dynamo.core.clock import Clock
from dynamo.core.codec import msgpack_decoder, msgpack_encode
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
from dynamo.routing.metrics import SyncMetrics
from dynamo.runtime.discovery.base import new_id
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.base import Event
from dynamo.runtime.metric_labels import worker_labels

logger = logging.getLogger(__name__)

TOPIC = "active_sequences_events"
BATCH_MAX, BATCH_S = 256, 0.001
PRUNE_MIN = 4096  # Requests of other routers that are stored before finished ones are pruned.

decode_events = msgpack_decoder(ActiveSequenceEvents).decode

Rank = tuple[int, int]
Mark = Literal["MarkPrefillCompleted", "Free"]
FREED: Literal["Free"] = "Free"


class ActiveMachine(Protocol):
    """Router that counts active requests."""

    def is_active(self, request_id: str) -> bool:
        """Whether the request is counted."""

    def share(
        self,
        request_id: str,
        rank: Rank,
        sequence: bytes,
        prefill_tokens: int,
        now: float,
        prefill_s: float | None = None,
    ) -> bool:
        """Count a request that another router placed. False for an unknown rank."""

    def prefilled(self, request_id: str, now: float | None = None) -> bool:
        """Record the first token."""

    def finish(self, request_id: str, now: float = 0.0) -> bool:
        """Record the end of the request."""


class ReplicaSync:
    """Publisher and subscriber of one router's requests."""

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
        self._topic = Topic(runtime, endpoint, TOPIC, self._on_message, self._gone)
        self._own: dict[str, Rank] = {}
        """Published active requests and their ranks."""
        self._others: dict[str, int] = {}
        """Router id of other routers' requests, by request id."""
        self._kept = 0
        """Number of them that were active at the last pruning."""
        self._speakers: dict[int, int] = {}
        """Router id by publisher id."""
        self._unsent: list[ActiveSequenceEvent] = []
        self._timer: asyncio.TimerHandle | None = None
        self._metrics = SyncMetrics(runtime.metrics)
        self._metrics.follow_topic(self._topic, worker_labels(endpoint, runtime.instance_id))

    def set_model(self, model: str, worker_type: str) -> None:
        """Create the metric series of the model, once its name is known from a card."""
        self._metrics.set_model(model, worker_type, lambda: self._topic.messages)

    @property
    def is_sound(self) -> bool:
        """False while the subscription to the other routers is interrupted."""
        return self._topic.is_sound

    async def start(self) -> None:
        """Start the subscriber and the publisher."""
        await self._topic.start(publishes=True)

    async def close(self) -> None:
        """Send pending events and stop."""
        self.flush()
        await self._topic.close()

    # Published events.

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
        """Publish a request that this router placed; `sequence` are the packed sequence hashes of its blocks.

        `prefill_s` is the expected duration of its prefill, in seconds.
        """
        self._others.pop(request_id, None)
        self._own[request_id] = rank
        hashes = None if sequence is None else list(struct.unpack(f">{len(sequence) // 8}Q", sequence))
        duration = None if prefill_s is None else Duration.of(prefill_s)
        hint = PrefillLoadHint(prefill_tokens, duration) if tracks_prefill else None
        self._publish(request_id, rank, AddRequest(AddedSequence(hashes, tracks_prefill, expected_output_tokens, hint)))

    def prefilled(self, request_id: str) -> None:
        """Publish the first token of an own request."""
        rank = self._own.get(request_id)
        if rank is not None:
            self._publish(request_id, rank, MARK_PREFILL_COMPLETED)

    def freed(self, request_id: str) -> None:
        """Publish the end of an own request."""
        rank = self._own.pop(request_id, None)
        if rank is not None:
            self._publish(request_id, rank, FREED)

    def flush(self) -> None:
        """Send pending events."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        unsent, self._unsent = self._unsent, []
        if unsent and self._topic.publish(msgpack_encode(ActiveSequenceEvents(unsent))):
            self._metrics.sent.inc(len(unsent))

    def _publish(self, request_id: str, rank: Rank, data: AddRequest | Mark) -> None:
        event = ActiveSequenceEvent(request_id, SequenceWorker(*rank), data, self.router_id)
        self._unsent.append(event)
        if len(self._unsent) >= BATCH_MAX:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BATCH_S, self.flush)

    # Received events.

    def _on_message(self, event: Event) -> None:
        try:
            sent = decode_events(event.payload).events
        except ValueError as error:
            self._metrics.unreadable.inc()
            logger.warning("unreadable events from another router of %s: %s", self._endpoint, error)
            return
        for one in sent:
            if one.router_id != self.router_id:
                self.apply(one, event.publisher_id)

    def apply(self, sent: ActiveSequenceEvent, publisher_id: int = 0) -> None:
        """Apply one event of another router, or of a worker."""
        self._metrics.received.inc()
        request_id = sent.request_id
        if sent.data == MARK_PREFILL_COMPLETED:
            self._machine.prefilled(request_id, self._clock.now())
        elif sent.data == FREED:
            if self._others.pop(request_id, None) is not None:
                self._machine.finish(request_id, self._clock.now())
        elif isinstance(sent.data, AddRequest) and request_id not in self._own:
            self._share(sent, sent.data.added)
            self._speakers[publisher_id] = sent.router_id

    def _share(self, sent: ActiveSequenceEvent, added: AddedSequence) -> None:
        hint = added.prefill_load_hint
        tokens = hint.initial_effective_prefill_tokens if hint is not None and added.track_prefill_tokens else 0
        expected = None if hint is None else hint.expected_prefill_duration
        sequence = added.token_sequence or []
        packed = struct.pack(f">{len(sequence)}Q", *sequence)
        rank = (sent.worker.worker_id, sent.worker.dp_rank)
        prefill_s = None if expected is None else expected.seconds
        if self._machine.share(sent.request_id, rank, packed, tokens, self._clock.now(), prefill_s):
            if len(self._others) >= max(PRUNE_MIN, 2 * self._kept):
                self._prune()
            self._others[sent.request_id] = sent.router_id

    def _prune(self) -> None:
        """Drop the entries of requests that have expired or whose worker left."""
        is_active = self._machine.is_active
        self._others = {one: router for one, router in self._others.items() if is_active(one)}
        self._kept = len(self._others)

    def _gone(self, publisher_id: int) -> None:
        """Finish the requests of a router that left, because no more events of them will arrive."""
        router_id = self._speakers.pop(publisher_id, None)
        if router_id is None:
            return
        for request_id in [one for one, router in self._others.items() if router == router_id]:
            del self._others[request_id]
            self._machine.finish(request_id)
