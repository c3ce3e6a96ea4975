"""EngineEvents: KV events of an external engine, received from its ZMQ sockets, with replay of missed messages.

    engine PUB ──topic, number, payload──▶ decode ──▶ put(event)
    engine ROUTER ◀──number── replay request ◀── a number is missing; the replay ends with number -1

Two payload formats are supported: vLLM's batches (`kv_events.relay`), and our own envelope, from workers that publish
without an engine in between. Messages that cannot be replayed are lost: the rank's blocks are then cleared.
"""

import asyncio
import logging
import struct
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from dynamo.core.codec import UNREADABLE, msgpack_decoder
from dynamo.core.errors import DynamoException, InvalidArgument
from dynamo.kv_events.publisher import unsigned
from dynamo.kv_events.relay import relayed, subscribed
from dynamo.protocols.kv_events import (
    Cleared,
    KvEvent,
    KvEventData,
    NumberedKvEvent,
    Removed,
    Stored,
    StoredBlock,
    WorkerKvEvent,
)
from dynamo.runtime.event_plane.envelope import unpack
from dynamo.text.multimodal.routing_hashes import hashes_of

logger = logging.getLogger(__name__)

REPLAY_S = 10.0  # Maximum time between two messages of a replay; the replay ends after it.
ENVELOPE_FRAMES = 4  # Of our own event plane; an engine's messages have three.
SCHEMES = ("tcp", "ipc", "inproc")

decode_events = msgpack_decoder(list[WorkerKvEvent]).decode


class Status(Enum):
    """State of a listener."""

    PENDING = "pending"
    ACTIVE = "active"
    PAUSED = "paused"
    FAILED = "failed"


Put = Callable[[WorkerKvEvent], None]


class EngineEvents:
    """Events of one rank: decoded, numbered, replayed when missed."""

    def __init__(
        self,
        worker_id: int,
        dp_rank: int,
        block_size: int,
        put: Put,
        *,
        salt: str | None = None,
        is_eagle: bool = False,
        name: str = "",
    ) -> None:
        self.worker_id = worker_id
        self.dp_rank = dp_rank
        self._block_size = block_size
        self._put = put
        self._salt = salt
        self._is_eagle = is_eagle
        self._name = name
        self._next: int | None = None
        """The next expected number."""
        self._last_live = -1
        self._count = 0
        self.gaps = 0
        """Number of gaps in the sequence."""
        self.lost = 0
        """Number of messages that could not be replayed."""

    def arrived(self, frames: Sequence[bytes]) -> int | None:
        """Inspect a live message before it is processed; return the first number missing before it, or None.

        Live messages arrive in order: a number not higher than the last one means that the engine was restarted.
        """
        number = number_of(frames)
        if number is None:
            return None
        if number <= self._last_live:
            logger.info("%s restarted: its message numbers start again", self._name)
            self._next = None
            self._clear()
        self._last_live = number
        known = self._next or 0
        return known if number > known else None

    def process(self, frames: Sequence[bytes]) -> None:
        """Process one message: topic (or empty), number, payload. A duplicate has no effect."""
        number = number_of(frames)
        if number is None:
            logger.warning("malformed KV event from %s: expected [topic, sequence, payload]", self._name)
            return
        known = self._next
        if known is not None and number < known:
            return
        if number > (known or 0):
            self.gaps += 1
            if known is not None:
                self.lost += number - known
                logger.warning("%d messages from %s were lost before %d", number - known, self._name, number)
                self._clear()
        self._next = number + 1
        try:
            for kv_event in self.read(frames):
                self._put(kv_event)
        except DynamoException as error:
            logger.warning("malformed message %d from %s: %s", number, self._name, error)

    def _clear(self) -> None:
        """Clear the rank's blocks: after a lost event the cache state is unknown."""
        self._put(self._numbered(Cleared(), self.dp_rank, "device"))

    def read(self, frames: Sequence[bytes]) -> list[WorkerKvEvent]:
        """Return the events of one message, attributed to this worker. Raise `InvalidArgument`."""
        if len(frames) == ENVELOPE_FRAMES:
            try:
                own = decode_events(unpack(list(frames)).payload)
            except UNREADABLE as error:
                raise InvalidArgument(f"not KV events: {error}") from None
            return [WorkerKvEvent(self.worker_id, one.storage_tier, one.residency_domain, one.event) for one in own]
        found = relayed(frames[-1], self._block_size, self.dp_rank, self._stored)
        return [self._numbered(one.event, self.dp_rank, one.tier) for one in found]

    def _stored(
        self,
        token_ids: Sequence[int],
        sizes: Sequence[int],
        block_hashes: Sequence[int],
        parent: int | None,
        *,
        lora_name: str | None = None,
        block_mm_infos: Sequence[Any] | None = None,
    ) -> KvEvent | None:
        if sum(sizes) > len(token_ids):
            raise InvalidArgument(f"{len(token_ids)} tokens: the blocks need {sum(sizes)}")
        hashes = hashes_of(
            token_ids, self._block_size, block_mm_infos=block_mm_infos,
            lora_name=lora_name, cache_salt=self._salt, is_eagle=self._is_eagle,
        )  # fmt: skip
        pairs = zip(block_hashes, hashes, strict=False)
        blocks = [StoredBlock(unsigned(key), tokens) for key, tokens in pairs]
        return Stored(None if parent is None else unsigned(parent), None, blocks) if blocks else None

    def _numbered(self, event: KvEvent, dp_rank: int, tier: str) -> WorkerKvEvent:
        self._count += 1
        data: Any
        if isinstance(event, Cleared):
            data = "cleared"
        elif isinstance(event, Removed):
            data = KvEventData(removed=event)
        else:
            data = KvEventData(stored=event)
        return WorkerKvEvent(self.worker_id, tier, "worker", NumberedKvEvent(self._count, data, dp_rank))


class EngineListener:
    """Receive from one engine's sockets until cancelled."""

    def __init__(
        self,
        events: EngineEvents,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        gate: asyncio.Event | None = None,
    ) -> None:
        """Nothing is read before the `gate` opens, since state from another indexer may have to be loaded first.

        Raises `InvalidArgument` for an invalid endpoint.
        """
        self.endpoint = check_endpoint(endpoint)
        self.replay_endpoint = None if replay_endpoint is None else check_endpoint(replay_endpoint)
        self.events = events
        self.status = Status.PENDING
        self.error: str | None = None
        self._gate = gate

    async def run(self) -> None:
        """Connect, with retries until the engine is available, and process its messages."""
        import zmq

        self.status = Status.PENDING
        try:
            async with subscribed(self.endpoint) as (context, socket):
                if self._gate is not None:
                    await self._gate.wait()
                self.status = Status.ACTIVE
                while True:
                    frames = await socket.recv_multipart()
                    start = self.events.arrived(frames)
                    if start is not None and self.replay_endpoint is not None:
                        await self._replay(context, start)
                    self.events.process(frames)
        except asyncio.CancelledError:
            self.status = Status.PAUSED
            raise
        except zmq.ZMQError as error:
            self.status, self.error = Status.FAILED, str(error)
            logger.warning("failed to follow the KV events of %s: %s", self.endpoint, error)

    async def _replay(self, context: Any, start: int) -> None:
        """Request missed messages. Messages that do not arrive in time are lost."""
        import zmq

        assert self.replay_endpoint is not None
        socket = context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self.replay_endpoint)
            async with asyncio.timeout(REPLAY_S):
                await socket.send_multipart([b"", struct.pack(">Q", start)])
            while True:
                async with asyncio.timeout(REPLAY_S):
                    frames = await socket.recv_multipart()
                if len(frames) < 2 or number_of(frames) is None:
                    break
                self.events.process(replayed(frames))
        except TimeoutError:
            logger.warning("%s did not replay the messages missed since number %d", self.replay_endpoint, start)
        finally:
            socket.close()


def replayed(frames: Sequence[bytes]) -> Sequence[bytes]:
    """Return a replayed message in its live form: some engines put an empty frame before its three."""
    return frames[1:] if len(frames) == ENVELOPE_FRAMES and not frames[0] else frames


def number_of(frames: Sequence[bytes]) -> int | None:
    """Return the number of a message; None for a malformed message, and for the end of a replay."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        return None
    (number,) = struct.unpack(">q", frames[-2])
    return None if number < 0 else int(number)


def check_endpoint(endpoint: str) -> str:
    """Return the endpoint. Raise `InvalidArgument` if ZMQ cannot connect to it."""
    scheme, found, rest = endpoint.partition("://")
    if not found:
        raise InvalidArgument(f"invalid ZMQ endpoint `{endpoint}`: missing scheme")
    if scheme not in SCHEMES or not rest:
        raise InvalidArgument(f"invalid ZMQ endpoint `{endpoint}`: expected {', '.join(SCHEMES)} and an address")
    return endpoint
