"""EngineEvents: the KV events of an engine that is no worker of ours, followed over its own ZMQ sockets (serving-plane.md §4.12).

    engine PUB ──topic, number, payload──▶ hear ──▶ put(event)
    engine ROUTER ◀──number── ask again ◀── a number is missing; the answer ends with number -1

Two payloads are read: vLLM's batches (`llm.kv_event_relay`), and our own envelope, of workers that publish without an
engine of theirs in between. What is missed and cannot be asked for is lost: the rank's holdings are forgotten then.
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

REPLAY_S = 10.0  # Between two messages of a replay: an engine that is silent for so long has no more.
ENVELOPE_FRAMES = 4  # Of our own event plane; an engine's messages have three.
SCHEMES = ("tcp", "ipc", "inproc")

decode_events = msgpack_decoder(list[WorkerKvEvent]).decode


class Status(Enum):
    """How far a listener is."""

    PENDING = "pending"
    ACTIVE = "active"
    PAUSED = "paused"
    FAILED = "failed"


Put = Callable[[WorkerKvEvent], None]


class EngineEvents:
    """One rank's events: read, numbered, asked for again."""

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
        """The number that comes next."""
        self._last_live = -1
        self._count = 0
        self.gaps = 0
        """Times that a number was missing."""
        self.lost = 0
        """Messages that nobody could tell again."""

    def arrived(self, frames: Sequence[bytes]) -> int | None:
        """A live message came, to be heard next: the first number that is missing before it; None where none is.

        Live messages come in order: one whose number is not higher than the last one's is of an engine started anew.
        """
        number = number_of(frames)
        if number is None:
            return None
        if number <= self._last_live:
            logger.info("%s counts anew: it was restarted", self._name)
            self._next = None
            self._clear()
        self._last_live = number
        known = self._next or 0
        return known if number > known else None

    def hear(self, frames: Sequence[bytes]) -> None:
        """One message: topic (or nothing), number, payload. One that was heard before changes nothing."""
        number = number_of(frames)
        if number is None:
            logger.warning("a message of %s that is none: expected topic, number and events", self._name)
            return
        known = self._next
        if known is not None and number < known:
            return
        if number > (known or 0):
            self.gaps += 1
            if known is not None:
                self.lost += number - known
                logger.warning("%d messages of %s were lost before number %d", number - known, self._name, number)
                self._clear()
        self._next = number + 1
        try:
            for told in self.read(frames):
                self._put(told)
        except DynamoException as error:
            logger.warning("message %d of %s cannot be read: %s", number, self._name, error)

    def _clear(self) -> None:
        """Who missed an event does not know what is held."""
        self._put(self._numbered(Cleared(), self.dp_rank, "device"))

    def read(self, frames: Sequence[bytes]) -> list[WorkerKvEvent]:
        """The events of one message, as this worker's. Raises `InvalidArgument`."""
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
            raise InvalidArgument(f"{len(token_ids)} tokens for blocks of {sum(sizes)} together")
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
    """Follows one engine's sockets until it is cancelled."""

    def __init__(
        self,
        events: EngineEvents,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        gate: asyncio.Event | None = None,
    ) -> None:
        """Nothing is read before the `gate` opens: what another indexer knows may have to come first.

        Raises `InvalidArgument` for an endpoint that is none.
        """
        self.endpoint = check_endpoint(endpoint)
        self.replay_endpoint = None if replay_endpoint is None else check_endpoint(replay_endpoint)
        self.events = events
        self.status = Status.PENDING
        self.error: str | None = None
        self._gate = gate

    async def run(self) -> None:
        """Connects, again and again if the engine comes late, and reads what it says."""
        import zmq

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
                    self.events.hear(frames)
        except asyncio.CancelledError:
            self.status = Status.PAUSED
            raise
        except zmq.ZMQError as error:
            self.status, self.error = Status.FAILED, str(error)
            logger.warning("the KV events of %s cannot be followed: %s", self.endpoint, error)

    async def _replay(self, context: Any, start: int) -> None:
        """Asks for what was missed. What does not come in time is lost."""
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
                self.events.hear(replayed(frames))
        except TimeoutError:
            logger.warning("%s does not tell again what was missed from number %d on", self.replay_endpoint, start)
        finally:
            socket.close()


def replayed(frames: Sequence[bytes]) -> Sequence[bytes]:
    """A message that was told again, as it was at first: some engines put an empty frame before its three."""
    return frames[1:] if len(frames) == ENVELOPE_FRAMES and not frames[0] else frames


def number_of(frames: Sequence[bytes]) -> int | None:
    """The number of a message; None for one that is none, and for the end of a replay."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        return None
    (number,) = struct.unpack(">q", frames[-2])
    return None if number < 0 else int(number)


def check_endpoint(endpoint: str) -> str:
    """Itself. Raises `InvalidArgument` for what ZMQ cannot connect to."""
    scheme, found, rest = endpoint.partition("://")
    if not found:
        raise InvalidArgument(f"invalid ZMQ endpoint `{endpoint}`: missing scheme")
    if scheme not in SCHEMES or not rest:
        raise InvalidArgument(f"invalid ZMQ endpoint `{endpoint}`: expected {', '.join(SCHEMES)} and an address")
    return endpoint
