"""Strict decoding: decode JSON into Structs that declare every field, with errors that name the place in the body.

    StrictDecoder(MessagesRequest).decode(body)      the Struct, or `InvalidArgument` with `param="messages[2].content"`

For APIs whose requests are nested deeply. A field that no Struct declares is an error at any depth, so that no option
of a client is dropped silently; the code that converts the request checks the values of declared fields.
"""

from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar

import msgspec

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.long_lists import BODY_BYTES, decode_in_parts

MALFORMED = "Failed to deserialize the JSON body into the target type: "
INVALID = "Validation: "
NAMES_SHOWN_MAX = 8  # Maximum number of unknown fields in an error message.
NAME_CHARS_MAX = 80  # Maximum characters of each name in an error message.

S = TypeVar("S", bound=msgspec.Struct)

UNKNOWN_FIELD = "Object contains unknown field "
MISSING_FIELD = "Object missing required field "
WRONG_VALUE = "Invalid value "
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of a body that is not JSON. `ValidationError` is a subclass of the first: catch it before these."""


def fail_to_read(error: Exception, where: str) -> NoReturn:
    """Raise `InvalidArgument` for a body that is not JSON."""
    text = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    raise InvalidArgument(f"{MALFORMED}{text}", param=where or None) from None


def fail(text: str, where: str) -> NoReturn:
    """Raise `InvalidArgument` for msgspec's error text about the value at `where`."""
    what, _, path = text.partition(" - at `$")
    place = joined(where, path.rstrip("`"))
    if what.startswith(UNKNOWN_FIELD):
        name = what.removeprefix(UNKNOWN_FIELD).strip("`")[:NAME_CHARS_MAX]
        raise InvalidArgument(f"{INVALID}Unsupported parameter(s): `{joined(place, name)}`", param=joined(place, name))
    if what.startswith(MISSING_FIELD):
        name = what.removeprefix(MISSING_FIELD).strip("`")
        raise InvalidArgument(f"{MALFORMED}missing field `{joined(place, name)}`", param=joined(place, name))
    if what.startswith(WRONG_VALUE) and place.endswith("type"):
        kind = what.removeprefix(WRONG_VALUE).strip("'")[:NAME_CHARS_MAX]
        raise InvalidArgument(f"{INVALID}{place} `{kind}` is not supported by this release", param=place)
    raise InvalidArgument(f"{MALFORMED}{place + ': ' if place else ''}{what}", param=place or None)


def joined(where: str, path: str) -> str:
    """Return two paths as one; `path` may begin with a dot or a bracket."""
    path = path.lstrip(".")
    return f"{where}.{path}" if where and path and not path.startswith("[") else where + path


def refuse(param: str, why: str = "is not supported by this release") -> NoReturn:
    """Raise `InvalidArgument` for a field that would change the response and is not supported."""
    raise InvalidArgument(f"{INVALID}`{param}` {why}", param=param)


class StrictDecoder(Generic[S]):
    """A decoder of one Struct type that forbids unknown fields."""

    def __init__(self, kind: type[S], on_error: Callable[[str, str], NoReturn] = fail) -> None:
        """Set `on_error`, which raises for an error text of msgspec; an API with its own texts replaces `fail`."""
        self._decoder = msgspec.json.Decoder(kind)
        self._fail = on_error
        self._fields = frozenset(kind.__struct_encode_fields__)

    def decode(self, body: bytes | msgspec.Raw, where: str = "", *, ignore_unknown: bool = False) -> S:
        """Decode the value at `where` of the body. `ignore_unknown` drops unknown fields of the first level."""
        if len(body) >= BODY_BYTES and isinstance(body, bytes | bytearray):
            found = decode_in_parts(body, lambda short: self._decode(short, where, ignore_unknown=ignore_unknown))
            if found is not None:
                return found
        return self._decode(body, where, ignore_unknown=ignore_unknown)

    def _decode(self, body: bytes | msgspec.Raw, where: str, *, ignore_unknown: bool) -> S:
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            text = str(error)
            if where or not text.startswith(UNKNOWN_FIELD) or " - at `" in text:
                self._fail(text, where)
        except UNREADABLE as error:
            fail_to_read(error, where)
        return self._decode(
            self._without_unknown(body, ignore_unknown=ignore_unknown), where, ignore_unknown=ignore_unknown
        )

    def _without_unknown(self, body: bytes | msgspec.Raw, *, ignore_unknown: bool) -> bytes:
        """Return the body without unknown fields if `ignore_unknown`; otherwise raise `InvalidArgument` with their names."""
        try:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        except UNREADABLE as error:
            fail_to_read(error, "")
        unknown = [name for name in fields if name not in self._fields]
        if not ignore_unknown:
            shown = ", ".join(f"`{name[:NAME_CHARS_MAX]}`" for name in unknown[:NAMES_SHOWN_MAX])
            raise InvalidArgument(f"{INVALID}Unsupported parameter(s): {shown}", param=unknown[0][:NAME_CHARS_MAX])
        for name in unknown:
            del fields[name]
        return msgspec.json.encode(fields)
