"""Markers: detection of markers in streamed text, and their removal from the parsers' output. Pure.

scanner = Scanner(("<think>", "</think>"))
scanner.feed("So. </thi")    [("So. ", "")]         the rest may begin a marker
scanner.feed("nk>Four.")     [("", "</think>"), ("Four.", "")]
"""

import re
from collections.abc import Sequence
from functools import cache

from dynamo.parsers.base import ContentDelta, Event, ReasoningDelta

TextKind = type[ContentDelta] | type[ReasoningDelta]


class Markers:
    """A set of markers, none of which is a substring of another."""

    def __init__(self, texts: Sequence[str]) -> None:
        assert texts, "a format without markers needs no scanner"
        for one in texts:
            assert not any(one in other for other in texts if other is not one), f"{one!r} is part of another marker"
        self.texts = tuple(texts)
        self.search = re.compile("|".join(map(re.escape, texts))).search
        self.beginnings = frozenset(text[:length] for text in texts for length in range(1, len(text)))
        self.longest = max(len(text) for text in texts) - 1
        """Length of the longest incomplete prefix of a marker."""
        self.first = re.compile("[" + "".join(re.escape(text[0]) for text in texts) + "]").search

    def begun_at(self, text: str) -> int:
        """Return the offset at which the end of a text may begin a marker; its length if there is none."""
        end = len(text)
        found = self.first(text, max(0, end - self.longest))
        while found is not None:
            if text[found.start() :] in self.beginnings:
                return found.start()
            found = self.first(text, found.start() + 1)
        return end

    def rests(self, text: str) -> list[str]:
        """Return the texts that would complete a marker begun by the end of a text; the shortest first."""
        rests: set[str] = set()
        for length in range(1, min(self.longest, len(text)) + 1):
            ending = text[-length:]
            if ending in self.beginnings:
                rests.update(one[length:] for one in self.texts if one.startswith(ending))
        return sorted(rests, key=lambda rest: (len(rest), rest))


@cache
def markers(texts: tuple[str, ...]) -> Markers:
    """Return the cached set of those texts."""
    return Markers(texts)


class Scanner:
    """Splits text into stretches between markers."""

    __slots__ = ("_held", "_markers")

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._markers = markers(texts)
        self._held = ""

    def feed(self, text: str) -> list[tuple[str, str]]:
        """Return stretches, each with the marker that ends it; the last has none. A possible marker at the end is held back."""
        if self._held:
            text = self._held + text
        elif self._markers.first(text) is None:
            return [(text, "")]
        found = []
        at = 0
        while (match := self._markers.search(text, at)) is not None:
            found.append((text[at : match.start()], match[0]))
            at = match.end()
        rest = text[at:] if at else text
        end = self._markers.begun_at(rest)
        self._held = rest[end:]
        found.append((rest[:end], ""))
        return found

    def finish(self) -> str:
        """Return the text that was held back and is no marker."""
        held, self._held = self._held, ""
        return held


class Output:
    """Content and reasoning emitted by a parser. Removing markers never creates new ones."""

    __slots__ = ("_events", "_kind", "_parts", "_seams")

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._events: list[Event] = []
        self._kind: TextKind = ContentDelta
        self._parts: list[str] = []
        self._seams: dict[TextKind, _Seam] = {
            ContentDelta: _Seam(markers(texts)),
            ReasoningDelta: _Seam(markers(texts)),
        }

    def emit(self, kind: TextKind, text: str) -> None:
        """Emit more content or reasoning."""
        if text and (text := self._seams[kind].push(text)):
            self._put(kind, text)

    def emit_as_is(self, kind: TextKind, text: str) -> None:
        """Emit text that may contain markers, for a next parser that handles them."""
        if held := self._seams[kind].open():
            self._put(kind, held)
        if text:
            self._put(kind, text)

    def add(self, event: Event) -> None:
        """Emit any other event."""
        self._join()
        self._events.append(event)

    def cut(self) -> None:
        """Record that something was removed from the text at this position."""
        for kind, seam in self._seams.items():
            if text := seam.open():
                self._put(kind, text)

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        self._join()
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """Return the last events."""
        self.cut()
        return self.take()

    def _put(self, kind: TextKind, text: str) -> None:
        if kind is not self._kind:
            self._join()
            self._kind = kind
        self._parts.append(text)

    def _join(self) -> None:
        if self._parts:
            self._events.append(self._kind("".join(self._parts)))
            self._parts = []


class _Seam:
    """One output at a cut: text that would complete a marker across the cut is dropped, as part of a marker."""

    __slots__ = ("_held", "_markers", "_rests", "_tail")

    def __init__(self, among: Markers) -> None:
        self._markers = among
        self._tail = ""
        self._rests: list[str] = []
        self._held = ""

    def push(self, text: str) -> str:
        """Return the text that can be emitted now."""
        if self._rests:
            text = self._across(self._held + text)
            self._tail = (self._tail + text)[-self._markers.longest :]
        else:
            # Text may arrive in pieces: a bracket that might begin a call arrives alone.
            longest = self._markers.longest
            self._tail = text if len(text) >= longest else (self._tail + text)[-longest:]
        return text

    def open(self) -> str:
        """Begin a cut. Return the text that was held back for the previous one."""
        text, self._held = self._held, ""
        if text:
            self._tail += text
        self._rests = self._markers.rests(self._tail)
        return text

    def _across(self, text: str) -> str:
        at = 0
        while at < len(text):
            done = next((rest for rest in self._rests if text.startswith(rest, at)), None)
            if done is not None:
                at += len(done)
            elif any(rest.startswith(text[at : at + self._markers.longest]) for rest in self._rests):
                self._held = text[at:]
                return ""
            else:
                self._held, self._rests = "", []
                return text[at:]
        self._held = ""
        return ""


class MarkedText:
    """Base of parsers that read stretches of text and the markers between them."""

    _scanner: Scanner
    _output: Output

    def feed(self, text: str) -> list[Event]:
        """See `Parser.feed`."""
        for stretch, marker in self._scanner.feed(text):
            if stretch:
                self._read(stretch)
            if marker:
                self._pass(marker)
        return self._output.take()

    def finish(self) -> list[Event]:
        """See `Parser.finish`."""
        if held := self._scanner.finish():
            self._read(held)
        self._end()
        return self._output.finish()

    def _read(self, text: str) -> None:
        """Read text without a marker in it."""
        raise AssertionError

    def _pass(self, marker: str) -> None:
        """Read a marker."""
        raise AssertionError

    def _end(self) -> None:
        """Emit the text held back at the end."""
