"""Event plane over NATS: all publishers of a topic share a subject and are listed in the registry.

    subject   `namespace.<ns>.component.<comp>.endpoint.<ep>.<topic>`
    message   the envelope's msgpack map alone

NATS core stores no messages: events published while a subscriber is disconnected are lost and reported as a gap.
"""

import functools
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.codec import UNREADABLE, json_encode, msgpack_decoder, msgpack_encode
from dynamo.core.errors import InvalidArgument
from dynamo.core.metrics import MetricsRegistry
from dynamo.core.tasks import TaskOwner
from dynamo.protocols.discovery import (
    EVENT_CHANNELS,
    EndpointId,
    EventChannel,
    EventScope,
    NatsConfig,
    NatsEventTransport,
    topic_prefix,
)
from dynamo.runtime.discovery.base import Delete, Discovery, Put, Synced, new_id
from dynamo.runtime.event_plane.base import BACKLOG_MAX, Backlog
from dynamo.runtime.event_plane.envelope import PUBLISHER_ID_BITS, EventEnvelope
from dynamo.runtime.transports.nats.connection import NatsConnection, Subscription
from dynamo.runtime.transports.nats.options import NatsOptions

if TYPE_CHECKING:
    from nats.aio.msg import Msg

logger = logging.getLogger(__name__)

GONE_MAX = 10_000  # Ids of publishers that left, for late messages: more than leave while a message is in transit.

_read_envelope = msgpack_decoder(EventEnvelope).decode


class NatsEventPlane:
    """Event plane of one process over NATS."""

    def __init__(
        self,
        discovery: Discovery,
        options: NatsOptions | None = None,
        clock: Clock | None = None,
        registry: MetricsRegistry | None = None,
    ) -> None:
        self._discovery = discovery
        self._clock = clock or SystemClock()
        self._nats = NatsConnection(options or NatsOptions(), "event_plane", registry=registry, keeps_unsent=True)
        self._publishers: list[NatsPublisher] = []
        self._subscribers: list[NatsSubscriber] = []

    async def start(self) -> None:
        """Wait for the connection. Raise `ConfigError` when the server is unreachable or rejects the credentials."""
        await self._nats.start()

    async def publisher(self, endpoint: EndpointId, topic: str) -> "NatsPublisher":
        await self.start()
        publisher = NatsPublisher(self._nats, self._discovery, self._clock, endpoint, topic)
        self._publishers.append(publisher)
        await publisher.register()
        return publisher

    async def subscriber(self, endpoint: EndpointId, topic: str) -> "NatsSubscriber":
        await self.start()
        subscriber = NatsSubscriber(self._nats, self._discovery, endpoint, topic)
        self._subscribers.append(subscriber)
        await subscriber.listen()
        return subscriber

    @property
    def is_sound(self) -> bool:
        return all(subscriber.is_sound for subscriber in self._subscribers)

    async def close(self) -> None:
        for publisher in self._publishers:
            await publisher.close()
        for subscriber in self._subscribers:
            await subscriber.close()
        await self._nats.close()


class NatsPublisher:
    """Publisher with its sequence numbers and its registry record."""

    def __init__(
        self, nats: NatsConnection, discovery: Discovery, clock: Clock, endpoint: EndpointId, topic: str
    ) -> None:
        self.id = new_id() >> (63 - PUBLISHER_ID_BITS) | 1
        self.dropped = 0
        """Events that were never sent, because the send queue was full."""
        self._nats = nats
        self._discovery = discovery
        self._clock = clock
        self._topic = topic
        self._subject = f"{subject_prefix(endpoint)}.{topic}"
        self._sequence = 0
        self._is_closed = False
        transport = NatsEventTransport(NatsConfig(subject_prefix(endpoint)))
        self._channel = EventChannel(EventScope("endpoint", endpoint), topic, self.id, transport)

    async def register(self) -> None:
        """Register the publisher for subscribers."""
        await self._discovery.put(EVENT_CHANNELS, self._channel.key, json_encode(self._channel))

    def publish(self, payload: bytes) -> None:
        if self._is_closed:
            return
        sequence, self._sequence = self._sequence, self._sequence + 1
        envelope = EventEnvelope(self.id, sequence, int(self._clock.wall() * 1000), self._topic, payload)
        if not self._nats.publish(self._subject, msgpack_encode(envelope)):
            self._drop()

    async def close(self) -> None:
        """Deregister once everything is sent: subscribers ignore later events."""
        if not self._is_closed:
            self._is_closed = True
            await self._nats.flush()
            await self._discovery.delete(EVENT_CHANNELS, self._channel.key)

    def _drop(self) -> None:
        self.dropped += 1
        if self.dropped.bit_count() == 1:  # Log the first, and each doubling.
            logger.warning("publisher %x: dropped %d events of topic %s", self.id, self.dropped, self._topic)


class NatsSubscriber(Backlog):
    """Subscriber to one subject and to the removal of publishers from the registry."""

    def __init__(self, nats: NatsConnection, discovery: Discovery, endpoint: EndpointId, topic: str) -> None:
        super().__init__(BACKLOG_MAX)
        self.unreadable = 0
        self._nats = nats
        self._discovery = discovery
        self._topic = topic
        self._prefix = topic_prefix(endpoint, topic)
        self._subject = f"{subject_prefix(endpoint)}.{topic}"
        self._subscription: Subscription | None = None
        self._present: set[str] = set()
        self._left: OrderedDict[int, None] = OrderedDict()
        self._tasks = TaskOwner(f"event_plane.{topic}")

    async def listen(self) -> None:
        self._subscription = await self._nats.subscribe(self._subject, self._receive)
        self._tasks.supervise(functools.partial(self._watch, self._subscription), "watch")

    @property
    def is_sound(self) -> bool:
        """Return False while the crashed watch for publishers is being restarted."""
        return self._tasks.is_sound

    async def close(self) -> None:
        if self._subscription is not None:
            subscription, self._subscription = self._subscription, None
            await self._tasks.cancel_and_wait()
            await self._nats.unsubscribe(subscription)
        self.end()

    async def _watch(self, subscription: Subscription) -> None:
        """Watch the registry forever. After a restart, remove the publishers that left meanwhile."""
        unconfirmed = set(self._present)
        async for change in self._discovery.watch(EVENT_CHANNELS):
            if isinstance(change, Synced):
                for key in unconfirmed & self._present:
                    await self._gone(subscription, key)
                unconfirmed.clear()
            elif isinstance(change, Put) and change.key.startswith(self._prefix):
                unconfirmed.discard(change.key)
                self._present.add(change.key)
                self._left.pop(_publisher_of(change.key), None)
            elif isinstance(change, Delete) and change.key.startswith(self._prefix):
                await self._gone(subscription, change.key)

    async def _gone(self, subscription: Subscription, key: str) -> None:
        """Report a removed publisher, after the events that it sent before."""
        self._present.discard(key)
        await self._nats.settle(subscription)
        self._leave(_publisher_of(key))

    def _leave(self, publisher_id: int) -> None:
        self._left[publisher_id] = None
        if len(self._left) > GONE_MAX:
            self._left.popitem(last=False)
        self.gone(publisher_id)

    def _receive(self, message: "Msg") -> None:
        try:
            envelope = _read_envelope(message.data)
        except UNREADABLE as error:
            self.unreadable += 1
            if self.unreadable.bit_count() == 1:  # Log the first, and each doubling.
                logger.warning("ignored %d malformed events on %s, the last: %s", self.unreadable, self._subject, error)
            return
        if envelope.topic == self._topic and envelope.publisher_id not in self._left:
            self.add(envelope.publisher_id, envelope.sequence, envelope.payload)


def subject_prefix(endpoint: EndpointId) -> str:
    """Return the subject prefix of an endpoint. Raise `InvalidArgument` for names that contain NATS wildcards."""
    if any(wildcard in endpoint.path for wildcard in "*>"):
        raise InvalidArgument(f"endpoint {endpoint}: names on NATS must not contain * or >")
    return f"namespace.{endpoint.namespace}.component.{endpoint.component}.endpoint.{endpoint.name}"


def _publisher_of(key: str) -> int:
    try:
        return int(key.rpartition("/")[2], 16)
    except ValueError:
        return -1
