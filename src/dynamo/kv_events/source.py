"""KvEventSource: publisher of one rank's KV events that also answers recovery queries (docs/kv-events.md).

    engine ──event──▶ holdings ──▶ event plane ──▶ routers
                         ▲                            │ an id is missing, or the source is new
                         └── worker_kv_query_source_… ┘

The holdings are updated before an event is published, so that an answer is never older than the events a router
received.
"""

import asyncio
import logging
from collections.abc import Callable

from dynamo.core.codec import decode, json_encode
from dynamo.kv_events.held_blocks import CachedBlocks
from dynamo.kv_events.jetstream import KvStreamPublisher
from dynamo.kv_events.worker_publishers import KV_EVENTS_TOPIC, WorkerKvEventPublisher
from dynamo.protocols.discovery import (
    EVENT_SOURCES,
    EndpointId,
    EventScope,
    EventSource,
    EventSourceMetadata,
    WorkerRank,
)
from dynamo.protocols.kv_events import KvEvent, KvSourceAnswer, KvSourceQuery, WorkerKvEvent
from dynamo.runtime.component import Endpoint, Serving
from dynamo.runtime.event_plane.base import Publisher
from dynamo.runtime.request_plane.base import Bare, Reply, Request
from dynamo.runtime.server import ServeOptions

logger = logging.getLogger(__name__)

BLOCKS_PER_TURN = 2048  # About a millisecond; the 16,384 blocks of a large cache are dumped within sixteen turns.


class KvEventSource:
    """Publish the changes of a rank's cache, and serve its state to routers."""

    def __init__(
        self, endpoint: Endpoint, worker_id: int, dp_rank: int = 0, stream: KvStreamPublisher | None = None
    ) -> None:
        """`stream`: durable storage for the events; they are sent there instead of the event plane."""
        self._endpoint = endpoint
        self._stream = stream
        self._worker = WorkerRank(worker_id, dp_rank)
        self.holdings = CachedBlocks(worker_id, dp_rank)
        self._events = WorkerKvEventPublisher(self._publish, worker_id, self._note)
        self._publisher: Publisher | None = None
        self._serving: Serving | None = None
        self._record: EventSource | None = None
        self._is_listed = False

    async def open(self) -> None:
        """Register: first the query endpoint, then the source record. Routers begin with a full dump."""
        endpoint, scope = self._endpoint, EventScope("endpoint", self._endpoint.id)
        runtime = endpoint.runtime
        publisher = self._publisher = await runtime.event_plane.publisher(endpoint.id, KV_EVENTS_TOPIC)
        query_endpoint = EndpointId(endpoint.id.namespace, endpoint.id.component, recovery_endpoint(publisher.id))
        self._serving = await runtime.endpoint(str(query_endpoint)).serve(self.handle, ServeOptions(is_internal=True))
        metadata = EventSourceMetadata(endpoint.id, self._worker, publisher.id, self._serving.instance.callee())
        self._record = EventSource(scope, KV_EVENTS_TOPIC, publisher.id, metadata)
        await self._list(self._record)

    async def join(self) -> None:
        """Register again after `leave`; routers begin again with a dump of the present state."""
        if self._serving is not None and self._record is not None:
            await self._serving.register()
            await self._list(self._record)

    def put(self, event: KvEvent, tier: str = "device") -> None:
        """Apply and publish a change of the cache. It is sent with the loop's next turn."""
        self._events.put(event, self._worker.dp_rank, tier)

    def flush(self) -> None:
        """Send queued events."""
        self._events.flush()

    def handle(self, request: Request, reply: Reply) -> None:
        """Answer a router's query. Raise `InvalidArgument` for a malformed query."""
        query = decode(request.body, request.codec, KvSourceQuery)
        start = query.start_event_id
        logger.info(
            "KV events of rank %d requested: %s",
            self._worker.dp_rank,
            "all" if start is None else f"from {start} on",
        )
        answer = self.holdings.short_answer(query)
        if answer is None:
            self._endpoint.runtime.tasks.start(send_dump(self.holdings, reply), "KV dump")
        else:
            _write(reply, answer)

    async def leave(self) -> None:
        """Leave the registry; later events are still sent to current subscribers."""
        if self._record is not None and self._is_listed:
            self._is_listed = False
            await self._endpoint.discovery.delete(EVENT_SOURCES, self._record.key)
        if self._serving is not None:
            await self._serving.unregister()

    async def close(self) -> None:
        """Leave the registry, send queued events, and stop."""
        await self.leave()
        self.flush()
        serving, self._serving = self._serving, None
        if serving is not None:
            await serving.close(0.0)
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            await publisher.close()

    async def _list(self, record: EventSource) -> None:
        self._is_listed = True
        await self._endpoint.discovery.put(EVENT_SOURCES, record.key, json_encode(record))

    def _note(self, kv_event: WorkerKvEvent) -> None:
        self.holdings.apply(kv_event)
        if self._stream is not None:
            self._stream.put(kv_event)

    def _publish(self, payload: bytes) -> None:
        """Publish a payload. Before the publisher is open there are no subscribers; the first dump covers them."""
        if self._publisher is not None and self._stream is None:
            self._publisher.publish(payload)


async def send_dump(
    holdings: CachedBlocks, reply: Reply, in_form: Callable[[KvSourceAnswer], object] | None = None
) -> None:
    """Send a dump of all blocks, yielding to the event loop between two pieces.

    `in_form` returns the answer in the form of the query; None: as it is.
    """
    pending = holdings.begin_dump()
    while True:
        pending.dump.work(BLOCKS_PER_TURN)
        if pending.dump.is_complete:
            break
        await asyncio.sleep(0)
        if reply.is_cancelled:
            return
    answer = holdings.complete_dump(pending)
    _write(reply, answer if in_form is None else in_form(answer))


def _write(reply: Reply, answer: object) -> None:
    reply.item(Bare(answer))
    reply.finish()


def recovery_endpoint(publisher_id: int) -> str:
    """Return the name of a publisher's query endpoint."""
    return f"worker_kv_query_source_{publisher_id:x}"
