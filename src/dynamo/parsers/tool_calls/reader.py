"""Reader: streamed text, read from front to back by grammars that are written as if all of it were available.

    def greeting(reader: Reader) -> Reading[str]:
        yield from reader.until(HELLO, ignore)      # waits until more text arrives
        return (yield from reader.run(NAME))

A grammar is a generator that yields when it needs more text. Its results do not depend on the chunk boundaries, which it
cannot see: an ambiguous step waits. Text that was read is discarded, so that the text kept is never longer than the
longest landmark, and reading is linear.
"""

import re
from collections.abc import Callable, Generator, Sequence
from functools import cache
from typing import TypeVar

T = TypeVar("T")

Reading = Generator[None, None, T]
"""A reading in progress: yields when it needs more text, returns its result."""

Write = Callable[[str], object]

SPACE = re.compile(r"[ \t\r\n]*")


def ignore(text: str) -> None:
    """Discard the text."""


class Landmarks:
    """Texts that a grammar searches for; if two begin at the same offset, the longer one is found."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(sorted(set(texts), key=lambda text: (-len(text), text)))
        pattern = re.compile("|".join(map(re.escape, self.texts)))
        self.search = pattern.search
        self.match = pattern.match
        self.beginnings = frozenset(text[:length] for text in self.texts for length in range(1, len(text)))
        self.longest = len(self.texts[0])
        firsts = "".join(sorted({re.escape(text[0]) for text in self.texts}))
        self.first = re.compile(f"[{firsts}]").search

    def begun_at(self, text: str, at: int) -> int:
        """Return the offset, from `at` on, at which the end of a text may begin a landmark; its length if there is none."""
        end = len(text)
        found = self.first(text, max(at, end - self.longest + 1))
        while found is not None:
            if text[found.start() :] in self.beginnings:
                return found.start()
            found = self.first(text, found.start() + 1)
        return end


@cache
def landmarks(*texts: str) -> Landmarks:
    """Return the cached set of those texts."""
    return Landmarks(texts)


class Reader:
    """Text of one choice."""

    __slots__ = ("_at", "_text", "is_over")

    def __init__(self, text: str = "", *, is_over: bool = False) -> None:
        self._text = text
        self._at = 0
        self.is_over = is_over
        """Whether no more text will arrive."""

    @property
    def kept_chars(self) -> int:
        """Return the number of characters kept because they were not read yet."""
        return len(self._text) - self._at

    def push(self, text: str) -> None:
        """Add text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def skip(self, count: int = 1) -> None:
        """Skip characters that were peeked at."""
        self._at += count

    def back(self, text: str) -> None:
        """Return to before a landmark that was just read."""
        self._at -= len(text)

    def restore(self, text: str) -> None:
        """Return to before text that was read earlier. Text that is no longer kept is put back."""
        before = self._at - len(text)
        if before >= 0 and self._text.startswith(text, before):
            self._at = before
        else:
            self._text = text + self._text[self._at :]
            self._at = 0

    def peek(self) -> Reading[str]:
        """Return the next character; empty at the end of the text."""
        while self._at == len(self._text):
            if self.is_over:
                return ""
            yield
        return self._text[self._at]

    def run(self, pattern: re.Pattern[str], write: Write) -> Reading[None]:
        """Write all following characters that the pattern, a run of one class of characters, matches."""
        while True:
            found = pattern.match(self._text, self._at)
            if found is not None and found.end() > self._at:
                write(found[0])
                self._at = found.end()
            if self._at < len(self._text) or self.is_over:
                return
            yield

    def word(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Return all following characters that the pattern matches, once they are complete."""
        parts: list[str] = []
        yield from self.run(pattern, parts.append)
        return "".join(parts)

    def space(self) -> Reading[str]:
        """Read and return the white space that follows."""
        return (yield from self.word(SPACE))

    def at_any(self, marks: Landmarks) -> Reading[str]:
        """Return the landmark that begins at this position; empty if there is none. Nothing is consumed."""
        while True:
            begun = self._text[self._at : self._at + marks.longest]
            if self.is_over or (begun and begun not in marks.beginnings):
                found = marks.match(self._text, self._at)
                return "" if found is None else found[0]
            yield

    def until(self, marks: Landmarks, write: Write) -> Reading[str]:
        """Write the text up to the next landmark, and consume that too; return it, or an empty string at the end."""
        while True:
            text, at = self._text, self._at
            found = marks.search(text, at)
            begun = len(text) if self.is_over else marks.begun_at(text, at)
            end = begun if found is None else min(begun, found.start())
            if end > at:
                self._at = end
                write(text[at:end])
            if found is not None and found.start() < begun:
                self._at = found.end()
                return found[0]
            if self.is_over:
                return ""
            yield
