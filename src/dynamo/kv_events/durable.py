"""DurableEvents: a router's consumer of the durable KV event stream, and its snapshots (docs/durable-kv-events.md).

    begin     create a consumer, then load the snapshot, then read every message left in the stream
    follow    apply a batch, then acknowledge it
    condense  lock ▸ dump ▸ upload ▸ commit ▸ sweep ▸ purge ▸ unlock, while the stream is followed

A router may be killed between any two of these: a snapshot records the last event of each rank, so that messages which
it covers may be delivered again, and messages are purged only when the snapshot that covers them is durable and every
router's consumer has acknowledged them. If an event is missing nevertheless, its worker is queried.
"""

import asyncio
import contextlib
import itertools
import logging
import random
import time
from typing import TYPE_CHECKING, Any

from dynamo.core.backoff import Backoff
from dynamo.core.codec import UNREADABLE, json_decoder, json_encode
from dynamo.core.errors import DynamoException
from dynamo.core.tasks import TaskOwner
from dynamo.kv_events.jetstream import STREAM_BYTES_MAX, STREAM_MESSAGES_MAX, ensure_stream, stream_name
from dynamo.kv_events.snapshots import CHUNK_BYTES, Lock, ObjectInfo, SnapshotStore
from dynamo.kv_events.subscriber import KvView
from dynamo.kv_router import events
from dynamo.kv_router.index import KvIndex
from dynamo.protocols.discovery import INSTANCES, EndpointId
from dynamo.protocols.kv_events import WorkerKvEvent
from dynamo.runtime.distributed import DistributedRuntime

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext
    from nats.js.client import JetStreamContext as PullContext

logger = logging.getLogger(__name__)

KV_ROUTERS = "v1/kv_routers"
"""Registry of routers with a consumer, used to find the consumers of routers that are gone."""

BATCH_MAX = 512
EVENTS_PER_TURN = 64  # Events applied before yielding to the event loop.
FETCH_S = 0.5
CHECK_S = 1.0
ACK_WAIT_S = 30.0
INACTIVE_S = 60.0  # As upstream's dequeue timeout: the server deletes the consumer of an absent router after this time.
REQUEST_TIMEOUT_S = 5.0
UPLOAD_SHUTDOWN_S = 5.0
DUMP_S, DUMP_AGAIN_S = 60.0, 0.2
SLICE_S = 0.002  # Dump time before yielding to the event loop.
CONSUMERS_PAGE = 256  # Consumers per page of the server's list.
RETRY_FIRST_S, RETRY_MAX_S = 0.2, 5.0

_numbers = itertools.count()

decode_event = json_decoder(WorkerKvEvent).decode


class Changed(DynamoException):
    """The index changed during a dump."""


class DurableEvents:
    """Follow the event stream of a component, and keep it short."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        endpoint: EndpointId,
        view: KvView,
        index: KvIndex,
        *,
        threshold: int,
        resets: bool = False,
        name: str | None = None,
    ) -> None:
        """`name`: of the consumer; the instance id, numbered if a process has several. Raises `ConfigError`."""
        number = next(_numbers)
        self.name = name or (f"{runtime.instance_id:x}-{number}" if number else f"{runtime.instance_id:x}")
        self._runtime = runtime
        self._endpoint = endpoint
        self._stream = stream_name(endpoint)
        self._view = view
        self._index = index
        self._threshold = threshold
        self._resets = resets
        self._connection = runtime.nats_connection("kv_stream")
        self._tasks = TaskOwner(f"durable kv events of {endpoint}")
        self._applied = 0
        """Sequence number of the last applied message of the stream."""
        self._upload: asyncio.Task[None] | None = None
        self._is_caught_up = asyncio.Event()
        prefix = "dynamo_router_kv_stream_"
        registry = runtime.metrics
        self._messages_applied = registry.counter(prefix + "messages_total", "Applied messages of the stream").labels()
        self._unreadable = registry.counter(prefix + "unreadable_total", "Malformed messages of the stream").labels()
        self._uploads = registry.counter(prefix + "snapshots_total", "Snapshot uploads by outcome", ("status",))

    @property
    def is_sound(self) -> bool:
        """False while the stream is not followed because of a crash."""
        return self._tasks.is_sound

    def start(self) -> None:
        """Start following the stream, as soon as the server is available."""
        self._connection.begin()
        self._tasks.supervise(self._run, "stream")

    async def caught_up(self) -> None:
        """Wait until all messages that were in the stream at the start are applied."""
        await self._is_caught_up.wait()

    async def close(self) -> None:
        """Wait briefly for an upload in progress, then cancel it, and delete the consumer."""
        upload = self._upload
        if upload is not None and not upload.done():
            logger.info("waiting for a snapshot upload to finish")
            await asyncio.wait({upload}, timeout=UPLOAD_SHUTDOWN_S)
        await self._tasks.cancel_and_wait()
        with contextlib.suppress(*_failures()):
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await self._context().delete_consumer(self._stream, self.name)
        await self._runtime.discovery.delete(KV_ROUTERS, self._key(self.name))
        await self._connection.close()

    # Stream

    async def _run(self) -> None:
        backoff = Backoff(RETRY_FIRST_S, RETRY_MAX_S)
        while True:
            began = time.monotonic()
            try:
                await self._connection.wait_up()
                await self._begin()
                await self._follow()
            except _failures() as error:
                logger.warning("failed to follow stream %s: %s; retrying", self._stream, reason(error))
            if time.monotonic() - began > RETRY_MAX_S:
                backoff.reset()
            await asyncio.sleep(backoff.next(random.random()))

    async def _begin(self) -> None:
        """Create the consumer, which prevents the purge of unread messages, then load the snapshot of purged ones."""
        context = self._context()
        store = SnapshotStore(context, self._endpoint)
        if self._resets:
            await store.drop()
        await ensure_stream(context, self._endpoint)
        if self._resets:
            await context.purge_stream(self._stream)
            logger.info("reset stream %s and its snapshot", self._stream)
            self._resets = False
        await store.open()
        await self._runtime.discovery.put(KV_ROUTERS, self._key(self.name), json_encode({"consumer": self.name}))
        await self._make_consumer(context)
        kept = await store.read()
        await self._view.adopt(kept)
        await self._drop_orphans(context)

    async def _make_consumer(self, context: "JetStreamContext") -> None:
        from nats.js import api
        from nats.js.errors import NotFoundError

        try:
            await context.consumer_info(self._stream, self.name)
        except NotFoundError:
            config = api.ConsumerConfig(
                durable_name=self.name,
                deliver_policy=api.DeliverPolicy.ALL,
                ack_policy=api.AckPolicy.ALL,
                ack_wait=ACK_WAIT_S,
                max_ack_pending=-1,
                inactive_threshold=INACTIVE_S,
            )
            await context.add_consumer(self._stream, config)

    async def _follow(self) -> None:
        """Apply and acknowledge messages, and check at intervals whether the stream has become too long."""
        context = self._context()
        pulled = await context.pull_subscribe_bind(consumer=self.name, stream=self._stream)
        check_at = time.monotonic() + CHECK_S
        try:
            while True:
                batch = await self._fetch(pulled)
                if batch:
                    await self._take(batch)
                    await batch[-1].ack()
                if not self._is_caught_up.is_set() and (not batch or batch[-1].metadata.num_pending == 0):
                    self._view.query_silent_ranks()
                    self._is_caught_up.set()
                if time.monotonic() >= check_at:
                    check_at = time.monotonic() + CHECK_S + random.uniform(-0.1, 0.1)
                    await self._check(context)
        finally:
            with contextlib.suppress(*_failures()):
                await pulled.unsubscribe()

    async def _fetch(self, pulled: "PullContext.PullSubscription") -> list["Msg"]:
        try:
            return await pulled.fetch(BATCH_MAX, timeout=FETCH_S)
        except TimeoutError:
            return []

    async def _take(self, batch: list["Msg"]) -> None:
        for number, message in enumerate(batch, 1):
            try:
                kv_event = decode_event(message.data)
            except UNREADABLE as error:
                self._unreadable.inc()
                logger.warning("malformed message in stream %s: %s", self._stream, error)
            else:
                self._view.receive(kv_event)
            self._applied = max(self._applied, message.metadata.sequence.stream)
            if number % EVENTS_PER_TURN == 0:
                await asyncio.sleep(0)
        self._messages_applied.inc(len(batch))

    async def _check(self, context: "JetStreamContext") -> None:
        """Start a snapshot if one is due. The dump covers all messages that this task has fetched."""
        await context.consumer_info(self._stream, self.name)  # Raises if the consumer was deleted.
        info = await context.stream_info(self._stream)
        state = info.state
        is_uploading = self._upload is not None and not self._upload.done()
        # Beyond half of its bounds, the stream might soon drop events that no snapshot covers.
        is_large = state.messages > _limit(info.config.max_msgs, STREAM_MESSAGES_MAX) // 2
        is_large |= state.bytes > _limit(info.config.max_bytes, STREAM_BYTES_MAX) // 2
        if (state.messages > self._threshold or is_large) and not is_uploading and self._view.is_whole:
            self._upload = self._tasks.start(self._condense(context), "snapshot")

    # Snapshots

    async def _condense(self, context: "JetStreamContext") -> None:
        """Create one snapshot, from the lock to the purge; a failure is logged and retried later."""
        store = SnapshotStore(context, self._endpoint)
        lock: Lock | None = None
        try:
            lock = await store.lock(self._owner)
            if lock is None:
                logger.debug("another router is creating the snapshot of %s", self._stream)
                return
            await self._upload_all(context, store, lock)
            self._uploads.labels(status="uploaded").inc()
        except _failures() as error:
            self._uploads.labels(status="failed").inc()
            logger.warning("Failed to upload snapshot to %s: %s", store.bucket, reason(error))
        finally:
            if lock is not None:
                with contextlib.suppress(*_failures()):
                    async with asyncio.timeout(REQUEST_TIMEOUT_S):
                        await self._unlock(lock)

    async def _upload_all(self, context: "JetStreamContext", store: SnapshotStore, lock: Lock) -> None:
        await self._drop_orphans(context)
        version = await store.version()
        await self._drop_absent_workers()
        covered, count, pieces = await self._dump_whole()
        logger.info("snapshot of %d events to %s initiated", count, store.bucket)
        began = time.monotonic()
        info = await self._send(store, pieces, lock)
        await lock.renew(self._owner)
        await self._commit(store, info, version)
        logger.info("uploaded %d events to %s in %.0f ms", count, store.bucket, (time.monotonic() - began) * 1e3)
        await store.sweep(info)
        await lock.renew(self._owner)
        await self._purge(context, covered)

    async def _dump_whole(self) -> tuple[int, int, list[bytes]]:
        """Dump the index once no worker query is in progress. Raise `TimeoutError` if that takes too long."""
        async with asyncio.timeout(DUMP_S):
            while True:
                with contextlib.suppress(Changed):
                    found = await self._dump()
                    if self._view.is_whole:
                        return found
                await asyncio.sleep(DUMP_AGAIN_S)

    async def _dump(self) -> tuple[int, int, list[bytes]]:
        """Return the last message covered, the number of events, and the events as JSON in pieces.

        Ranks are dumped one by one: each rank's part is consistent and records its last event.
        """
        covered, count = self._applied, 0
        pieces: list[bytes] = []
        rest = bytearray(b"[")
        for rank in list(self._view.last_event_ids()):
            for encoded in await self._dump_rank(*rank):
                rest += (b"," if count else b"") + encoded
                count += 1
            while len(rest) >= CHUNK_BYTES:
                pieces.append(bytes(rest[:CHUNK_BYTES]))
                del rest[:CHUNK_BYTES]
        pieces.append(bytes(rest + b"]"))
        return covered, count, pieces

    async def _dump_rank(self, worker_id: int, dp_rank: int) -> list[bytes]:
        """Return one rank's events as JSON, built in slices while its new events wait; empty for a rank that left."""
        with self._view.held_back(worker_id, dp_rank) as last_id:
            number, evicted = last_id(), self._index.counts.evicted
            found: list[bytes] = []
            slice_end = time.perf_counter() + SLICE_S
            for kv_event in events.dump_rank(self._index, worker_id, dp_rank, number) if number is not None else ():
                found.append(json_encode(kv_event))
                if time.perf_counter() < slice_end:
                    continue
                await asyncio.sleep(0)
                slice_end = time.perf_counter() + SLICE_S
                if last_id() is None:
                    return []
                if self._index.counts.evicted != evicted:
                    raise Changed("the index overflowed during the dump of a rank")
        await asyncio.sleep(0)
        return found

    async def _send(self, store: SnapshotStore, pieces: list[bytes], lock: Lock) -> ObjectInfo:
        return await store.send(pieces, lock, self._owner)

    async def _commit(self, store: SnapshotStore, info: ObjectInfo, version: int) -> None:
        await store.commit(info, version)

    async def _purge(self, context: "JetStreamContext", covered: int) -> None:
        """Delete the messages that the snapshot covers, up to the last one acknowledged by every router."""
        until = min([covered, *[one.ack_floor.stream_seq for one in await self._consumers(context) if one.ack_floor]])
        if until > 0:
            await context.purge_stream(self._stream, seq=until + 1)
            logger.info("purged %s up to message %d", self._stream, until)

    async def _unlock(self, lock: Lock) -> None:
        await lock.release()

    # Other routers, and workers that left

    async def _drop_orphans(self, context: "JetStreamContext") -> None:
        """Delete the consumers of routers that are gone."""
        present = await self._runtime.discovery.snapshot(KV_ROUTERS)
        for one in await self._consumers(context):
            if one.name != self.name and self._key(one.name) not in present:
                logger.info("deleting orphaned consumer %s of stream %s", one.name, self._stream)
                with contextlib.suppress(*_failures()):
                    await context.delete_consumer(self._stream, one.name)

    async def _drop_absent_workers(self) -> None:
        """Remove the component's workers that are gone."""
        prefix = f"{self._endpoint.namespace}/{self._endpoint.component}/"
        present = await self._runtime.discovery.snapshot(INSTANCES)
        workers = {int(key.rpartition("/")[2], 16) for key in present if key.startswith(prefix)}
        self._view.drop_absent_workers(workers)

    async def _consumers(self, context: "JetStreamContext") -> list[Any]:
        found: list[Any] = []
        while True:
            page = await context.consumers_info(self._stream, offset=len(found))
            found += page
            if len(page) < CONSUMERS_PAGE:
                return found

    def _context(self) -> "JetStreamContext":
        return self._connection.client.jetstream(timeout=REQUEST_TIMEOUT_S)

    def _key(self, name: str) -> str:
        return f"{self._endpoint.namespace}/{self._endpoint.component}/{name}"

    @property
    def _owner(self) -> bytes:
        return self.name.encode()


def _limit(configured: int | None, default: int) -> int:
    """Return a bound of the stream, or the default for a stream that was created without it."""
    return configured if configured is not None and configured > 0 else default


def reason(error: Exception) -> str:
    """Return an error's text with its type, since some errors of the library have no text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _failures() -> tuple[type[Exception], ...]:
    """Return the exceptions raised when the server or the connection fails."""
    from nats.errors import Error

    return Error, DynamoException, OSError, TimeoutError
