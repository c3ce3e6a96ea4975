"""Received messages: decodes a client's message without blocking the event loop.

The decoder holds the interpreter lock until it is done. gRPC therefore delivers bytes. A short message is decoded at once. The
fields of a longer one are counted first, by their tags alone: it is decoded at once if it has few, in a thread if it has
more, and refused beyond the limits, which bound the time of decoding and of what follows.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from dynamo.core.errors import InvalidArgument
from dynamo.core.threads import in_few_threads
from dynamo.grpc.messages import CLASSES

INLINE_BYTES = 4 << 10  # Decoded within 2 ms, whatever its fields are.
FEW_FIELDS_BYTES, FEW_FIELDS, FEW_NUMBERS = 256 << 10, 256, 16 << 10
"""Longer messages, and those with more fields or numbers, are decoded in a thread."""
FIELDS_MAX = 64 << 10
"""Fields of a message, those of its parts, and unknown ones: each takes up to 0.5 µs to decode."""
NUMBERS_MAX = 1 << 20
"""Numbers in typed contents. Raw contents, which are not decoded here, are limited by the size of messages only."""
KSERVE_THREADS = 1  # The decoder holds the interpreter lock, so that more would not be faster.

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
"""Wire types. The others are groups, which the protocol does not have."""
SIZES = {FieldDescriptor.TYPE_FLOAT: 4, FieldDescriptor.TYPE_DOUBLE: 8}
NOT_PACKED = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


class WireField(NamedTuple):
    """One field, as far as counting needs it."""

    name: str
    number_bytes: int = 0
    """Fewest bytes of a number in a packed field; 0 for texts and messages."""
    fields: "Mapping[int, WireField] | None" = None
    """Fields of the message in it."""


class TooManyFields(Exception):
    """More fields or numbers than the limit; the message names the field."""


class MalformedFields(Exception):
    """Not a message."""


async def received(kind: str, data: bytes) -> Any:
    """Return a message of the kind. Raise `InvalidArgument` for what is none, or has too many fields or numbers."""
    if len(data) <= INLINE_BYTES or has_few_fields(kind, data):
        return _decoded(kind, data)
    return await in_few_threads(lambda: _checked(kind, data), "kserve", KSERVE_THREADS)


def has_few_fields(kind: str, data: bytes) -> bool:
    """Return whether a message can be decoded on the event loop."""
    if len(data) > FEW_FIELDS_BYTES:
        return False
    try:
        count_fields(data, wire_fields(kind), FEW_FIELDS, FEW_NUMBERS)
    except (TooManyFields, MalformedFields):
        return False
    return True


def _checked(kind: str, data: bytes) -> Any:
    try:
        count_fields(data, wire_fields(kind), FIELDS_MAX, NUMBERS_MAX)
    except TooManyFields as error:
        raise InvalidArgument(str(error), param=str(error).partition(":")[0]) from None
    except MalformedFields as error:
        raise InvalidArgument(f"not a {kind}: {error}") from None
    return _decoded(kind, data)


def _decoded(kind: str, data: bytes) -> Any:
    try:
        return CLASSES[kind].FromString(data)
    except DecodeError as error:
        raise InvalidArgument(f"not a {kind}: {error}") from None


@functools.cache
def wire_fields(kind: str) -> Mapping[int, WireField]:
    """Return the fields of a message by number."""
    return _fields_of(CLASSES[kind].DESCRIPTOR)


def _fields_of(descriptor: Descriptor) -> Mapping[int, WireField]:
    found = {}
    for field in descriptor.fields:
        inner, number_bytes = None, 0
        if field.message_type is not None:
            inner = _fields_of(field.message_type)
        elif field.type not in NOT_PACKED:  # One that is not repeated is never packed, and then unknown.
            number_bytes = SIZES.get(field.type, 1)
        found[field.number] = WireField(field.name, number_bytes, inner)
    return found


def count_fields(data: bytes, known: Mapping[int, WireField], fields_max: int, numbers_max: int) -> int:
    """Return the number of fields of a message and of its parts, without reading their values.

    Raise `TooManyFields` as soon as there are more than the maximum, or more numbers, and `MalformedFields`.
    """
    at, end, fields, numbers = 0, len(data), 0, 0
    outer: list[tuple[int, Mapping[int, WireField]]] = []
    try:
        while True:
            while at >= end:
                if at > end:
                    raise MalformedFields(f"a field ends beyond byte {end}")
                if not outer:
                    return fields
                end, known = outer.pop()
            tag, at = _varint(data, at)
            fields += 1
            field = known.get(tag >> 3)
            if fields > fields_max:
                raise TooManyFields(f"{_named(field)}: the message has more than {fields_max} fields and elements")
            wire = tag & 7
            if wire == LENGTH:
                size, at = _varint(data, at)
                if field is not None and field.fields is not None and at + size <= end:
                    outer.append((end, known))
                    end, known = at + size, field.fields
                    continue
                if field is not None and field.number_bytes:
                    numbers += size // field.number_bytes
                    if numbers > numbers_max:
                        problem = f"the message has more than {numbers_max} numbers: send raw_input_contents"
                        raise TooManyFields(f"{field.name}: {problem}")
                at += size
            elif wire == VARINT:
                at = _varint(data, at)[1]
            elif wire in (FIXED64, FIXED32):
                at += 8 if wire == FIXED64 else 4
            else:
                raise MalformedFields(f"field {tag >> 3} has the wire type {wire}")
    except IndexError:
        raise MalformedFields(f"its last field ends after byte {len(data)}") from None


def _named(field: WireField | None) -> str:
    return "unknown fields" if field is None else field.name


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and the place behind it. Raise `IndexError`, and `MalformedFields` for more than ten bytes."""
    byte = data[at]
    if byte < 128:
        return byte, at + 1
    value = shift = 0
    for place in range(at, at + 10):
        byte = data[place]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place + 1
        shift += 7
    raise MalformedFields(f"byte {at}: a number of more than ten bytes")
