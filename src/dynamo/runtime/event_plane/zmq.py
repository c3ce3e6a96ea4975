"""Event plane over ZMQ: every publisher binds and registers its own socket; subscribers connect to all of them.

With brokers (`zmq_broker`), publishers and subscribers connect to the brokers instead.
"""

import logging
from typing import Any

import msgspec

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.codec import UNREADABLE, json_encode
from dynamo.core.config import setting
from dynamo.core.tasks import TaskOwner
from dynamo.protocols.discovery import (
    EVENT_CHANNELS,
    EndpointId,
    EventChannel,
    EventScope,
    EventTransport,
    ZmqConfig,
    topic_prefix,
)
from dynamo.runtime.discovery.base import Delete, Discovery, Put, Synced
from dynamo.runtime.event_plane.envelope import EventEnvelope
from dynamo.runtime.event_plane.zmq_broker import BrokerPublisher, Brokers, BrokerSubscriber
from dynamo.runtime.event_plane.zmq_sockets import ZmqPublisherSocket, ZmqSubscriberSocket
from dynamo.runtime.request_plane.tcp.common import local_address

logger = logging.getLogger(__name__)

_read_channel = msgspec.json.Decoder(EventChannel).decode


class ZmqEventPlane:
    """Event plane of one process over ZMQ."""

    def __init__(self, discovery: Discovery, host: str = "", clock: Clock | None = None) -> None:
        import zmq

        self._discovery = discovery
        self._clock = clock or SystemClock()
        self._host = host or setting("DYN_EVENT_PLANE_HOST", "", str) or local_address()
        self._brokers = Brokers.from_variables()
        self._context = zmq.Context(setting("DYN_ZMQ_IO_THREADS", 1, int))
        self._publishers: list[ZmqPublisher | BrokerPublisher] = []
        self._subscribers: list[ZmqSubscriber | BrokerSubscriber] = []

    async def publisher(self, endpoint: EndpointId, topic: str) -> "ZmqPublisher | BrokerPublisher":
        if self._brokers is not None:
            brokered = BrokerPublisher(self._context, self._brokers, self._clock, endpoint, topic)
            self._publishers.append(brokered)
            return brokered
        publisher = ZmqPublisher(self._context, self._discovery, self._clock, topic)
        self._publishers.append(publisher)
        await publisher.register(endpoint, self._host)
        return publisher

    async def subscriber(self, endpoint: EndpointId, topic: str) -> "ZmqSubscriber | BrokerSubscriber":
        subscriber: ZmqSubscriber | BrokerSubscriber
        if self._brokers is not None:
            subscriber = BrokerSubscriber(self._context, self._brokers, endpoint, topic)
        else:
            subscriber = ZmqSubscriber(self._context, self._discovery, endpoint, topic)
        self._subscribers.append(subscriber)
        return subscriber

    @property
    def is_sound(self) -> bool:
        return all(subscriber.is_sound for subscriber in self._subscribers)

    async def close(self) -> None:
        for publisher in self._publishers:
            await publisher.close()
        for subscriber in self._subscribers:
            await subscriber.close()
        self._context.destroy(linger=0)


class ZmqPublisher(ZmqPublisherSocket):
    """Publisher with a bound socket and its registry record."""

    def __init__(self, context: Any, discovery: Discovery, clock: Clock, topic: str) -> None:
        super().__init__(context, clock, topic, topic)
        self._discovery = discovery
        self._channel: EventChannel | None = None

    async def register(self, endpoint: EndpointId, host: str) -> None:
        """Bind the socket and register it for subscribers."""
        interface = host if host.startswith("127.") else "0.0.0.0"  # noqa: S104 - subscribers are on other machines
        port = self._socket.bind_to_random_port(f"tcp://{interface}")
        transport = EventTransport(ZmqConfig(f"tcp://{host}:{port}"))
        self._channel = EventChannel(EventScope("endpoint", endpoint), self._topic, self.id, transport)
        await self._discovery.put(EVENT_CHANNELS, self._channel.key, json_encode(self._channel))

    async def close(self) -> None:
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await self._discovery.delete(EVENT_CHANNELS, channel.key)
        self._socket.close()


class ZmqSubscriber(ZmqSubscriberSocket):
    """Subscriber with one socket, connected to every registered publisher of a topic."""

    def __init__(self, context: Any, discovery: Discovery, endpoint: EndpointId, topic: str) -> None:
        super().__init__(context, topic, topic)
        self._discovery = discovery
        self._prefix = topic_prefix(endpoint, topic)
        self._channels: dict[str, tuple[int, str]] = {}
        self._publishers: set[int] = set()
        self._tasks = TaskOwner(f"event_plane.{topic}")
        self._tasks.supervise(self._watch, "watch")

    @property
    def is_sound(self) -> bool:
        """Return False while the crashed watch for publishers is being restarted."""
        return self._tasks.is_sound

    def accepts(self, envelope: EventEnvelope) -> bool:
        """Accept events of registered publishers only."""
        return super().accepts(envelope) and envelope.publisher_id in self._publishers

    async def close(self) -> None:
        if not self._socket.closed:
            await self._tasks.cancel_and_wait()
            self.close_socket()
        self.end()

    async def _watch(self) -> None:
        """Watch the registry forever. After a restart, remove the publishers that left meanwhile."""
        unconfirmed = set(self._channels)
        async for change in self._discovery.watch(EVENT_CHANNELS):
            if isinstance(change, Synced):
                for key in unconfirmed & set(self._channels):
                    self._disconnect(key)
                unconfirmed.clear()
            elif isinstance(change, Put) and change.key.startswith(self._prefix):
                unconfirmed.discard(change.key)
                self._connect(change.key, change.value)
            elif isinstance(change, Delete) and change.key in self._channels:
                self._disconnect(change.key)

    def _connect(self, key: str, value: bytes) -> None:
        try:
            channel = _read_channel(value)
        except UNREADABLE as error:
            logger.warning("ignoring malformed event channel %s: %s", key, error)
            return
        if not isinstance(channel.transport, EventTransport):
            logger.warning("%s uses a different event plane; set the same --event-plane for all processes", key)
            return
        if key in self._channels:
            self._disconnect(key)
        address = channel.transport.config.endpoint
        try:
            self._socket.connect(address)
        except self._zmq.ZMQError as error:
            logger.warning("ignoring event channel %s: %s: %s", key, address, error)
            return
        self._channels[key] = channel.instance_id, address
        self._publishers.add(channel.instance_id)
        self._read()  # ZMQ signals only the first of several events: a call may have consumed the signal.

    def _disconnect(self, key: str) -> None:
        self._read()
        publisher_id, address = self._channels.pop(key)
        self._publishers.discard(publisher_id)
        try:
            self._socket.disconnect(address)
        except self._zmq.ZMQError as error:
            logger.debug("publisher %x was not connected: %s", publisher_id, error)
        self.gone(publisher_id)
