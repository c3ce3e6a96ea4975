"""KvView: a router's view of its workers' cached blocks, with recovery of lost events (docs/kv-events.md).

    v1/event_sources ──new──▶ query all ──▶ dump ──▶ index ◀── events in order
                                  ▲                              │ an id is missing
                                  └──── query from there on ◀────┘

Each rank's events are numbered from 1. A gap triggers a query from the last received event on; until the answer
arrives, events are buffered, and applied after it. A rank whose source does not answer is known by its live events
alone, and is queried again. A new rank without later events is queried a second time, because the arrival of a
subscription at its publisher is not confirmed.
"""

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Protocol

from dynamo.core.backoff import Backoff
from dynamo.core.codec import UNREADABLE, decode, encode, json_decoder, msgpack_decoder
from dynamo.core.errors import DynamoException, StreamIncomplete
from dynamo.core.tasks import TaskOwner
from dynamo.kv_events.view_metrics import ViewMetrics
from dynamo.kv_events.worker_publishers import KV_EVENTS_TOPIC
from dynamo.protocols.discovery import (
    EVENT_SOURCES,
    EndpointId,
    EventScope,
    EventSource,
    EventSourceMetadata,
    InstanceAddress,
    topic_prefix,
)
from dynamo.protocols.kv_events import KvSourceAnswer, WorkerKvEvent
from dynamo.protocols.kv_state import ATTACHMENTS_TOPIC, STATE_EVENTS_TOPIC, StateAttachment, StateRecord
from dynamo.runtime.discovery.base import Put, Synced
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.base import Event, PublisherGone, Subscriber
from dynamo.runtime.metric_labels import worker_labels
from dynamo.runtime.request_plane.base import Request, Target
from dynamo.runtime.single_response import OneAnswer

logger = logging.getLogger(__name__)

QUERY_TIMEOUT_S = 10.0  # A dump of the largest cache takes a second to create and send.
QUERY_RETRY_FIRST_S, QUERY_RETRY_MAX_S = 0.2, 10.0
HELD_BACK_S = 0.01
SECOND_QUERY_S = 1.0  # By then the subscription has reached a new publisher.
PENDING_MAX = 4096  # Events buffered while a query is in progress: beyond that a new dump costs less.
EVENTS_PER_TURN = 64  # Events of a dump that are applied before yielding to the event loop: about a millisecond.

decode_source = json_decoder(EventSource).decode
decode_attachment = json_decoder(StateRecord[StateAttachment]).decode
decode_events = msgpack_decoder(list[WorkerKvEvent]).decode

Rank = tuple[int, int]


class KvEventListener(Protocol):
    """Receiver of cache changes, for example a router's state."""

    def apply(self, kv_event: WorkerKvEvent) -> bool:
        """Apply a change of a worker's cache."""

    def forget(self, worker_id: int, dp_rank: int) -> None:
        """Remove a rank's blocks; its present blocks are sent afterwards."""


class _Source:
    """State of the events of one rank."""

    def __init__(self, record: EventSource | None) -> None:
        self.record = record
        self.last_id = 0
        self.is_partial = False
        """Whether events were lost that no source could supply."""
        self.is_held_back = False
        """Whether new events must wait, while a snapshot is applied or a dump is created."""
        self.pending: deque[WorkerKvEvent] = deque()
        self.recovery: asyncio.Task[None] | None = None


class KvView:
    """Follow the KV events of one endpoint's workers."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        endpoint: EndpointId,
        listener: KvEventListener,
        *,
        is_durable: bool = False,
        query_timeout_s: float = QUERY_TIMEOUT_S,
    ) -> None:
        """`is_durable`: events are stored elsewhere (`kv_events.durable`), so that new ranks need no full query."""
        self.endpoint = endpoint
        self._query_timeout_s = query_timeout_s
        self._queries_new = not is_durable
        self._runtime = runtime
        self._listener = listener
        self._tasks = TaskOwner(f"kv view of {endpoint}")
        self._sources: dict[Rank, _Source] = {}
        self._keys: dict[str, Rank] = {}
        self._subscribers: list[Subscriber] = []
        self._follows_state_agents = False
        self._metrics = ViewMetrics(runtime.metrics, worker_labels(endpoint, runtime.instance_id))
        self._metrics.follow_sources(lambda: sum(self._is_active(one) for one in self._sources.values()), self._count)

    @property
    def is_sound(self) -> bool:
        """False while one of its watches has crashed and is being restarted."""
        return self._tasks.is_sound

    @property
    def has_sources(self) -> bool:
        """Whether any event source is registered."""
        return bool(self._sources)

    @property
    def is_whole(self) -> bool:
        """Whether no query is in progress."""
        return all(source.recovery is None and not source.is_held_back for source in self._sources.values())

    @staticmethod
    def _is_active(source: _Source) -> bool:
        """Return whether events of a source are applied as they arrive."""
        return source.record is not None and source.recovery is None and not source.is_held_back

    def _count(self) -> int:
        return sum(source.record is not None for source in self._sources.values())

    async def start(self) -> None:
        """Start listening, then querying."""
        await self._subscribe(KV_EVENTS_TOPIC)
        self._tasks.supervise(self._watch, "sources")

    async def close(self) -> None:
        """Stop."""
        await self._tasks.cancel_and_wait()
        for subscriber in self._subscribers:
            await subscriber.close()

    def drop_worker(self, worker_id: int) -> None:
        """Remove a worker that left, with its blocks."""
        for rank in [rank for rank in self._sources if rank[0] == worker_id]:
            self._drop(rank)

    # Snapshots

    def last_event_ids(self) -> dict[Rank, int]:
        """Return the last received event id of each rank."""
        return {rank: source.last_id for rank, source in self._sources.items() if source.last_id}

    async def adopt(self, events: Sequence[WorkerKvEvent]) -> None:
        """Apply stored events of ranks that are less up to date here; the greatest event id is the rank's last."""
        by_rank: dict[Rank, list[WorkerKvEvent]] = {}
        for kv_event in events:
            by_rank.setdefault((kv_event.worker_id, kv_event.event.dp_rank), []).append(kv_event)
        for rank, kept in by_rank.items():
            source = self._sources.get(rank)
            if source is None:
                source = self._sources[rank] = _Source(None)
            last_id = max(kv_event.event.event_id for kv_event in kept)
            if source.recovery is not None or last_id <= source.last_id:
                continue
            source.is_held_back = True
            self._listener.forget(*rank)
            for number, kv_event in enumerate(kept, 1):
                if self._sources.get(rank) is not source:
                    break  # The rank left.
                self._listener.apply(kv_event)
                if number % EVENTS_PER_TURN == 0:
                    await asyncio.sleep(0)
            source.last_id, source.is_partial, source.is_held_back = last_id, False, False
            self._catch_up(rank, source)

    @contextlib.contextmanager
    def held_back(self, worker_id: int, dp_rank: int) -> Iterator[Callable[[], int | None]]:
        """Hold a rank's events back, so that its state can be dumped in pieces.

        Yield a function that returns the rank's last event id; None if the rank is unknown, has left, or is being
        queried.
        """
        rank = (worker_id, dp_rank)
        source = self._sources.get(rank)
        if source is None or source.recovery is not None or source.is_held_back:
            yield lambda: None
            return
        source.is_held_back = True
        try:
            yield lambda: source.last_id if self._sources.get(rank) is source else None
        finally:
            source.is_held_back = False
            self._catch_up(rank, source)

    def query_silent_ranks(self) -> None:
        """After the stored events are applied: query the ranks without events, now and when new ones are registered."""
        self._queries_new = True
        for rank, source in self._sources.items():
            if source.record is not None and not source.last_id and source.recovery is None:
                self._recover_new(rank, source)

    def drop_absent_workers(self, workers: Collection[int]) -> None:
        """Remove ranks without a source whose workers are not in `workers`."""
        for rank in [rank for rank, one in self._sources.items() if one.record is None and rank[0] not in workers]:
            self._drop(rank)

    # Events

    async def _subscribe(self, topic: str) -> None:
        subscriber = await self._runtime.event_plane.subscriber(self.endpoint, topic)
        self._subscribers.append(subscriber)
        self._tasks.supervise(partial(self._listen, subscriber), topic)

    async def _follow_state_agents(self) -> None:
        """Listen to state agents from the first attached rank on: most deployments have none."""
        if not self._follows_state_agents:
            self._follows_state_agents = True
            await self._subscribe(STATE_EVENTS_TOPIC)

    async def _listen(self, subscriber: Subscriber) -> None:
        async for received in subscriber:
            if isinstance(received, Event):
                self._on_message(received)
            elif isinstance(received, PublisherGone):
                logger.debug("publisher %x of %s is gone", received.publisher_id, self.endpoint)

    def _on_message(self, event: Event) -> None:
        self._metrics.batches.value += 1
        try:
            events = decode_events(event.payload)
        except ValueError as error:
            self._metrics.unreadable.inc()
            logger.warning("malformed KV events of %s: %s", self.endpoint, error)
            return
        receive = self.receive
        for kv_event in events:
            receive(kv_event)

    def receive(self, kv_event: WorkerKvEvent) -> None:
        """Process one event; events may be out of order or duplicated."""
        event = kv_event.event
        rank = (kv_event.worker_id, event.dp_rank)
        source = self._sources.get(rank)
        if source is None:
            source = self._sources[rank] = _Source(None)
        if source.recovery is not None or source.is_held_back:
            if len(source.pending) < PENDING_MAX:
                source.pending.append(kv_event)
        elif event.event_id == source.last_id + 1:  # The next one, as nearly always.
            source.last_id = event.event_id
            self._metrics.applied(event, self._listener.apply(kv_event))
        else:
            self._take(rank, source, kv_event)

    def _take(self, rank: Rank, source: _Source, kv_event: WorkerKvEvent) -> None:
        number = kv_event.event.event_id
        if number <= source.last_id:
            return
        if number > source.last_id + 1:
            self._metrics.gaps.inc()
            if source.record is not None:
                source.pending.append(kv_event)
                self._recover(rank, source, source.last_id + 1 if source.last_id else None)
                return
            source.is_partial = True
            if source.last_id:
                self._listener.forget(*rank)  # There is no source to query for the lost events.
        self._apply(source, kv_event)

    def _apply(self, source: _Source, kv_event: WorkerKvEvent) -> None:
        source.last_id = max(source.last_id, kv_event.event.event_id)
        self._metrics.applied(kv_event.event, self._listener.apply(kv_event))

    # Sources

    async def _watch(self) -> None:
        attachments = topic_prefix(self.endpoint, ATTACHMENTS_TOPIC)
        prefixes = topic_prefix(self.endpoint, KV_EVENTS_TOPIC), attachments
        unconfirmed = set(self._keys)
        async for change in self._runtime.discovery.watch(EVENT_SOURCES):
            if isinstance(change, Synced):
                for key in unconfirmed:
                    self._leave(key)
                unconfirmed.clear()
            elif change.key.startswith(prefixes):
                unconfirmed.discard(change.key)
                if isinstance(change, Put):
                    if change.key.startswith(attachments):
                        await self._follow_state_agents()
                    self._enter(change.key, change.value)
                else:
                    self._leave(change.key)

    def _enter(self, key: str, value: bytes) -> None:
        try:
            is_own = key.startswith(topic_prefix(self.endpoint, KV_EVENTS_TOPIC))
            record = decode_source(value) if is_own else self._attached_source(value)
        except UNREADABLE as error:
            self._metrics.unreadable.inc()
            logger.warning("malformed event source record %s: %s", key, error)
            return
        worker = record.metadata.worker
        rank = (worker.worker_id, worker.dp_rank)
        before = self._sources.get(rank)
        if before is not None and before.record == record:
            return
        if (
            before is not None
            and before.record is None
            and before.last_id
            and not before.is_partial
            and not self._queries_new
        ):
            self._keys[key] = rank
            before.record = record
            return
        if before is not None:
            self._drop(rank)
        self._keys[key] = rank
        source = self._sources[rank] = _Source(record)
        self._metrics.entered()
        if self._queries_new:
            self._recover_new(rank, source)

    def _attached_source(self, value: bytes) -> EventSource:
        """Return the source of a rank that is attached to a KV state agent, with the attachment's key."""
        attached = decode_attachment(value)
        one = attached.metadata
        metadata = EventSourceMetadata(self.endpoint, one.worker, one.publisher_id, one.recovery_control_target)
        return EventSource(EventScope("endpoint", self.endpoint), ATTACHMENTS_TOPIC, attached.publisher_id, metadata)

    def _leave(self, key: str) -> None:
        rank = self._keys.pop(key, None)
        source = self._sources.get(rank) if rank is not None else None
        if rank is not None and source is not None and source.record is not None and source.record.key == key:
            self._drop(rank)

    def _drop(self, rank: Rank) -> None:
        source = self._sources.pop(rank)
        if source.recovery is not None:
            source.recovery.cancel()
        self._listener.forget(*rank)

    # Recovery

    def _recover_new(self, rank: Rank, source: _Source) -> None:
        first = self._recover(rank, source, None)
        self._tasks.start(self._query_again(rank, source, first), f"second query of {rank[0]:x}.{rank[1]}")

    async def _query_again(self, rank: Rank, source: _Source, first: asyncio.Task[None]) -> None:
        """Query a new source again for the events between its answer and the arrival of the subscription."""
        await asyncio.wait([first])
        last_id = source.last_id
        await asyncio.sleep(SECOND_QUERY_S)
        if self._sources.get(rank) is source and source.recovery is None and source.last_id == last_id:
            self._recover(rank, source, last_id + 1)

    def _recover(self, rank: Rank, source: _Source, start: int | None) -> asyncio.Task[None]:
        name = f"holdings of {rank[0]:x}.{rank[1]}"
        source.recovery = task = self._tasks.start(self._query_until_answered(rank, source, start), name)
        return task

    async def _query_until_answered(self, rank: Rank, source: _Source, start: int | None) -> None:
        backoff = Backoff(QUERY_RETRY_FIRST_S, QUERY_RETRY_MAX_S)
        while True:
            try:
                answer = await self._query(rank, source, start)
                break
            except (DynamoException, TimeoutError, *UNREADABLE) as error:
                self._metrics.unanswered.inc()
                logger.warning(
                    "cannot query worker %x rank %d for KV events: %s; retrying", *rank, error or "timed out"
                )
            start = None
            await asyncio.sleep(backoff.next(random.random()))
        while source.is_held_back:  # noqa: ASYNC110 - short and rare
            await asyncio.sleep(HELD_BACK_S)
        await self._learn(rank, source, answer)
        source.recovery, source.is_partial = None, False
        self._metrics.recovered()
        self._catch_up(rank, source)

    def _catch_up(self, rank: Rank, source: _Source) -> None:
        """Process the events buffered meanwhile."""
        pending, source.pending = source.pending, deque()
        if self._sources.get(rank) is source:
            for kv_event in pending:
                self.receive(kv_event)

    async def _learn(self, rank: Rank, source: _Source, answer: KvSourceAnswer) -> None:
        """Apply an answer, yielding to the event loop at intervals."""
        if answer.dump is not None:
            self._listener.forget(*rank)
            events, last_id = answer.dump.events, answer.dump.last_event_id
        elif answer.events is not None:
            events, last_id = answer.events.events, answer.events.last_event_id
        else:
            return  # No newer events exist; the next event shows whether one is missing.
        is_whole = answer.dump is not None
        for number, kv_event in enumerate(events, 1):
            if is_whole:
                self._listener.apply(kv_event)
            elif kv_event.event.event_id > source.last_id:
                self._apply(source, kv_event)
            if number % EVENTS_PER_TURN == 0:
                await asyncio.sleep(0)
        source.last_id = last_id

    async def _query(self, rank: Rank, source: _Source, start: int | None) -> KvSourceAnswer:
        assert source.record is not None, "only ranks with a source are queried"
        question: dict[str, object] = {
            "worker_id": rank[0],
            "dp_rank": rank[1],
            "start_event_id": start,
            "end_event_id": None,
            "supports_tree_dump_failed": True,
            "kind": "recovery",
        }
        async with asyncio.timeout(self._query_timeout_s):
            return await query_source(self._runtime, source.record.metadata.recovery_target, question)


async def query_source(
    runtime: DistributedRuntime, callee: InstanceAddress, question: dict[str, object]
) -> KvSourceAnswer:
    """Query a source. Raise a `DynamoException`, or a decoding error."""
    target = Target.of(callee)
    receiver = OneAnswer("the source")
    request = Request(f"kv-recovery-{random.getrandbits(64):x}", encode(question, target.codec), target.codec, {}, {})
    plane = runtime.request_plane
    call = plane.send(target, request, receiver, _ignore_end)
    if call is None:
        await plane.connect(target)
        call = plane.send(target, request, receiver, _ignore_end)
        if call is None:
            raise StreamIncomplete(f"the connection to {target.address} closed immediately")
    try:
        item = await receiver.first
    except asyncio.CancelledError:
        call.kill()
        raise
    if item.data is None:
        raise StreamIncomplete(f"unexpected item from the source: {item.event or 'nothing'}")
    answer: KvSourceAnswer = decode(item.data, item.codec, KvSourceAnswer)
    return answer


def _ignore_end(instance_id: int, error: Exception | None) -> None:
    """Ignore the end of a query; the caller handles it."""
