"""Arguments: a call's JSON object, written parameter by parameter from formats that are not JSON. Pure.

A string is written as it arrives. A value of another type is written once it is complete, because only then its type is
decided; if it breaks off it is left out.
"""

from typing import Protocol

from dynamo.parsers.tool_calls.reader import Landmarks, Reader, Reading, Write
from dynamo.parsers.tool_calls.schemas import NULLS, STRING, typed_json
from dynamo.parsers.tool_calls.values import escaped, quoted

NULL_CHARS_MAX = 16  # Longer text, white space included, is not parsed as `null`.


class Arguments:
    """Writer of the object."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._before = "{"

    @property
    def is_empty(self) -> bool:
        """Whether nothing was written yet."""
        return self._before == "{"

    def key(self, name: str) -> None:
        """Write a key; its value is written next."""
        self._write(f"{self._before}{quoted(name)}:")
        self._before = ","

    def put(self, text: str) -> None:
        """Write a value, or a part of it."""
        self._write(text)

    def value(self, name: str) -> Write:
        """Return a writer of a value, which writes the key before the first text of it."""
        is_new = True

        def write(text: str) -> None:
            nonlocal is_new
            if text:
                if is_new:
                    self.key(name)
                is_new = False
                self.put(text)

        return write

    def close(self) -> None:
        """Write the end of the object."""
        self._write("{}" if self.is_empty else "}")

    def parameter(self, name: str, types: frozenset[str], *, is_framed: bool = False) -> "Parameter":
        """Return a parameter whose text follows. Framed text is on lines of its own."""
        if types == STRING or types == STRING | {"null"}:
            return StringArgument(self, name, is_nullable="null" in types, is_framed=is_framed)
        return Typed(self, name, types, is_framed=is_framed)


class Parameter(Protocol):
    """A parameter whose text is being read."""

    def piece(self, text: str) -> None:
        """Add more of its text."""

    def end(self, *, is_whole: bool) -> None:
        """End its text."""


class StringArgument:
    """A string."""

    def __init__(self, arguments: Arguments, name: str, *, is_nullable: bool, is_framed: bool) -> None:
        self._arguments = arguments
        self._name = name
        self._is_nullable = is_nullable
        self._is_framed = is_framed
        self._is_first = True
        self._has_begun = False
        self._held = ""

    def piece(self, text: str) -> None:
        """See `Parameter.piece`."""
        if self._is_first and self._is_framed:
            text = text.removeprefix("\n")
        self._is_first = False
        text = self._held + text
        self._held = ""
        if self._is_nullable and not self._has_begun and may_be_null(text):
            self._held = text
            return
        if self._is_framed and text.endswith("\n"):
            text, self._held = text[:-1], "\n"
        self._put(text)

    def end(self, *, is_whole: bool) -> None:
        """See `Parameter.end`."""
        if not self._has_begun and self._is_nullable and self._held.strip() in NULLS:
            self._arguments.key(self._name)
            self._arguments.put("null")
            return
        if not is_whole and not self._has_begun and not self._held:
            return
        self._put(self._held.removesuffix("\n") if self._is_framed else self._held)
        if not self._has_begun:
            self._begin()
        self._arguments.put('"')

    def _put(self, text: str) -> None:
        if text:
            if not self._has_begun:
                self._begin()
            self._arguments.put(escaped(text))

    def _begin(self) -> None:
        self._has_begun = True
        self._arguments.key(self._name)
        self._arguments.put('"')


class Typed:
    """A value of another type."""

    def __init__(self, arguments: Arguments, name: str, types: frozenset[str], *, is_framed: bool) -> None:
        self._arguments = arguments
        self._name = name
        self._types = types
        self._is_framed = is_framed
        self._parts: list[str] = []

    def piece(self, text: str) -> None:
        """See `Parameter.piece`."""
        self._parts.append(text)

    def end(self, *, is_whole: bool) -> None:
        """See `Parameter.end`."""
        if not is_whole:
            return
        text = "".join(self._parts)
        if self._is_framed:
            text = text.removeprefix("\n").removesuffix("\n")
        self._arguments.key(self._name)
        self._arguments.put(typed_json(text, self._types))


def may_be_null(text: str) -> bool:
    """Return whether a text may still turn out to be `null`."""
    return len(text) <= NULL_CHARS_MAX and any(null.startswith(text.strip()) for null in NULLS)


def read_parameter(reader: Reader, parameter: Parameter, ends: Landmarks) -> Reading[str]:
    """Read the text of a parameter up to one of `ends`; return that, or an empty string if the text breaks off."""
    end = yield from reader.until(ends, parameter.piece)
    parameter.end(is_whole=bool(end))
    return end
