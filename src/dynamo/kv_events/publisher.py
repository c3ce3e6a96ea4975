"""KvEventPublisher: upstream's API for engines to publish the stored and removed blocks of their KV cache."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import msgspec

from dynamo.core.config import read_bool, setting
from dynamo.core.errors import InvalidArgument
from dynamo.core.loops import LoopCaller
from dynamo.core.tasks import TaskOwner
from dynamo.kv_events import worker_publishers as publishers
from dynamo.kv_events.jetstream import KvStreamPublisher
from dynamo.kv_events.relay import KvEventRelay
from dynamo.kv_events.source import KvEventSource
from dynamo.protocols.kv_events import KvEvent, Removed, Stored, StoredBlock
from dynamo.runtime.component import Endpoint
from dynamo.runtime.event_plane.base import Publisher
from dynamo.text.multimodal.routing_hashes import hashes_of, padded
from dynamo.tokens.hashing import U64

logger = logging.getLogger(__name__)

EARLY_MAX = 1024  # Messages before the publisher is registered, which takes milliseconds; more are dropped.


class StoredArguments(msgspec.Struct, tag="stored", kw_only=True, forbid_unknown_fields=True):
    """Arguments of `publish_stored` as an element of a batch; sequences may be arrays."""

    token_ids: Any
    num_block_tokens: Any
    block_hashes: Any
    parent_hash: int | None = None
    block_mm_infos: list[Any] | None = None
    lora_name: str | None = None
    is_eagle: bool | None = None
    cache_salt: str | None = None


class RemovedArguments(msgspec.Struct, tag="removed", forbid_unknown_fields=True):
    """Arguments of `publish_removed` as an element of a batch."""

    block_hashes: Any


class LatePublisher:
    """Publisher of the event plane that accepts messages before it is registered. For the loop's thread."""

    def __init__(self, endpoint: Endpoint, topic: str) -> None:
        self._early: list[bytes] = []
        self._publisher: Publisher | None = None
        self.dropped = 0
        self._opening = endpoint.runtime.tasks.start(self._open(endpoint, topic), f"publish {topic}")

    def publish(self, payload: bytes) -> None:
        """Send a message, immediately or once registered."""
        if self._publisher is not None:
            self._publisher.publish(payload)
        elif len(self._early) < EARLY_MAX:
            self._early.append(payload)
        else:
            self.dropped += 1

    async def opened(self) -> None:
        """Wait until subscribers can find the publisher."""
        await asyncio.shield(self._opening)

    async def close(self) -> None:
        """Leave the registry. Later messages are not sent."""
        self._opening.cancel()
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            await publisher.close()

    async def _open(self, endpoint: Endpoint, topic: str) -> None:
        publisher = await endpoint.runtime.event_plane.publisher(endpoint.id, topic)
        self._publisher = publisher
        early, self._early = self._early, []
        for payload in early:
            publisher.publish(payload)
        if self.dropped:
            logger.warning("dropped %d messages of %s that came before its registration", self.dropped, topic)


class EventSink(Protocol):
    """Destination of a publisher's events."""

    def put(self, event: KvEvent, dp_rank: int, tier: str) -> None:
        """Send an event of a rank. For the loop's thread."""

    async def close(self) -> None:
        """Send what is left and leave the registry."""


class LiveEvents:
    """Events without recovery, published on the event plane or sent to a durable stream."""

    def __init__(self, endpoint: Endpoint, worker_id: int, stream: KvStreamPublisher | None = None) -> None:
        self._late = None if stream is not None else LatePublisher(endpoint, publishers.KV_EVENTS_TOPIC)
        publish = _unsent if self._late is None else self._late.publish
        self._events = publishers.WorkerKvEventPublisher(publish, worker_id, None if stream is None else stream.put)

    def put(self, event: KvEvent, dp_rank: int, tier: str) -> None:
        self._events.put(event, dp_rank, tier)

    async def close(self) -> None:
        self._events.flush()
        if self._late is not None:
            await self._late.close()


class SourcedEvents:
    """Events that a router can recover after a loss: one source per rank (`kv_events.source`)."""

    def __init__(
        self, endpoint: Endpoint, worker_id: int, dp_rank: int, stream: KvStreamPublisher | None = None
    ) -> None:
        self._endpoint = endpoint
        self._stream = stream
        self._worker_id = worker_id
        self._sources: dict[int, tuple[KvEventSource, asyncio.Task[None]]] = {}
        self._source(dp_rank)  # Routers also query a rank without events.

    def put(self, event: KvEvent, dp_rank: int, tier: str) -> None:
        self._source(dp_rank).put(event, tier)

    async def close(self) -> None:
        for source, opening in self._sources.values():
            opening.cancel()
            await source.close()

    def _source(self, dp_rank: int) -> KvEventSource:
        known = self._sources.get(dp_rank)
        if known is None:
            source = KvEventSource(self._endpoint, self._worker_id, dp_rank, self._stream)
            opening = self._endpoint.runtime.tasks.start(source.open(), f"KV events of rank {dp_rank}")
            known = self._sources[dp_rank] = source, opening
        return known[0]


def started_stream(endpoint: Endpoint) -> KvStreamPublisher:
    """Return the publisher to the endpoint's durable stream. Raise `ConfigError` if the client library is missing."""
    runtime = endpoint.runtime
    stream = KvStreamPublisher(runtime.nats_connection("kv_events"), runtime.metrics, endpoint.id)
    stream.start()
    return stream


class KvEventPublisher:
    """Publisher of the blocks that one rank's cache stores and evicts. May be called from any thread.

    With `enable_local_indexer` routers can recover missed events; with `zmq_endpoint` this also relays events that an
    engine publishes there (`kv_events.relay`). With `image_token_id` and `video_token_id` media placeholders are
    replaced by the routing tokens (`text.multimodal.routing_hashes`). `durable_kv_events`, an extension whose default
    is `DYN_DURABLE_KV_EVENTS`, sends the events to a durable stream (`kv_events.jetstream`). Raises `InvalidArgument`
    for a block size below 1 and for an unsupported argument.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        worker_id: int | None = None,
        kv_block_size: int = 0,
        dp_rank: int = 0,
        enable_local_indexer: bool = False,
        zmq_endpoint: str | None = None,
        zmq_topic: str | None = None,
        batching_timeout_ms: int | None = None,
        image_token_id: int | None = None,
        kv_state_endpoint: str | None = None,
        video_token_id: int | None = None,
        *,
        durable_kv_events: bool | None = None,
    ) -> None:
        if kv_block_size < 1:
            raise InvalidArgument(f"kv_block_size cannot be {kv_block_size}: expected 1 or more", param="kv_block_size")
        for name, value in {
            "batching_timeout_ms": batching_timeout_ms or None,
            "kv_state_endpoint": kv_state_endpoint,
        }.items():
            if value is not None:
                raise InvalidArgument(f"KvEventPublisher: {name} is not supported by this release", param=name)
        self._placeholders = frozenset(one for one in (image_token_id, video_token_id) if one is not None)
        worker = endpoint.connection_id() if worker_id is None else worker_id
        if durable_kv_events is None:
            durable_kv_events = setting("DYN_DURABLE_KV_EVENTS", False, read_bool)
        self._stream = started_stream(endpoint) if durable_kv_events else None
        events: EventSink
        if enable_local_indexer:
            events = SourcedEvents(endpoint, worker, dp_rank, self._stream)
        else:
            events = LiveEvents(endpoint, worker, self._stream)
        self._begin(events, endpoint.runtime.tasks, kv_block_size, dp_rank)
        if zmq_endpoint is not None:
            self.relay(zmq_endpoint, zmq_topic or "")

    @classmethod
    def into(cls, events: "EventSink", tasks: TaskOwner, kv_block_size: int, dp_rank: int) -> Self:
        """Return a publisher whose events are put into a sink; not in upstream."""
        publisher = cls.__new__(cls)
        publisher._placeholders = frozenset()
        publisher._stream = None
        publisher._begin(events, tasks, kv_block_size, dp_rank)
        return publisher

    def _begin(self, events: "EventSink", tasks: TaskOwner, kv_block_size: int, dp_rank: int) -> None:
        self._events = events
        self._tasks = tasks
        self._block_size = kv_block_size
        self._dp_rank = dp_rank
        self._thread = LoopCaller()
        self._is_closed = False
        self.closing: asyncio.Task[None] | None = None
        """Task begun by `shutdown`; ends when all events are sent and the publisher has left the registry."""
        self._relaying: asyncio.Task[None] | None = None

    def relay(self, zmq_endpoint: str, zmq_topic: str = "") -> None:
        """Publish the events that an engine publishes at a ZMQ address; not in upstream."""
        relay = KvEventRelay(
            zmq_endpoint, zmq_topic, block_tokens=self._block_size, dp_rank=self._dp_rank,
            make_stored=self._stored, put=self._events.put,
        )  # fmt: skip
        self._relaying = self._tasks.start(relay.run(), f"relay {zmq_endpoint}")

    def publish_stored(
        self,
        token_ids: Sequence[int],
        num_block_tokens: Sequence[int],
        block_hashes: Sequence[int],
        parent_hash: int | None = None,
        block_mm_infos: Sequence[Any] | None = None,
        lora_name: str | None = None,
        is_eagle: bool | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Publish consecutive stored blocks under the engine's own hashes (signed or unsigned)."""
        event = self._stored(
            token_ids, num_block_tokens, block_hashes, parent_hash,
            block_mm_infos=block_mm_infos, lora_name=lora_name, is_eagle=is_eagle, cache_salt=cache_salt,
        )  # fmt: skip
        self._put([] if event is None else [event])

    def publish_removed(self, block_hashes: Sequence[int]) -> None:
        """Publish evicted blocks."""
        self._put([Removed([unsigned(one) for one in block_hashes])])

    def publish_batch(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Publish several events in order; all are validated before the first is published.

        Each is `{"type": "stored" | "removed", …}` with the arguments of `publish_stored` or `publish_removed`.
        """
        made: list[KvEvent] = []
        try:
            for event in msgspec.convert(events, list[StoredArguments | RemovedArguments]):
                if isinstance(event, StoredArguments):
                    stored = self._stored(**msgspec.structs.asdict(event))
                    made += [] if stored is None else [stored]
                else:
                    made.append(Removed([unsigned(one) for one in event.block_hashes]))
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"invalid KV event batch: {error}") from None
        self._put(made)

    def shutdown(self) -> None:
        """Leave the registry; further events are not sent."""
        self._thread.run(self._shut)

    def _shut(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._relaying is not None:
            self._relaying.cancel()
        self.closing = self._tasks.start(self._close(), "close KV events")

    async def _close(self) -> None:
        await self._events.close()
        if self._stream is not None:
            await self._stream.close()

    def _put(self, events: Sequence[KvEvent]) -> None:
        def put() -> None:
            if not self._is_closed:
                for event in events:
                    self._events.put(event, self._dp_rank, "device")

        self._thread.run(put)

    def _stored(
        self,
        token_ids: Sequence[int],
        num_block_tokens: Sequence[int],
        block_hashes: Sequence[int],
        parent_hash: int | None = None,
        *,
        block_mm_infos: Sequence[Any] | None = None,
        lora_name: str | None = None,
        is_eagle: bool | None = None,
        cache_salt: str | None = None,
    ) -> Stored | None:
        """Return the event of stored blocks; None if none of them is complete."""
        if len(num_block_tokens) != len(block_hashes):
            raise InvalidArgument(f"{len(num_block_tokens)} block sizes for {len(block_hashes)} block hashes")
        if sum(num_block_tokens) > len(token_ids):
            raise InvalidArgument(f"{len(token_ids)} tokens: the blocks need {sum(num_block_tokens)}")
        whole = 0
        while whole < len(num_block_tokens) and num_block_tokens[whole] == self._block_size:
            whole += 1
        if whole < len(num_block_tokens):
            logger.warning(
                "KV blocks not published: a block has %d tokens, expected %d", num_block_tokens[whole], self._block_size
            )
        ahead = 1 if is_eagle else 0  # The token after the last block is part of its hash.
        shown = block_mm_infos
        if block_mm_infos is not None and self._placeholders:
            token_ids, block_mm_infos = padded(token_ids, self._block_size, block_mm_infos, self._placeholders)
        hashes = compute_block_hash_for_seq(
            token_ids[: whole * self._block_size + ahead],
            self._block_size,
            block_mm_infos,
            lora_name,
            is_eagle,
            cache_salt,
        )
        whole = min(whole, len(hashes))
        blocks = [StoredBlock(unsigned(one), tokens) for one, tokens in zip(block_hashes[:whole], hashes, strict=True)]
        for block, info in zip(blocks, shown or (), strict=False):
            block.mm_extra_info = info
        return Stored(None if parent_hash is None else unsigned(parent_hash), None, blocks) if blocks else None


def compute_block_hash_for_seq(
    tokens: Sequence[int],
    kv_block_size: int,
    block_mm_infos: Sequence[Any] | None = None,
    lora_name: str | None = None,
    is_eagle: bool | None = None,
    cache_namespace: str | None = None,
) -> list[int]:
    """Return the hash of each complete block's tokens (`text.multimodal.routing_hashes`). Raise `InvalidArgument`."""
    return hashes_of(
        tokens,
        kv_block_size,
        block_mm_infos=block_mm_infos,
        lora_name=lora_name,
        cache_salt=cache_namespace,
        is_eagle=bool(is_eagle),
    )


def _unsent(payload: bytes) -> None:
    """Discard a payload: with a durable stream, events are not published on the event plane."""


def unsigned(block_hash: int) -> int:
    """Convert an engine's hash to the wire format, an unsigned 64-bit number."""
    return int(block_hash) & U64
