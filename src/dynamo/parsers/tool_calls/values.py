"""Values: JSON written while it is read, such that it can be completed at any time. Pure.

    {"city": "Os      is written as it arrives; if the text ends here, `"}` is added
    , "da             is held back: a key is written when its value begins, a number when it is complete

Deviations from JSON are accepted where they have one meaning: `True`, `False` and `None`, single quotes, a trailing
comma, line breaks and stray backslashes in strings. The output is always JSON.
"""

import json
import re
from functools import cache
from typing import NamedTuple, TypeVar

from dynamo.parsers.tool_calls.reader import Landmarks, Reader, Reading, Write, ignore, landmarks

T = TypeVar("T")

DEPTH_MAX = 500  # Deeper than any tool's arguments, and below the limits of JSON readers.
SCALAR_CHARS_MAX = 4096  # Longer than any number; longer text is an error.

CLOSERS = {"{": "}", "[": "]"}
WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
SCALAR = re.compile(r"[\w+\-.]*")
TAIL = "]}{[,; "  # Characters, besides line breaks, between the last string of a call and the next call.
TAIL_CHARS_MAX = 64  # Longer than the end of any call's arguments.
STRING_FOLLOWERS = (",", "}", "]", ":", "")  # What may follow the closing quote of a string, white space aside.
HEX = re.compile(r"[0-9a-fA-F]{4}")
CONTROLS = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def quoted(text: str) -> str:
    """Return a string as JSON."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Return the inside of a string as JSON; equal for a text and for its concatenated parts."""
    return quoted(text)[1:-1]


@cache
def plain(quote: str, marks: Landmarks | None) -> re.Pattern[str]:
    """Return the run of literal characters in a string that begin no marker."""
    firsts = {quote[0], '"', "\\", *(mark[0] for mark in marks.texts)} if marks is not None else {quote[0], '"', "\\"}
    return re.compile(f"[^\\x00-\\x1f{''.join(map(re.escape, sorted(firsts)))}]*")


class Values:
    """Reader of JSON and of the deviations accepted from models.

    A string may contain the text of a marker. A string that is never closed would thus hide the end of its call and the
    calls after it. So a marker in a string is text only if the string is closed later, by a quote with a comma, a colon
    or a closing bracket after it; otherwise the string, and everything open around it, ends at the marker.
    """

    quotes: Landmarks = landmarks('"', "'")

    def __init__(self, reader: Reader, marks: Landmarks | None = None) -> None:
        """`marks`: the markers of the surrounding format."""
        self.reader = reader
        self.marks = marks

    def value(self, write: Write) -> Reading[bool]:
        """Write the value that begins here, completed if it breaks off; return whether it was complete."""
        reader = self.reader
        opened: list[str] = []
        before = ""
        while True:
            before += yield from reader.space()
            quote = yield from reader.at_any(self.quotes)
            char = yield from reader.peek()
            if not quote and char in CLOSERS and len(opened) < DEPTH_MAX:
                reader.skip()
                opened.append(CLOSERS[char])
                write(before + char)
                following = yield from self._first_of(opened, write)
            else:
                if quote:
                    reader.skip(len(quote))
                    write(before + '"')
                    whole = yield from self.string(quote, write)
                    write('"')
                else:
                    scalar = yield from self.scalar()
                    whole = bool(scalar)
                    write(before + scalar if whole else "")
                following = (yield from self._next_of(opened, write)) if whole else broken(opened, write)
            if following.is_end:
                return following.is_whole
            before = following.before

    def string(self, quote: str, write: Write) -> Reading[bool]:
        """Write the inside of a string; return whether its end was found."""
        reader, marks = self.reader, self.marks
        text = StringText(write)
        while True:
            yield from reader.run(plain(quote, marks), text.put)
            mark = (yield from reader.at_any(marks)) if marks is not None else ""
            if mark:
                if (yield from self._is_closed(quote)):
                    marks = None
                    continue
                return False  # The string, and everything open around it, is not closed; so the marker is not text.
            char = yield from reader.peek()
            reader.skip(len(char))
            if char == quote and text.ends_with_brace and (yield from reader.at_any(NEXT_ITEM)):
                return False  # The quote opens the next call's first key; this string was not closed.
            if not char or char == quote:
                text.flush()
                return bool(char)
            if char == "\\":
                text.flush()
                if not (yield from self._escape(write)):
                    return False
            elif char < " ":
                text.hold(CONTROLS.get(char) or f"\\u{ord(char):04x}")
            else:
                text.put('\\"' if char == '"' else char)

    def _is_closed(self, quote: str) -> Reading[bool]:
        """Return whether the string at this position is closed before something that is no JSON. Consumes nothing."""
        reader = self.reader
        tape: list[str] = []
        inside = _INSIDE[quote]
        while True:
            yield from reader.run(inside, tape.append)
            char = yield from reader.peek()
            reader.skip(len(char))
            tape.append(char)
            if char != "\\":
                break
            escaped_char = yield from reader.peek()
            reader.skip(len(escaped_char))
            tape.append(escaped_char)
        closed = char == quote
        if closed:
            tape.append((yield from reader.space()))
            closed = (yield from reader.peek()) in STRING_FOLLOWERS
        reader.restore("".join(tape))
        return closed

    def key(self) -> Reading[str]:
        """Return the key that begins here, as JSON; empty if it is none or breaks off."""
        quote = yield from self.reader.at_any(self.quotes)
        if not quote:
            return ""
        self.reader.skip(len(quote))
        parts = ['"']
        whole = yield from self.string(quote, parts.append)
        return "".join([*parts, '"']) if whole else ""

    def scalar(self) -> Reading[str]:
        """Return the number or word that begins here, as JSON; empty if it is neither."""
        word = yield from self.reader.word(SCALAR)
        if (yield from self.reader.peek()) == "" and not self.ends_with_text:
            return ""
        return scalar_json(word)

    ends_with_text = False
    """Whether the end of the text may end a number: it may if the text is one value."""

    def text(self, write: Write) -> Reading[bool]:
        """Write the string that begins here, unescaped; return whether it is one and complete."""
        inside = yield from self.key()
        if not inside:
            return False
        write(str(json.loads(inside)))
        return True

    def _first_of(self, opened: list[str], write: Write) -> Reading["_Following"]:
        """Read the text after an opening brace or bracket."""
        space = yield from self.reader.space()
        if (yield from self.reader.peek()) == opened[-1]:
            self.reader.skip()
            write(space + opened.pop())
            return (yield from self._next_of(opened, write))
        return (yield from self._member(opened, space, write))

    def _next_of(self, opened: list[str], write: Write) -> Reading["_Following"]:
        """Read the text after a value: closing brackets, and then the next member."""
        reader = self.reader
        while opened:
            space = yield from reader.space()
            char = yield from reader.peek()
            if char == ",":
                reader.skip()
                after = yield from reader.space()
                char = yield from reader.peek()
                if char != opened[-1]:
                    return (yield from self._member(opened, space + "," + after, write))
            if char != opened[-1]:
                return broken(opened, write)
            reader.skip()
            write(space + opened.pop())
        return _Following(is_end=True, is_whole=True)

    def _member(self, opened: list[str], before: str, write: Write) -> Reading["_Following"]:
        """Return the text to write before the value of the member that begins here."""
        if opened[-1] == "]":
            return _Following(before=before)
        key = yield from self.key()
        if key:
            space = yield from self.reader.space()
            if (yield from self.reader.peek()) == ":":
                self.reader.skip()
                return _Following(before=before + key + space + ":")
        return broken(opened, write)

    def _escape(self, write: Write) -> Reading[bool]:
        """Read the text after a backslash; return False at the end of the text."""
        char = yield from self.reader.peek()
        if char in '"\\/bfnrt':
            self.reader.skip(len(char))
            write("\\" + char if char else "")
            return bool(char)
        if char == "'":
            self.reader.skip()
            write(char)
        elif char == "u":
            self.reader.skip()
            return (yield from self._unicode(write))
        else:
            write("\\\\")  # A backslash that escapes nothing is kept as a literal backslash.
        return True

    def _unicode(self, write: Write) -> Reading[bool]:
        """Read the text after a backslash and `u`. Half a surrogate pair waits for its other half."""
        code = yield from self._hex()
        if len(code) < 4:
            at_end = not (yield from self.reader.peek())
            write("" if at_end else "\\\\u" + code)
            return not at_end
        if not "d800" <= code.lower() <= "dfff":
            write("\\u" + code)
            return True
        is_high = code.lower() < "dc00"
        if not is_high or (yield from self.reader.at_any(_UNICODE)) == "":
            if (yield from self.reader.peek()) == "":
                return False
            write("\\ufffd")
            return True
        self.reader.skip(2)
        low = yield from self._hex()
        if len(low) == 4 and "dc00" <= low.lower() <= "dfff":
            write(f"\\u{code}\\u{low}")
            return True
        if len(low) < 4 and (yield from self.reader.peek()) == "":
            return False
        is_surrogate = len(low) == 4 and "d800" <= low.lower() <= "dfff"
        write("\\ufffd" + ("\\ufffd" if is_surrogate else "\\u" + low if len(low) == 4 else "\\\\u" + low))
        return True

    def _hex(self) -> Reading[str]:
        """Read up to four hexadecimal digits."""
        digits = ""
        while len(digits) < 4:
            char = yield from self.reader.peek()
            if not char or char not in "0123456789abcdefABCDEF":
                break
            self.reader.skip()
            digits += char
        return digits


class StringText:
    """Output of the inside of a string.

    Brackets and white space at its end are held back until more follows: if the string breaks off at a marker, they
    close the surrounding values, and are dropped.
    """

    __slots__ = ("_held", "_write")

    def __init__(self, write: Write) -> None:
        self._write = write
        self._held = ""

    @property
    def ends_with_brace(self) -> bool:
        """Whether the text so far ends with an opening brace."""
        return self._held.endswith("{")

    def put(self, text: str) -> None:
        """Write more of the text."""
        kept = text.rstrip(TAIL)
        if kept:
            self._write(self._held + kept)
            self._held = ""
        self.hold(text[len(kept) :])

    def hold(self, text: str) -> None:
        """Write text once other text follows it."""
        self._held += text
        if len(self._held) > TAIL_CHARS_MAX:
            self.flush()

    def flush(self) -> None:
        """Write the text held back."""
        held, self._held = self._held, ""
        if held:
            self._write(held)


_INSIDE = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}


class _Following(NamedTuple):
    """Result of reading the text after a value."""

    is_end: bool = False
    """Whether the outermost value ended."""
    is_whole: bool = True
    before: str = ""
    """Text to write before the next value."""


def broken(opened: list[str], write: Write) -> _Following:
    """End a value that cannot be continued, and all open brackets."""
    write("".join(reversed(opened)))
    return _Following(is_end=True, is_whole=False)


_UNICODE = landmarks("\\u")
NEXT_ITEM = landmarks('name"')
"""Text after the opening quote of a call's first key."""


def scalar_json(word: str) -> str:
    """Return a number or word as JSON; empty if it is neither."""
    if word in WORDS:
        return WORDS[word]
    return word if len(word) <= SCALAR_CHARS_MAX and NUMBER.fullmatch(word) else ""


def whole_json(text: str) -> str | None:
    """Return a text that is exactly one value, as JSON; None if it is not."""
    reader = Reader(text, is_over=True)
    values = Values(reader)
    values.ends_with_text = True
    parts: list[str] = []
    if not finished(values.value(parts.append)):
        return None
    finished(reader.space())
    return None if reader.kept_chars else "".join(parts).strip()


def object_json(text: str) -> str:
    """Return the JSON object at the beginning of a text, completed; an empty one if there is none."""
    values = Values(Reader(text.lstrip(), is_over=True))
    if not text.lstrip().startswith("{"):
        return "{}"
    parts: list[str] = []
    finished(values.value(parts.append))
    return "".join(parts)


def finished(reading: Reading[T]) -> T:
    """Return the result of a reading of a complete text."""
    try:
        next(reading)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("a reading waited for more text after the end")


def object_value(values: Values, write: Write) -> Reading[bool]:
    """Write the arguments that begin here as one JSON object, whatever they are; return whether they were complete.

    A string contains the object as text; anything else counts as an empty object.
    """
    yield from values.reader.space()
    char = yield from values.reader.peek()
    if char == "{":
        return (yield from values.value(write))
    if char in ('"', "'"):
        parts: list[str] = []
        whole = yield from values.text(parts.append)
        write(object_json("".join(parts)))
        return whole
    write("{}")
    return bool(char) and (yield from values.value(ignore))
