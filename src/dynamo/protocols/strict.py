"""Strict decoding: JSON into Structs that know every field, with a mistake named by its place in the body.

    StrictDecoder(MessagesRequest).decode(body)      the Struct, or `InvalidArgument` with `param="messages[2].content"`

For APIs whose requests are nested deeply. A field that no Struct declares is an error at any depth, so that nothing a
client asks for is dropped silently; what a declared field asks for is judged by whoever converts the request.
"""

from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar

import msgspec

from dynamo.core.errors import InvalidArgument

MALFORMED = "Failed to deserialize the JSON body into the target type: "
INVALID = "Validation: "
NAMES_SHOWN_MAX = 8  # An error message names at most so many unknown fields.
NAME_CHARS_MAX = 80  # And this much of each name.

S = TypeVar("S", bound=msgspec.Struct)

UNKNOWN_FIELD = "Object contains unknown field "
MISSING_FIELD = "Object missing required field "
WRONG_VALUE = "Invalid value "
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What a body raises that is no JSON. `ValidationError` is one of the first: catch that before."""


def fail_to_read(error: Exception, where: str) -> NoReturn:
    """Raises `InvalidArgument` for what is no JSON at all."""
    text = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    raise InvalidArgument(f"{MALFORMED}{text}", param=where or None) from None


def fail(text: str, where: str) -> NoReturn:
    """Raises `InvalidArgument` for what msgspec says of a value that lies at `where`."""
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
    """One path made of two; `path` may begin with a dot or a bracket."""
    path = path.lstrip(".")
    return f"{where}.{path}" if where and path and not path.startswith("[") else where + path


def refuse(param: str, why: str = "is not supported by this release") -> NoReturn:
    """Raises `InvalidArgument` for a field that would change the answer and cannot be honoured."""
    raise InvalidArgument(f"{INVALID}`{param}` {why}", param=param)


class StrictDecoder(Generic[S]):
    """Decodes one kind of Struct, which forbids unknown fields."""

    def __init__(self, kind: type[S], tell: Callable[[str, str], NoReturn] = fail) -> None:
        """`tell` raises for what msgspec says of a value, as `fail` does unless an API has words of its own."""
        self._decoder = msgspec.json.Decoder(kind)
        self._tell = tell
        self._fields = frozenset(kind.__struct_encode_fields__)

    def decode(self, body: bytes | msgspec.Raw, where: str = "", *, ignore_unknown: bool = False) -> S:
        """`where` is the place of the value in the whole body. `ignore_unknown` drops unknown fields of the first level."""
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            text = str(error)
            if where or not text.startswith(UNKNOWN_FIELD) or " - at `" in text:
                self._tell(text, where)
        except UNREADABLE as error:
            fail_to_read(error, where)
        return self.decode(self._without_unknown(body, ignore_unknown=ignore_unknown))

    def _without_unknown(self, body: bytes | msgspec.Raw, *, ignore_unknown: bool) -> bytes:
        """The body without its unknown fields where that is wanted; otherwise raises `InvalidArgument` that names them."""
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
