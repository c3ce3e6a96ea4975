"""Envelope: format of an event on ZMQ, compatible with Dynamo.

Four frames: topic · publisher id, u64 · sequence, u64 · `0x01`, u32 length, msgpack map. Numbers are big-endian.
"""

import struct

import msgspec

from dynamo.core.codec import UNREADABLE
from dynamo.core.errors import InvalidArgument
from dynamo.runtime.discovery.base import new_id

VERSION = 1
PUBLISHER_ID_BITS = 53  # As in Dynamo: exact in every JSON reader.
_U64 = struct.Struct(">Q")
_HEAD = struct.Struct(">BI")


def new_publisher_id() -> int:
    """Return a random publisher id."""
    return new_id() >> (63 - PUBLISHER_ID_BITS) | 1


class EventEnvelope(msgspec.Struct):
    """Map in the last frame."""

    publisher_id: int
    sequence: int
    published_at: int
    """Milliseconds since the Unix epoch."""
    topic: str
    payload: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(EventEnvelope).decode


def pack(envelope: EventEnvelope, sent_as: bytes | None = None) -> list[bytes]:
    """Return the four frames; the first is the subscription topic, `sent_as` or else the envelope's topic."""
    body = _encode(envelope)
    return [
        envelope.topic.encode() if sent_as is None else sent_as,
        _U64.pack(envelope.publisher_id),
        _U64.pack(envelope.sequence),
        _HEAD.pack(VERSION, len(body)) + body,
    ]


def unpack(frames: list[bytes]) -> EventEnvelope:
    """Return the envelope of four frames. Raise `InvalidArgument` for anything else."""
    if len(frames) != 4 or len(frames[3]) < _HEAD.size:
        raise InvalidArgument(f"malformed event: {len(frames)} frames: expected topic, publisher, sequence, body")
    version, size = _HEAD.unpack_from(frames[3])
    body = frames[3][_HEAD.size :]
    if version != VERSION or size != len(body):
        raise InvalidArgument(f"malformed event body: version {version}, {len(body)} bytes, length field {size}")
    try:
        envelope = _decode(body)
    except UNREADABLE as error:
        raise InvalidArgument(f"malformed event body: {error}") from None
    ids = (_U64.pack(envelope.publisher_id), _U64.pack(envelope.sequence))
    if (frames[1], frames[2]) != ids:
        raise InvalidArgument("malformed event: frames and envelope differ in publisher or sequence")
    return envelope
