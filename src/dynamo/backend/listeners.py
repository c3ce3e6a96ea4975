"""Listeners: subscribers of the KV events and step metrics that engine processes publish on ZMQ sockets."""

import logging
import struct
from collections.abc import Callable

from dynamo.backend.engine import EngineHost
from dynamo.core.codec import UNREADABLE, msgpack_decoder
from dynamo.kv_events.engine_subscriber import EngineEvents, EngineListener
from dynamo.protocols.kv_events import Cleared, KvEvent, WorkerKvEvent
from dynamo.protocols.load import ForwardPass

logger = logging.getLogger(__name__)

UNREAD_MAX = 10_000  # Receive buffer in steps; a lost step is detected by the number of the next one.

read_pass = msgpack_decoder(ForwardPass).decode


def kv_listener(
    endpoint: str,
    replay_endpoint: str | None,
    rank: int,
    block_tokens: int,
    host: EngineHost,
    *,
    is_eagle: bool = False,
) -> EngineListener:
    """Return the subscriber of one publishing rank. Raise `InvalidArgument` for an invalid endpoint."""
    events = EngineEvents(0, rank, block_tokens, forwarder(host, rank), is_eagle=is_eagle, name=f"rank {rank}")
    replay = None if replay_endpoint is None else reachable(replay_endpoint)
    return EngineListener(events, reachable(endpoint), replay_endpoint=replay)


def forwarder(host: EngineHost, rank: int) -> Callable[[WorkerKvEvent], None]:
    """Return a callback that forwards events to the host."""
    return lambda message: host.publish_kv_event(event_of(message), rank, message.storage_tier)


def event_of(message: WorkerKvEvent) -> KvEvent:
    """Return the event without its id; the host assigns a new one."""
    data = message.event.data
    if isinstance(data, str):
        return Cleared()
    event = data.stored or data.removed
    assert event is not None, "exactly one kind of event is set"
    return event


def reachable(endpoint: str) -> str:
    """Return the local address of a publisher that binds to all addresses."""
    return endpoint.replace("*", "127.0.0.1").replace("0.0.0.0", "127.0.0.1").replace("[::]", "127.0.0.1")  # noqa: S104


class PassListener:
    """Subscriber of the steps that one rank of an engine publishes; runs until it is cancelled."""

    def __init__(self, endpoint: str, rank: int, host: EngineHost) -> None:
        self._endpoint = endpoint
        self._rank = rank
        self._host = host
        self._next = 0

    async def run(self) -> None:
        import zmq
        import zmq.asyncio

        context = zmq.asyncio.Context()
        socket = context.socket(zmq.SUB)
        try:
            socket.setsockopt(zmq.RCVHWM, UNREAD_MAX)
            socket.setsockopt(zmq.LINGER, 0)
            socket.subscribe("")
            socket.connect(self._endpoint)
            while True:
                self.on_message(await socket.recv_multipart())
        finally:
            socket.close()
            context.term()

    def on_message(self, frames: list[bytes]) -> None:
        """Process one message of topic, sequence number and payload; a malformed message is logged and dropped."""
        if len(frames) != 3 or len(frames[1]) != 8:
            logger.warning("malformed step message from %s: expected [topic, sequence, payload]", self._endpoint)
            return
        (number,) = struct.unpack(">Q", frames[1])
        if number > self._next > 0:
            logger.warning("lost %d step messages of rank %d", number - self._next, self._rank)
        self._next = number + 1
        try:
            passed = read_pass(frames[2])
        except UNREADABLE as error:
            logger.warning("cannot decode step %d of rank %d: %s", number, self._rank, error)
            return
        self._host.publish_forward_pass(passed, self._rank)
