"""KvView: a router's picture of what its workers hold, kept whole (docs/kv-events.md).

    v1/event_sources ──new──▶ ask for all ──▶ dump ──▶ index ◀── events in order
                                  ▲                                 │ an id is missing
                                  └───────── ask from there on ◀────┘

Each rank's events are numbered from 1. A gap is asked for from the last event heard on; while the answer is on its way,
what comes is kept, and applied behind it. A rank whose source does not answer is known by its live events alone, and
asked again.
"""

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from dynamo.core.backoff import Backoff
from dynamo.core.codec import UNREADABLE, decode, encode, json_decoder, msgpack_decoder
from dynamo.core.errors import DynamoException, StreamIncomplete
from dynamo.core.metrics import MetricsRegistry
from dynamo.core.tasks import TaskOwner
from dynamo.kv_events.worker_publishers import KV_EVENTS_TOPIC
from dynamo.protocols.discovery import EVENT_SOURCES, Callee, EndpointId, EventSource, topic_prefix
from dynamo.protocols.kv_events import KvSourceAnswer, WorkerKvEvent
from dynamo.runtime.discovery.base import Put, Synced
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.base import Event, PublisherGone, Subscriber
from dynamo.runtime.request_plane.base import Request, Target
from dynamo.runtime.single_response import OneAnswer

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 10.0  # A dump of the largest cache takes a second to make and send.
ASK_FIRST_S, ASK_MAX_S = 0.2, 10.0
HELD_BACK_S = 0.01
PENDING_MAX = 4096  # Events kept while an answer is on its way: beyond that a new dump costs less.
EVENTS_PER_TURN = 64  # Events of a dump that are applied before others have a turn: about a millisecond.

decode_source = json_decoder(EventSource).decode
decode_events = msgpack_decoder(list[WorkerKvEvent]).decode

Rank = tuple[int, int]


class Listener(Protocol):
    """Who is told what workers hold: a router's machine."""

    def apply(self, told: WorkerKvEvent) -> bool:
        """A worker's cache changed."""

    def forget(self, worker_id: int, dp_rank: int) -> None:
        """A rank's holdings are unknown; what it holds is told anew."""


class _Source:
    """One rank, and how far it was heard."""

    def __init__(self, record: EventSource | None) -> None:
        self.record = record
        self.last_id = 0
        self.is_partial = False
        """Whether something was missed that nobody could be asked for."""
        self.is_held_back = False
        """Whether what comes has to wait: it is being brought to what was kept, or told to somebody."""
        self.pending: deque[WorkerKvEvent] = deque()
        self.recovery: asyncio.Task[None] | None = None


class KvView:
    """Follows the KV events of one endpoint's workers."""

    def __init__(
        self, runtime: DistributedRuntime, endpoint: EndpointId, listener: Listener, *, is_durable: bool = False
    ) -> None:
        """`is_durable`: events are kept elsewhere (`llm.kv_durable`), so that who is new need not be asked for all."""
        self.endpoint = endpoint
        self._asks_new = not is_durable
        self._runtime = runtime
        self._listener = listener
        self._tasks = TaskOwner(f"kv view of {endpoint}")
        self._sources: dict[Rank, _Source] = {}
        self._keys: dict[str, Rank] = {}
        self._subscriber: Subscriber | None = None
        self._metrics = ViewMetrics(runtime.metrics)

    @property
    def is_sound(self) -> bool:
        """False while one of its watches has died and is being restarted."""
        return self._tasks.is_sound

    @property
    def has_sources(self) -> bool:
        """Whether anybody tells what it holds."""
        return bool(self._sources)

    @property
    def is_whole(self) -> bool:
        """Whether no rank's holdings are being asked for."""
        return all(source.recovery is None and not source.is_held_back for source in self._sources.values())

    async def start(self) -> None:
        """Begins to listen, then to ask: no event can fall between."""
        self._subscriber = await self._runtime.event_plane.subscriber(self.endpoint, KV_EVENTS_TOPIC)
        self._tasks.supervise(self._listen, "events")
        self._tasks.supervise(self._watch, "sources")

    async def close(self) -> None:
        """Ends."""
        await self._tasks.cancel_and_wait()
        if self._subscriber is not None:
            await self._subscriber.close()

    def drop_worker(self, worker_id: int) -> None:
        """A worker left: what it said is void."""
        for rank in [rank for rank in self._sources if rank[0] == worker_id]:
            self._drop(rank)

    # What is kept elsewhere.

    def heard(self) -> dict[Rank, int]:
        """The last event of each rank that was heard of."""
        return {rank: source.last_id for rank, source in self._sources.items() if source.last_id}

    async def adopt(self, events: Sequence[WorkerKvEvent]) -> None:
        """Takes what somebody kept of ranks that were heard less of; an event's number is its rank's last."""
        by_rank: dict[Rank, list[WorkerKvEvent]] = {}
        for told in events:
            by_rank.setdefault((told.worker_id, told.event.dp_rank), []).append(told)
        for rank, kept in by_rank.items():
            source = self._sources.get(rank)
            if source is None:
                source = self._sources[rank] = _Source(None)
            last_id = max(told.event.event_id for told in kept)
            if source.recovery is not None or last_id <= source.last_id:
                continue
            source.is_held_back = True
            self._listener.forget(*rank)
            for number, told in enumerate(kept, 1):
                if self._sources.get(rank) is not source:
                    break  # The rank left.
                self._listener.apply(told)
                if number % EVENTS_PER_TURN == 0:
                    await asyncio.sleep(0)
            source.last_id, source.is_partial, source.is_held_back = last_id, False, False
            self._catch_up(rank, source)

    @contextlib.contextmanager
    def standing_still(self, worker_id: int, dp_rank: int) -> Iterator[Callable[[], int | None]]:
        """Holds a rank's events back, so that what is known of it can be told in pieces.

        What is yielded says the number of its last event; None for a rank that is unknown, left, or is being asked.
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

    def ask_silent(self) -> None:
        """All that was kept was told: who is not known by it is asked, now and when it comes."""
        self._asks_new = True
        for rank, source in self._sources.items():
            if source.record is not None and not source.last_id and source.recovery is None:
                self._recover(rank, source, None)

    def forget_strangers(self, workers: Collection[int]) -> None:
        """Forgets the ranks of workers that are not among these and cannot be asked."""
        for rank in [rank for rank, one in self._sources.items() if one.record is None and rank[0] not in workers]:
            self._drop(rank)

    # What is heard.

    async def _listen(self) -> None:
        assert self._subscriber is not None
        async for heard in self._subscriber:
            if isinstance(heard, Event):
                self._hear(heard)
            elif isinstance(heard, PublisherGone):
                logger.debug("publisher %x of %s is gone", heard.publisher_id, self.endpoint)

    def _hear(self, event: Event) -> None:
        try:
            events = decode_events(event.payload)
        except ValueError as error:
            self._metrics.unreadable.inc()
            logger.warning("KV events of %s cannot be read: %s", self.endpoint, error)
            return
        for told in events:
            self.hear(told)

    def hear(self, told: WorkerKvEvent) -> None:
        """One event, in any order and however often."""
        rank = (told.worker_id, told.event.dp_rank)
        source = self._sources.get(rank)
        if source is None:
            source = self._sources[rank] = _Source(None)
        if source.recovery is not None or source.is_held_back:
            if len(source.pending) < PENDING_MAX:
                source.pending.append(told)
            return
        self._take(rank, source, told)

    def _take(self, rank: Rank, source: _Source, told: WorkerKvEvent) -> None:
        number = told.event.event_id
        if number <= source.last_id:
            return
        if number > source.last_id + 1:
            self._metrics.gaps.inc()
            if source.record is not None:
                source.pending.append(told)
                self._recover(rank, source, source.last_id + 1 if source.last_id else None)
                return
            source.is_partial = True
            if source.last_id:
                self._listener.forget(*rank)  # Nobody can be asked what was missed.
        self._apply(source, told)

    def _apply(self, source: _Source, told: WorkerKvEvent) -> None:
        source.last_id = max(source.last_id, told.event.event_id)
        self._metrics.events.labels(
            event_type=kind_of(told), status="ok" if self._listener.apply(told) else "missed"
        ).inc()

    # Who can be asked.

    async def _watch(self) -> None:
        prefix = topic_prefix(self.endpoint, KV_EVENTS_TOPIC)
        unheard = set(self._keys)
        async for change in self._runtime.discovery.watch(EVENT_SOURCES):
            if isinstance(change, Synced):
                for key in unheard:
                    self._leave(key)
                unheard.clear()
            elif change.key.startswith(prefix):
                unheard.discard(change.key)
                if isinstance(change, Put):
                    self._enter(change.key, change.value)
                else:
                    self._leave(change.key)

    def _enter(self, key: str, value: bytes) -> None:
        try:
            record = decode_source(value)
        except UNREADABLE as error:
            self._metrics.unreadable.inc()
            logger.warning("the event source %s cannot be read: %s", key, error)
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
            and not self._asks_new
        ):
            self._keys[key] = rank
            before.record = record
            return
        if before is not None:
            self._drop(rank)
        self._keys[key] = rank
        source = self._sources[rank] = _Source(record)
        if self._asks_new:
            self._recover(rank, source, None)

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

    # Asking.

    def _recover(self, rank: Rank, source: _Source, start: int | None) -> None:
        name = f"holdings of {rank[0]:x}.{rank[1]}"
        source.recovery = self._tasks.start(self._ask_until_answered(rank, source, start), name)

    async def _ask_until_answered(self, rank: Rank, source: _Source, start: int | None) -> None:
        backoff = Backoff(ASK_FIRST_S, ASK_MAX_S)
        while True:
            try:
                answer = await self._ask(rank, source, start)
                break
            except (DynamoException, TimeoutError, *UNREADABLE) as error:
                self._metrics.unanswered.inc()
                logger.warning("worker %x rank %d does not say what it holds: %s", *rank, error or "no answer in time")
            start = None
            await asyncio.sleep(backoff.next(random.random()))
        while source.is_held_back:  # noqa: ASYNC110 - a moment, and seldom
            await asyncio.sleep(HELD_BACK_S)
        await self._learn(rank, source, answer)
        source.recovery, source.is_partial = None, False
        self._metrics.recoveries.inc()
        self._catch_up(rank, source)

    def _catch_up(self, rank: Rank, source: _Source) -> None:
        """Takes what came meanwhile."""
        pending, source.pending = source.pending, deque()
        if self._sources.get(rank) is source:
            for told in pending:
                self.hear(told)

    async def _learn(self, rank: Rank, source: _Source, answer: KvSourceAnswer) -> None:
        """Applies an answer, with a turn for others now and then."""
        if answer.dump is not None:
            self._listener.forget(*rank)
            events, last_id = answer.dump.events, answer.dump.last_event_id
        elif answer.events is not None:
            events, last_id = answer.events.events, answer.events.last_event_id
        else:
            return  # Nothing newer has happened: what comes next tells whether something is missing.
        is_whole = answer.dump is not None
        for number, told in enumerate(events, 1):
            if is_whole:
                self._listener.apply(told)
            elif told.event.event_id > source.last_id:
                self._apply(source, told)
            if number % EVENTS_PER_TURN == 0:
                await asyncio.sleep(0)
        source.last_id = last_id

    async def _ask(self, rank: Rank, source: _Source, start: int | None) -> KvSourceAnswer:
        assert source.record is not None, "only who has a source is asked"
        question: dict[str, object] = {
            "worker_id": rank[0],
            "dp_rank": rank[1],
            "start_event_id": start,
            "end_event_id": None,
            "supports_tree_dump_failed": True,
            "kind": "recovery",
        }
        async with asyncio.timeout(ASK_TIMEOUT_S):
            return await ask(self._runtime, source.record.metadata.recovery_target, question)


class ViewMetrics:
    """What was heard, and what had to be asked for."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self.events = registry.counter(
            "dynamo_component_kv_cache_events_applied", "KV events applied", ("event_type", "status")
        )
        prefix = "dynamo_router_kv_"
        self.gaps = registry.counter(
            prefix + "event_gaps_total", "Times that an event's number was not the next"
        ).labels()
        self.recoveries = registry.counter(
            prefix + "recoveries_total", "Times that a rank's holdings were learnt anew"
        ).labels()
        self.unanswered = registry.counter(
            prefix + "recovery_failures_total", "Questions about holdings without answer"
        ).labels()
        self.unreadable = registry.counter(
            prefix + "unreadable_events_total", "Messages that could not be read"
        ).labels()


async def ask(runtime: DistributedRuntime, callee: Callee, question: dict[str, object]) -> KvSourceAnswer:
    """Asks a source what it holds. Raises a `DynamoException`, or what decoding raises."""
    target = Target.of(callee)
    receiver = OneAnswer("the source")
    request = Request(f"kv-recovery-{random.getrandbits(64):x}", encode(question, target.codec), target.codec, {}, {})
    plane = runtime.request_plane
    call = plane.send(target, request, receiver, _nobody)
    if call is None:
        await plane.connect(target)
        call = plane.send(target, request, receiver, _nobody)
        if call is None:
            raise StreamIncomplete(f"the connection to {target.address} broke at once")
    try:
        item = await receiver.first
    except asyncio.CancelledError:
        call.kill()
        raise
    if item.data is None:
        raise StreamIncomplete(f"the source answered {item.event or 'nothing'}")
    answer: KvSourceAnswer = decode(item.data, item.codec, KvSourceAnswer)
    return answer


def _nobody(instance_id: int, error: Exception | None) -> None:
    """How a question ends is seen by who asked it."""


def kind_of(told: WorkerKvEvent) -> str:
    """The `event_type` label of an event."""
    data = told.event.data
    return "cleared" if isinstance(data, str) else "stored" if data.stored is not None else "removed"
