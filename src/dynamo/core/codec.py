"""Codec: JSON and msgpack by msgspec, with encoders and decoders that are created once."""

import functools
from typing import Any, TypeVar

import msgspec

from dynamo.core.errors import InvalidArgument

T = TypeVar("T")

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions of decoding untrusted bytes; msgspec raises other types for invalid UTF-8 and excessive nesting."""

REWRITTEN_VALUES_MAX = 20_000
"""Values that are rewritten on the event loop, in some ten milliseconds."""

JSON = "json"
MSGPACK = "msgpack"

json_encode = msgspec.json.Encoder().encode
msgpack_encode = msgspec.msgpack.Encoder().encode
json_decode = msgspec.json.Decoder().decode
"""Decode JSON text to plain values; raises one of `UNREADABLE`."""
msgpack_decode = msgspec.msgpack.Decoder().decode
"""Decode msgpack to plain values; raises one of `UNREADABLE`."""


@functools.cache
def json_decoder(kind: type[T]) -> "msgspec.json.Decoder[T]":
    """Return the decoder of one type; keep it where it is used often."""
    return msgspec.json.Decoder(kind)


@functools.cache
def msgpack_decoder(kind: type[T]) -> "msgspec.msgpack.Decoder[T]":
    """Return the decoder of one type; keep it where it is used often."""
    return msgspec.msgpack.Decoder(kind)


def encode_client_json(value: Any) -> bytes:
    """Encode a value that contains JSON of a client as msgpack; integers that msgpack cannot represent become floating-point numbers.

    Schemas may have such bounds, and Rust's serde_json reads them as doubles. Raises `OverflowError` for one beyond a double, and if
    the value has more than `REWRITTEN_VALUES_MAX` parts: rewriting it would block the event loop.
    """
    try:
        return msgpack_encode(value)
    except OverflowError:
        return msgpack_encode(_with_doubles(value, [REWRITTEN_VALUES_MAX]))


def _with_doubles(value: Any, left: list[int]) -> Any:
    """Return a value with doubles in place of integers of more than 64 bits; `left` counts the parts that may be rewritten."""
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else float(value)
    if isinstance(value, dict | list | tuple):
        left[0] -= len(value)
        if left[0] < 0:
            raise OverflowError(
                f"an integer of more than 64 bits in a request of more than {REWRITTEN_VALUES_MAX} values"
            )
        if isinstance(value, dict):
            return {name: _with_doubles(one, left) for name, one in value.items()}
        return [_with_doubles(one, left) for one in value]
    if isinstance(value, msgspec.Struct):
        fields = {name: _with_doubles(getattr(value, name), left) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **fields)
    return value


def encode(value: Any, codec: str) -> bytes:
    """Encode a value in the named codec. Raises `InvalidArgument` for an unknown codec or an unsupported value."""
    try:
        if codec == MSGPACK:
            return msgpack_encode(value)
        if codec == JSON:
            return json_encode(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"cannot be written as {codec}: {error}") from error
    raise InvalidArgument(f"unknown codec {codec!r}: expected json or msgpack")


def decode(data: bytes | memoryview, codec: str, kind: Any = Any) -> Any:
    """Decode `data` to a value of type `kind`. Raises `InvalidArgument` if it is not one."""
    try:
        if codec == MSGPACK:
            return msgpack_decoder(kind).decode(data)
        if codec == JSON:
            return json_decoder(kind).decode(data)
    except UNREADABLE as error:
        raise InvalidArgument(f"not a valid {codec} message: {error}") from error
    raise InvalidArgument(f"unknown codec {codec!r}: expected json or msgpack")
