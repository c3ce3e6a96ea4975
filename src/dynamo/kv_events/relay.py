"""KV event relay: conversion of an engine's ZMQ cache events into our events.

The format is vLLM's: three frames, topic, number and msgpack of `[time, [events], dp_rank]`. An event is a map with a
`type`, or an array that begins with it.
"""

import contextlib
import logging
import struct
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from dynamo.core.codec import UNREADABLE, msgpack_decode
from dynamo.core.errors import DynamoException, InvalidArgument
from dynamo.protocols.kv_events import Cleared, KvEvent, Removed

logger = logging.getLogger(__name__)

TIERS = {
    "GPU": "device",
    "CPU": "host_pinned",
    "CPU_PINNED": "host_pinned",
    "STORAGE": "disk",
    "DISK": "disk",
    "REMOTE": "external",
}
"""Engine names of storage tiers, and ours."""

ARRAYS = {
    "BlockStored": (
        "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
        "extra_keys", "group_idx",
    ),
    "BlockRemoved": ("type", "block_hashes", "medium"),
    "AllBlocksCleared": ("type",),
}  # fmt: skip
"""Fields of events in array form."""

UNREAD_MAX = 100_000  # Messages queued by ZMQ, as upstream.

MakeStored = Callable[..., KvEvent | None]
"""Factory of an event from tokens, block sizes, hashes, parent, adapter and images; None to publish nothing."""

IMAGE_DIGITS, IMAGE_ZEROS = 16, "0" * 48
"""An image's key is the frontend's hash of it, in hexadecimal and zero-padded; other keys are ignored."""


@dataclass(frozen=True, slots=True)
class Relayed:
    """One event, and its rank."""

    event: KvEvent
    dp_rank: int
    tier: str


def relayed(payload: bytes, block_tokens: int, dp_rank: int, make_stored: MakeStored) -> list[Relayed]:
    """Return the events of one message; `dp_rank` is the default for messages without one. Raise `InvalidArgument`."""
    try:
        batch = msgpack_decode(payload)
    except UNREADABLE as error:
        raise InvalidArgument(f"not msgpack: {error}") from None
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise InvalidArgument(f"{str(batch)[:80]}: expected [time, [events], dp_rank]")
    rank = batch[2] if len(batch) > 2 and isinstance(batch[2], int) else dp_rank
    found: list[Relayed] = []
    for one in batch[1]:
        fields = _fields(one)
        event = _event(fields, block_tokens, make_stored)
        if event is not None:
            found.append(Relayed(event, rank, TIERS.get(str(fields.get("medium") or "GPU").upper(), "external")))
    return found


@asynccontextmanager
async def subscribed(endpoint: str, topic: str = "") -> AsyncIterator[tuple[Any, Any]]:
    """Yield a ZMQ context, and its socket subscribed to an engine's messages. Raise `ZMQError`."""
    import zmq
    import zmq.asyncio

    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    try:
        socket.setsockopt(zmq.RCVHWM, UNREAD_MAX)
        socket.setsockopt(zmq.LINGER, 0)
        socket.subscribe(topic)
        socket.connect(endpoint)
        yield context, socket
    finally:
        socket.close()
        context.term()


class KvEventRelay:
    """Relay the events of one engine until cancelled."""

    def __init__(
        self,
        endpoint: str,
        topic: str,
        *,
        block_tokens: int,
        dp_rank: int,
        make_stored: MakeStored,
        put: Callable[[KvEvent, int, str], None],
    ) -> None:
        self._endpoint = endpoint
        self._topic = topic
        self._block_tokens = block_tokens
        self._dp_rank = dp_rank
        self._make_stored = make_stored
        self._put = put
        self._next: int | None = None

    async def run(self) -> None:
        """Connect, with retries until the engine is available, and relay its messages."""
        async with subscribed(self._endpoint, self._topic) as (_, socket):
            while True:
                self.process(await socket.recv_multipart())

    def process(self, frames: Sequence[bytes]) -> None:
        """Process one message; a malformed one is logged and skipped as a whole."""
        if len(frames) != 3 or len(frames[1]) != 8:
            logger.warning("malformed KV event from %s: expected [topic, sequence, payload]", self._endpoint)
            return
        (number,) = struct.unpack(">Q", frames[1])
        if self._next is not None and number > self._next:
            logger.warning("%d messages from %s were lost before %d", number - self._next, self._endpoint, number)
        self._next = number + 1
        try:
            events = relayed(frames[2], self._block_tokens, self._dp_rank, self._make_stored)
        except DynamoException as error:
            logger.warning("malformed message %d from %s: %s", number, self._endpoint, error)
            return
        for one in events:
            self._put(one.event, one.dp_rank, one.tier)


def _fields(event: Any) -> Mapping[str, Any]:
    if isinstance(event, list) and event and event[0] in ARRAYS:
        return dict(zip(ARRAYS[event[0]], event, strict=False))
    if isinstance(event, dict) and event.get("type") in ARRAYS:
        return event
    raise InvalidArgument(f"event {str(event)[:80]}: expected one of {', '.join(ARRAYS)}")


def _event(fields: Mapping[str, Any], block_tokens: int, make_stored: MakeStored) -> KvEvent | None:
    if fields["type"] == "AllBlocksCleared":
        return Cleared()
    if fields.get("group_idx") not in (None, 0):  # Blocks of other attention groups repeat the same tokens.
        return None
    try:
        hashes = [hash_of(one) for one in fields["block_hashes"]]
        if fields["type"] == "BlockRemoved":
            return Removed(hashes)
        size, parent = fields["block_size"], fields.get("parent_block_hash")
        if size != block_tokens:
            logger.warning("KV blocks not published: the engine's have %s tokens, expected %d", size, block_tokens)
            return None
        return make_stored(
            fields["token_ids"], [size] * len(hashes), hashes, None if parent is None else hash_of(parent),
            lora_name=fields.get("lora_name"), block_mm_infos=shown_in(fields.get("extra_keys")),
        )  # fmt: skip
    except (KeyError, TypeError) as error:
        raise InvalidArgument(f"event {str(fields)[:80]}: {error}") from None


def shown_in(extra_keys: Any) -> list[Any] | None:
    """Return the media of each block from an engine's extra keys by block; None if no block has media.

    A key is an image if it is the frontend's hash of one, or begins with it. Other keys, such as salts and adapters,
    are ignored.
    """
    if not isinstance(extra_keys, list):
        return None
    infos = [_shown(keys) if isinstance(keys, list) else None for keys in extra_keys]
    return infos if any(info is not None for info in infos) else None


def _shown(keys: list[Any]) -> dict[str, Any] | None:
    objects = []
    for key in keys:
        name = key[0] if isinstance(key, list) and key else key
        if isinstance(name, str) and len(name) > IMAGE_DIGITS and name[IMAGE_DIGITS:] == IMAGE_ZEROS:
            with contextlib.suppress(ValueError):
                objects.append({"mm_hash": int(name[:IMAGE_DIGITS], 16), "offsets": []})
    return {"mm_objects": objects} if objects else None


def hash_of(value: int | bytes) -> int:
    """Return an engine's block hash as 64 bits: the last eight bytes of a longer one. Raise `InvalidArgument`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value & (1 << 64) - 1
    if isinstance(value, bytes) and value:
        return int.from_bytes(value[-8:], "big")
    raise InvalidArgument(f"block hash {value!r}: expected a number or bytes")
