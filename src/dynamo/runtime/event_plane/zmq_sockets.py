"""ZMQ sockets of a publisher and of a subscriber, independent of their peers.

Sockets are read by the event loop itself, through the file descriptor that ZMQ signals.
"""

import asyncio
import logging
from typing import Any

from dynamo.core.clock import Clock
from dynamo.core.errors import InvalidArgument
from dynamo.runtime.discovery.base import new_id
from dynamo.runtime.event_plane.base import BACKLOG_MAX, Backlog
from dynamo.runtime.event_plane.envelope import PUBLISHER_ID_BITS, EventEnvelope, pack, unpack

logger = logging.getLogger(__name__)

EVENTS_PER_TICK_MAX = 256  # Limits the time per loop iteration, so that response streams are not delayed.


class ZmqPublisherSocket:
    """Publisher socket: numbers the events and sends them without blocking."""

    def __init__(self, context: Any, clock: Clock, topic: str, sent_as: str) -> None:
        """Create the socket; `sent_as` is the subscription topic on ZMQ, `topic` that of the envelope."""
        import zmq

        self.id = new_id() >> (63 - PUBLISHER_ID_BITS) | 1
        self._zmq = zmq
        self._clock = clock
        self._topic = topic
        self._sent_as = sent_as.encode()
        self._sequence = 0
        self._socket = context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, BACKLOG_MAX)
        self._socket.setsockopt(zmq.LINGER, 0)

    def publish(self, payload: bytes) -> None:
        if self._socket.closed:
            return
        envelope = EventEnvelope(self.id, self._sequence, int(self._clock.wall() * 1000), self._topic, payload)
        self._sequence += 1
        try:
            self._socket.send_multipart(pack(envelope, self._sent_as), self._zmq.NOBLOCK)
        except self._zmq.Again:
            logger.warning("publisher %x: dropped an event of topic %s: socket queue full", self.id, self._topic)


class ZmqSubscriberSocket(Backlog):
    """Subscriber socket whose events are read into the backlog."""

    def __init__(self, context: Any, topic: str, sent_as: str) -> None:
        import zmq

        super().__init__()
        self._zmq = zmq
        self._topic = topic
        self._sent_as = sent_as.encode()
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, BACKLOG_MAX)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.subscribe(self._sent_as)
        self._descriptor = self._socket.getsockopt(zmq.FD)
        self._loop.add_reader(self._descriptor, self._read)

    def accepts(self, envelope: EventEnvelope) -> bool:
        """Return whether an event has this subscriber's topic: ZMQ matches topics by prefix."""
        return envelope.topic == self._topic

    def close_socket(self) -> None:
        """Stop reading. Further calls do nothing."""
        if not self._socket.closed:
            self._loop.remove_reader(self._descriptor)
            self._socket.close()

    def _read(self) -> None:
        """Read pending events, the rest in the next iteration, because ZMQ signals once for any number of events."""
        if self._socket.closed:
            return
        for _ in range(EVENTS_PER_TICK_MAX):
            try:
                frames = self._socket.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            self._receive(frames)
        self._loop.call_soon(self._read)

    def _receive(self, frames: list[bytes]) -> None:
        try:
            envelope = unpack(frames)
        except InvalidArgument as error:
            logger.warning("ignoring malformed event of topic %s: %s", self._topic, error)
            return
        if frames[0] == self._sent_as and self.accepts(envelope):
            self.add(envelope.publisher_id, envelope.sequence, envelope.payload)
