"""KvEventSource: one rank's KV events, published, and told again to a router that missed some (docs/kv-events.md).

    engine ──event──▶ holdings ──▶ event plane ──▶ routers
                         ▲                            │ an id is missing, or the source is new
                         └── worker_kv_query_source_… ┘

The holdings hear of an event before the routers do, so that an answer is never older than what a router has heard.
"""

import asyncio
import logging

from dynamo.core.codec import decode, json_encode
from dynamo.kv_events.held_blocks import KvHoldings
from dynamo.kv_events.jetstream import KvStreamPublisher
from dynamo.kv_events.worker_publishers import KV_EVENTS_TOPIC, KvEventPublisher
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

BLOCKS_PER_TURN = 2048  # About a millisecond; the 16,384 blocks of a large cache are told within sixteen turns.


class KvEventSource:
    """What a rank's cache holds, for those who listen and for those who ask."""

    def __init__(
        self, endpoint: Endpoint, worker_id: int, dp_rank: int = 0, stream: KvStreamPublisher | None = None
    ) -> None:
        """`stream`: keeps the events for routers that begin anew; they are sent there in place of the event plane."""
        self._endpoint = endpoint
        self._stream = stream
        self._worker = WorkerRank(worker_id, dp_rank)
        self.holdings = KvHoldings(worker_id, dp_rank)
        self._events = KvEventPublisher(self._publish, worker_id, self._note)
        self._publisher: Publisher | None = None
        self._serving: Serving | None = None
        self._record: EventSource | None = None
        self._is_listed = False

    async def open(self) -> None:
        """Lets routers find it: first who answers, then who is to be asked. They begin with all that is held by then."""
        endpoint, scope = self._endpoint, EventScope("endpoint", self._endpoint.id)
        runtime = endpoint.runtime
        publisher = self._publisher = await runtime.event_plane.publisher(endpoint.id, KV_EVENTS_TOPIC)
        asked = EndpointId(endpoint.id.namespace, endpoint.id.component, recovery_endpoint(publisher.id))
        self._serving = await runtime.endpoint(str(asked)).serve(self.handle, ServeOptions(is_internal=True))
        metadata = EventSourceMetadata(endpoint.id, self._worker, publisher.id, self._serving.instance.callee())
        self._record = EventSource(scope, KV_EVENTS_TOPIC, publisher.id, metadata)
        await self._list(self._record)

    async def join(self) -> None:
        """Lets routers find it again after `leave`; they begin anew with all that is held by then."""
        if self._serving is not None and self._record is not None:
            await self._serving.register()
            await self._list(self._record)

    def put(self, event: KvEvent, tier: str = "device") -> None:
        """Something changed in the cache. It is sent with the loop's next turn."""
        self._events.put(event, self._worker.dp_rank, tier)

    def flush(self) -> None:
        """Sends what has not been sent."""
        self._events.flush()

    def handle(self, request: Request, reply: Reply) -> None:
        """A router asks. Raises `InvalidArgument` for what is no query."""
        query = decode(request.body, request.codec, KvSourceQuery)
        start = query.start_event_id
        logger.info(
            "rank %d is asked for its KV events: %s",
            self._worker.dp_rank,
            "all" if start is None else f"from {start} on",
        )
        answer = self.holdings.short_answer(query)
        if answer is None:
            self._endpoint.runtime.tasks.start(self._dump(reply), "KV dump")
        else:
            _write(reply, answer)

    async def _dump(self, reply: Reply) -> None:
        """Tells all that is held; between two pieces everyone else has a turn of the loop."""
        pending = self.holdings.begin_dump()
        while True:
            pending.dump.work(BLOCKS_PER_TURN)
            if pending.dump.is_complete:
                break
            await asyncio.sleep(0)
            if reply.is_cancelled:
                return
        _write(reply, self.holdings.told(pending))

    async def leave(self) -> None:
        """Lets no router find it any more; what still happens is sent to those who listen."""
        if self._record is not None and self._is_listed:
            self._is_listed = False
            await self._endpoint.discovery.delete(EVENT_SOURCES, self._record.key)
        if self._serving is not None:
            await self._serving.unregister()

    async def close(self) -> None:
        """Leaves, sends what is left, and ends."""
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

    def _note(self, told: WorkerKvEvent) -> None:
        self.holdings.apply(told)
        if self._stream is not None:
            self._stream.put(told)

    def _publish(self, payload: bytes) -> None:
        """Before it is open nobody listens; the first dump tells what happened until then."""
        if self._publisher is not None and self._stream is None:
            self._publisher.publish(payload)


def _write(reply: Reply, answer: KvSourceAnswer) -> None:
    reply.item(Bare(answer))
    reply.finish()


def recovery_endpoint(publisher_id: int) -> str:
    """The name under which a publisher is asked."""
    return f"worker_kv_query_source_{publisher_id:x}"
