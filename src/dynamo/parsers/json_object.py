"""JsonObject: streaming reader of a JSON object whose output can be completed to valid JSON at any time. Pure.

    reader = JsonObject()
    reader.feed('{"city": "Os')    '{"city": "Os'
    reader.close()                 '"}'

Model output is accepted as long as it is valid JSON; from the first error on it is ignored. Text that could not be
completed is held back: a comma until something follows it, an incomplete escape. A raw control character in a string is
escaped.
"""

import re
from enum import Enum

_SPACE = re.compile(r"[ \t\r\n]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_BEGUN = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:(?<=[0-9])[eE][+-]?[0-9]*)?)?")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_WORDS = ("true", "false", "null")
_DEPTH_MAX = 500  # Deeper than any tool's arguments, and below the limits of JSON readers.
_NUMBER_CHARS_MAX = 400  # More digits than a double has; a number is held back until it is complete.


class _Awaits(Enum):
    """Tokens allowed next, apart from white space."""

    OBJECT = "the object itself"
    KEY_OR_END = "a first key, or the end of the object"
    KEY = "a key"
    COLON = "a colon"
    VALUE = "a value"
    VALUE_OR_END = "a first value, or the end of the array"
    COMMA_OR_END = "a comma, or the end of the innermost object or array"
    STRING = "more of a string"
    ATOM = "more of a number or word"
    NOTHING = "nothing: the object is complete"
    BROKEN = "nothing: the text was invalid JSON"


class JsonObject:
    """Reader of one object."""

    __slots__ = ("_awaits", "_gap", "_has_begun", "_held", "_is_key", "_open")

    def __init__(self) -> None:
        self._awaits = _Awaits.OBJECT
        self._open: list[str] = []
        """Closing characters of the open objects and arrays."""
        self._has_begun = False
        self._is_key = False
        """Whether the string being read is a key."""
        self._held = ""
        """Beginning of an escape, a number or a word."""
        self._gap: list[str] = []
        """A comma and the white space after it, until something follows."""

    @property
    def is_whole(self) -> bool:
        """Whether the object was closed."""
        return self._awaits is _Awaits.NOTHING

    @property
    def is_broken(self) -> bool:
        """Whether invalid JSON was read."""
        return self._awaits is _Awaits.BROKEN

    @property
    def is_in_string(self) -> bool:
        """Whether the next character belongs to a string."""
        return self._awaits is _Awaits.STRING

    def feed(self, text: str) -> str:
        """Return the text that can be passed on now."""
        text, self._held = self._held + text, ""
        out: list[str] = []
        at = 0
        while at < len(text) and self._awaits not in (_Awaits.NOTHING, _Awaits.BROKEN):
            after = self._step(text, at, out)
            if after == at:
                self._held = text[at:]
                break
            at = after
        return "".join(out)

    def close(self) -> str:
        """Return the text that completes the text passed on so far to an object."""
        awaits, self._awaits = self._awaits, _Awaits.NOTHING
        ends = "".join(reversed(self._open))
        self._open.clear()
        if awaits is _Awaits.OBJECT or (awaits is _Awaits.BROKEN and not self._has_begun):
            return "{}"
        if awaits in (_Awaits.NOTHING, _Awaits.BROKEN):
            return ""
        if awaits is _Awaits.STRING:
            return '"' + (": null" if self._is_key else "") + ends
        if awaits is _Awaits.ATOM:
            return _finished(self._held) + ends
        if awaits is _Awaits.COLON:
            return ": null" + ends
        if awaits is _Awaits.VALUE and not self._gap:
            return "null" + ends
        return ends

    def _step(self, text: str, at: int, out: list[str]) -> int:
        """Read one token. Return the offset of its end, or of its beginning if it is incomplete."""
        if self._awaits is _Awaits.STRING:
            return self._string(text, at, out)
        if self._awaits is _Awaits.ATOM:
            return self._atom(text, at, out)
        space = _SPACE.match(text, at)
        if space is None:
            return self._token(text, at, out)
        if self._gap:
            self._gap.append(space[0])
        elif self._awaits is not _Awaits.OBJECT:
            out.append(space[0])
        return space.end()

    def _token(self, text: str, at: int, out: list[str]) -> int:
        """Read one token that is not white space."""
        char, awaits = text[at], self._awaits
        may_end = awaits in (_Awaits.KEY_OR_END, _Awaits.VALUE_OR_END, _Awaits.COMMA_OR_END)
        may_be_value = awaits in (_Awaits.VALUE, _Awaits.VALUE_OR_END)
        if may_end and char == self._open[-1]:
            self._open.pop()
            self._awaits = _Awaits.COMMA_OR_END if self._open else _Awaits.NOTHING
        elif char == "," and awaits is _Awaits.COMMA_OR_END:
            self._awaits = _Awaits.KEY if self._open[-1] == "}" else _Awaits.VALUE
            self._gap.append(char)
            return at + 1
        elif char == ":" and awaits is _Awaits.COLON:
            self._awaits = _Awaits.VALUE
        elif char == "{" and (may_be_value or awaits is _Awaits.OBJECT) and self._deeper("}"):
            self._awaits = _Awaits.KEY_OR_END
        elif char == "[" and may_be_value and self._deeper("]"):
            self._awaits = _Awaits.VALUE_OR_END
        elif char == '"' and (may_be_value or awaits in (_Awaits.KEY, _Awaits.KEY_OR_END)):
            self._is_key = not may_be_value
            self._awaits = _Awaits.STRING
        elif char in "-0123456789tfn" and may_be_value:
            self._awaits = _Awaits.ATOM
            self._write_gap(out)
            return self._atom(text, at, out)
        else:
            return self._break(text, out)
        self._write_gap(out)
        out.append(char)
        return at + 1

    def _write_gap(self, out: list[str]) -> None:
        out += self._gap
        self._gap.clear()

    def _break(self, text: str, out: list[str]) -> int:
        """Stop at invalid JSON: complete the text that was passed on, and ignore the rest."""
        if self._open:
            out.append(self.close())
        self._awaits = _Awaits.BROKEN
        return len(text)

    def _deeper(self, end: str) -> bool:
        if len(self._open) >= _DEPTH_MAX:
            return False
        self._open.append(end)
        self._has_begun = True
        return True

    def _string(self, text: str, at: int, out: list[str]) -> int:
        plain = _PLAIN.match(text, at)
        if plain is not None:
            out.append(plain[0])
            return plain.end()
        char = text[at]
        if char == '"':
            out.append(char)
            self._awaits = _Awaits.COLON if self._is_key else _Awaits.COMMA_OR_END
            return at + 1
        if char != "\\":
            out.append(f"\\u{ord(char):04x}")
            return at + 1
        escape = _ESCAPE.match(text, at)
        if escape is not None:
            out.append(escape[0])
            return escape.end()
        begun = _ESCAPE_BEGUN.match(text, at)
        if begun is not None and begun.end() == len(text):
            return at
        out.append("\\\\")  # A backslash that escapes nothing is kept as a literal backslash.
        return at + 1

    def _atom(self, text: str, at: int, out: list[str]) -> int:
        """Read a number or a word, which is passed on once it is complete."""
        for word in _WORDS:
            if text.startswith(word, at):
                return self._write_atom(word, at, out)
            if word.startswith(text[at : at + len(word)]):
                return at
        begun = _NUMBER_BEGUN.match(text, at)
        if begun is not None and begun.end() - at <= _NUMBER_CHARS_MAX:
            if begun.end() == len(text):
                return at
            number = _NUMBER.match(text, at)
            if number is not None:
                return self._write_atom(number[0], at, out)
        self._awaits = _Awaits.VALUE
        return self._break(text, out)

    def _write_atom(self, atom: str, at: int, out: list[str]) -> int:
        out.append(atom)
        self._awaits = _Awaits.COMMA_OR_END
        return at + len(atom)


def _finished(begun: str) -> str:
    """Complete a number or word that was cut off; `null` if it is ambiguous."""
    for word in _WORDS:
        if begun and word.startswith(begun):
            return word
    number = _NUMBER.match(begun)
    return number[0] if number is not None else "null"
