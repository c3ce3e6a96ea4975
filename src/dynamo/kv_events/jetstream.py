"""KV stream: workers' KV events stored by a JetStream server (docs/durable-kv-events.md).

    worker ──event, JSON──▶ stream namespace-…-component-…-kv-events ──▶ a durable consumer for each router
                                 │ too many messages                          │ their sum
                                 └── purged once acknowledged ◀──── object radix-state in bucket …-radix-bucket

This module has the worker's publisher and the names; `kv_events.snapshots` and `kv_events.durable` are the router's
part.
"""

import asyncio
import itertools
import logging
import random
import re
from collections import deque
from typing import TYPE_CHECKING

from dynamo.core.backoff import Backoff
from dynamo.core.codec import json_encode
from dynamo.core.errors import DynamoException
from dynamo.core.metrics import MetricsRegistry
from dynamo.core.tasks import TaskOwner
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.kv_events import WorkerKvEvent

if TYPE_CHECKING:
    from nats.js import JetStreamContext

    from dynamo.runtime.transports.nats.connection import NatsConnection

logger = logging.getLogger(__name__)

OBJECT = "radix-state"
UNSENT_MAX = 65_536  # Events that wait while the server is unavailable: minutes of a busy worker.
WINDOW = 256  # Events in flight to the server at once.
ACK_TIMEOUT_S = 5.0
DRAIN_S = 2.0
RETRY_FIRST_S, RETRY_MAX_S = 0.1, 2.0
# Bounds of the stream, for when no router purges it. The server then drops the oldest events; routers detect the gap
# and query the worker. Routers take a snapshot, and purge, long before.
STREAM_MESSAGES_MAX = 4_000_000
# The server reserves these bytes; one with little storage is asked for half, and so on. No power of two: the limit of a
# server usually is one, and a server with all of it reserved creates no other stream, not even the snapshot's bucket.
STREAM_BYTES_MAX = 480 << 20
STREAM_BYTES_MIN = 15 << 20
STREAM_AGE_MAX_S = 7 * 86_400.0
STORAGE_EXCEEDED = 10047  # JetStream's error code for a reservation beyond `max_file_store` or the account's limit.

_UNUSUAL = re.compile(r"[^a-z0-9-]")


def slug(text: str) -> str:
    """Return a name that JetStream accepts."""
    return _UNUSUAL.sub("-", text.lower())


def component_subject(endpoint: EndpointId) -> str:
    """Return the prefix of the names: all endpoints of a component share their stream."""
    return f"namespace.{endpoint.namespace}.component.{endpoint.component}"


def stream_name(endpoint: EndpointId) -> str:
    """Return the name of the stream of a component's KV events."""
    return slug(f"{component_subject(endpoint)}.kv-events")


def bucket_name(endpoint: EndpointId) -> str:
    """Return the name of the bucket of the component's snapshot."""
    return slug(f"{component_subject(endpoint)}-radix-bucket")


def event_subject(endpoint: EndpointId) -> str:
    """Return the subject on which events are published."""
    return f"{stream_name(endpoint)}.queue"


async def ensure_stream(context: "JetStreamContext", endpoint: EndpointId) -> None:
    """Create the stream, with bounds, if it does not exist; an existing one keeps its own bounds.

    Raises `nats.errors.Error` if the server refuses, for example because it cannot reserve `STREAM_BYTES_MIN`.
    """
    from nats.js.errors import BadRequestError, NotFoundError

    name = stream_name(endpoint)
    try:
        await context.stream_info(name)
    except NotFoundError:
        try:
            await _add_stream(context, name)
        except BadRequestError:  # Another process has just created it.
            await context.stream_info(name)


async def _add_stream(context: "JetStreamContext", name: str) -> None:
    """Create the stream with the most bytes that the server can reserve: 480 MiB, or a half, a quarter, … of it."""
    from nats.js.errors import ServerError

    size = STREAM_BYTES_MAX
    while True:
        try:
            await context.add_stream(
                name=name,
                subjects=[f"{name}.*"],
                max_msgs=STREAM_MESSAGES_MAX,
                max_bytes=size,
                max_age=STREAM_AGE_MAX_S,
            )
        except ServerError as error:
            if error.err_code != STORAGE_EXCEEDED or size <= STREAM_BYTES_MIN:
                raise
            size //= 2
            continue
        if size < STREAM_BYTES_MAX:
            logger.warning(
                "stream %s is limited to %d MiB: JetStream has no storage for %d MiB (max_file_store)",
                name,
                size >> 20,
                STREAM_BYTES_MAX >> 20,
            )
        return


class KvStreamPublisher:
    """Publisher to the stream for one process: sends events in order, each until the server has acknowledged it."""

    def __init__(self, connection: "NatsConnection", registry: MetricsRegistry, endpoint: EndpointId) -> None:
        self._endpoint = endpoint
        self._subject = event_subject(endpoint)
        self._connection = connection
        self._tasks = TaskOwner(f"kv stream of {endpoint}")
        self._unsent: deque[tuple[str, bytes]] = deque()
        self._wake = asyncio.Event()
        self._sent = asyncio.Event()
        prefix = "dynamo_component_kv_stream_"
        self._published = registry.counter(prefix + "published_total", "KV events acknowledged by the stream").labels()
        self._dropped = registry.counter(
            prefix + "dropped_total", "KV events that did not reach the stream; routers query the worker for them"
        ).labels()

    def start(self) -> None:
        """Start sending, as soon as the server is available."""
        self._connection.begin()
        self._tasks.supervise(self._send, "send")

    def put(self, kv_event: WorkerKvEvent) -> None:
        """Queue the next event; it is dropped if the queue is full, which routers detect as a gap."""
        if len(self._unsent) >= UNSENT_MAX:
            self._drop("the queue is full")
            return
        number = kv_event.event
        self._unsent.append((f"{kv_event.worker_id:x}.{number.dp_rank}.{number.event_id}", json_encode(kv_event)))
        self._wake.set()
        self._sent.clear()

    async def flush(self, timeout_s: float = DRAIN_S) -> bool:
        """Wait until the server has all events; return False after the timeout."""
        if not self._unsent:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._sent.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Send queued events if the server is available, and stop."""
        if not await self.flush():
            logger.warning("%d KV events did not reach the stream before the shutdown", len(self._unsent))
        await self._tasks.cancel_and_wait()
        await self._connection.close()

    def _drop(self, reason: str) -> None:
        self._dropped.inc()
        if int(self._dropped.value).bit_count() == 1:  # Log the first, and each time the number has doubled.
            logger.warning("%d KV events did not reach the stream: %s", int(self._dropped.value), reason)

    async def _send(self) -> None:
        from nats.errors import Error

        backoff = Backoff(RETRY_FIRST_S, RETRY_MAX_S)
        while True:
            await self._wake.wait()
            window = list(itertools.islice(self._unsent, WINDOW))
            try:
                await self._send_window(window)
            except (Error, DynamoException, OSError, TimeoutError) as error:
                logger.warning("failed to send KV events to the stream: %s; retrying", error or "no response")
                await asyncio.sleep(backoff.next(random.random()))
                continue
            backoff.reset()
            for _ in window:
                self._unsent.popleft()
            if not self._unsent:
                self._wake.clear()
                self._sent.set()

    async def _send_window(self, window: list[tuple[str, bytes]]) -> None:
        """Send events in order; return when the server has them. The server drops duplicates by message id."""
        from nats.errors import MaxPayloadError

        await self._connection.wait_up()
        context = self._connection.client.jetstream(timeout=ACK_TIMEOUT_S)
        await ensure_stream(context, self._endpoint)
        acks = []
        for name, body in window:
            try:
                acks.append(await context.publish_async(self._subject, body, headers={"Nats-Msg-Id": name}))
            except MaxPayloadError:
                self._drop(f"an event of {len(body)} bytes exceeds the server's maximum payload")
        async with asyncio.timeout(ACK_TIMEOUT_S):
            await asyncio.gather(*acks)
        self._published.inc(len(acks))
