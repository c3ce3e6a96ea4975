"""Detokenizer: incremental conversion of token ids to text, from a table of bytes.

A token may hold only part of a character, and text that begins like a stop string may turn out not to be one: both are
held back until later tokens decide. A JSON encoder may use `TokenTable.text_json` directly for every token that is
complete on its own, as long as the request has no stop strings and nothing `is_pending`.
"""

import enum
from codecs import utf_8_decode
from collections.abc import Sequence

import msgspec

REPLACEMENT = "\ufffd"


class Decoding(enum.Enum):
    """Conversion of a tokenizer's tokens to text."""

    BYTE_LEVEL = "every token is bytes"
    BYTE_FALLBACK = "tokens are text, but for one token per byte"
    PLAIN = "every token is text"


class TokenTable:
    """Id to bytes, for one tokenizer and one treatment of its special tokens."""

    def __init__(
        self,
        raw: Sequence[bytes],
        text_json: Sequence[bytes | None],
        skipped: frozenset[int] = frozenset(),
        byte_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`raw` and `text_json` cover all tokens, as `text_json_of` returns them; copying them is cheap."""
        self.raw: list[bytes] = list(raw)
        """Id to bytes; empty for special tokens that are skipped."""
        self.text_json: list[bytes | None] = list(text_json)
        """Id to the JSON-escaped UTF-8 of a token that consists of whole characters; None for other tokens."""
        for token_id in skipped:
            self.raw[token_id] = self.text_json[token_id] = b""
        self.skipped = skipped
        self.byte_ids = byte_ids
        """Byte-fallback tokens of one byte each: in a malformed run of them, every byte is replaced."""


def text_json_of(raw: Sequence[bytes]) -> list[bytes | None]:
    """Return for each token the JSON-escaped UTF-8 of its bytes, None if they are not whole characters."""
    return [_json_or_none(data) for data in raw]


class Detokenizer:
    """The text of one answer: `push` each id, then `flush`; the pieces add up to the text of all ids."""

    __slots__ = ("_bytes", "_held", "_include_stop", "_raw", "_stops", "_table", "is_pending", "stopped_by")

    def __init__(self, table: TokenTable, stop: Sequence[str] = (), *, include_stop: bool = False) -> None:
        self._table = table
        self._raw = table.raw
        self._bytes = b""
        self._held = ""
        self._stops = [_Stop(text) for text in stop]
        self._include_stop = include_stop
        self.is_pending = False
        """Whether text is held back: the next token must go through `push`."""
        self.stopped_by: str | None = None
        """The stop string that ended the text; no text follows it."""

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is final with it."""
        if self.stopped_by is not None or token_id >= len(self._raw):
            return ""
        text = self._decode(token_id, self._raw[token_id])
        if self._stops and text:
            text = self._release(text)
        self.is_pending = bool(self._bytes or self._held)
        return text

    def flush(self) -> str:
        """Return the text held back; an incomplete character becomes U+FFFD."""
        if self.stopped_by is not None:
            return ""
        text, self._bytes = self._replace(self._bytes), b""
        self.is_pending = False
        if not self._stops:
            return text
        released = self._release(text)
        if self.stopped_by is None:
            released, self._held = released + self._held, ""
        return released

    def _decode(self, token_id: int, raw: bytes) -> str:
        """Return the characters that are complete with these bytes."""
        if self._table.byte_ids:
            return self._decode_fallback(token_id, raw)
        data = self._bytes + raw if self._bytes else raw
        text, used = utf_8_decode(data, "replace", False)
        self._bytes = data[used:]
        return text

    def _decode_fallback(self, token_id: int, raw: bytes) -> str:
        if token_id not in self._table.byte_ids:
            if token_id in self._table.skipped:
                return ""  # Ignored: the bytes on both sides of it belong together.
            text, self._bytes = self._replace(self._bytes) + raw.decode("utf-8", "replace"), b""
            return text
        data = self._bytes + raw
        try:
            text, used = utf_8_decode(data, "strict", False)
        except UnicodeDecodeError as error:
            # All bytes up to the malformed one are final; the following bytes may still begin a character.
            end = error.end
            text, used = data[: error.start].decode() + REPLACEMENT * (end - error.start), end
            rest, more = utf_8_decode(data[used:], "replace", False)
            text, used = text + rest, used + more
        self._bytes = data[used:]
        return text

    def _replace(self, data: bytes) -> str:
        """Return the replacement for bytes that form no character."""
        if not data:
            return ""
        return REPLACEMENT * len(data) if self._table.byte_ids else data.decode("utf-8", "replace")

    def _release(self, text: str) -> str:
        """Return the part of the held text and this text that cannot begin a stop string, or all before one."""
        end = len(text) + 1
        found: _Stop | None = None
        longest = 0
        for stop in self._stops:
            at = stop.advance(text)
            if at is not None and (at < end or (at == end and found is not None and len(stop.text) > len(found.text))):
                end, found = at, stop
            longest = max(longest, stop.matched)
        everything = self._held + text
        if found is not None:
            self.stopped_by = found.text
            self._held = ""
            stop_end = len(everything) - len(text) + end
            return everything[: stop_end if self._include_stop else stop_end - len(found.text)]
        cut = len(everything) - longest
        self._held = everything[cut:]
        return everything[:cut]


class _Stop:
    """One stop string and the length of its prefix at the end of the text (Knuth-Morris-Pratt: linear in the text)."""

    __slots__ = ("_borders", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._borders = _borders(text)

    def advance(self, text: str) -> int | None:
        """Scan more text; return the position after the stop string if it is completed in this text."""
        matched = self.matched
        if matched == 0 and self.text[0] not in text:
            return None
        stop, borders = self.text, self._borders
        for position, char in enumerate(text, 1):
            while matched and stop[matched] != char:
                matched = borders[matched - 1]
            if stop[matched] == char:
                matched += 1
                if matched == len(stop):
                    self.matched = 0
                    return position
        self.matched = matched
        return None


def _borders(text: str) -> list[int]:
    """Return for each prefix the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for position in range(1, len(text)):
        while length and text[length] != text[position]:
            length = borders[length - 1]
        if text[length] == text[position]:
            length += 1
        borders[position] = length
    return borders


def json_text(text: str) -> bytes:
    """Encode text as the inside of a JSON string, without the quotes."""
    return msgspec.json.encode(text)[1:-1]


def _json_or_none(raw: bytes) -> bytes | None:
    try:
        escaped = json_text(raw.decode())
    except UnicodeDecodeError:
        return None
    return raw if escaped == raw else escaped  # One object: a vocabulary has a hundred thousand of them.
