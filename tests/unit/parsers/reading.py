"""Helpers of parser tests: parse a text in pieces and join the results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from dynamo.parsers.base import CallArguments, CallBegin, ContentDelta, Event, Parser, ReasoningDelta


@dataclass
class Read:
    """Result of a parser, joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def read(parser: Parser, pieces: Sequence[str]) -> Read:
    """Parse a text in these pieces."""
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    return joined([*events, *parser.finish()])


def joined(events: Sequence[Event]) -> Read:
    """Join the events as a client does."""
    found = Read()
    for event in events:
        match event:
            case ContentDelta(text):
                found.content += text
            case ReasoningDelta(text):
                found.reasoning += text
            case CallBegin(index, name):
                assert index == len(found.calls), "calls are counted from 0"
                found.calls.append((name, ""))
            case CallArguments(index, text):
                name, arguments = found.calls[index]
                assert index == len(found.calls) - 1, "one call at a time"
                found.calls[index] = (name, arguments + text)
    return found


@st.composite
def texts(draw: st.DrawFn, fragments: Sequence[str]) -> list[str]:
    """Return texts of those fragments, of parts of them and of other text, cut at any point."""
    parts = st.sampled_from([*fragments, "a", " ", "\n", "<", "é😀"])
    halves = st.builds(lambda text, low, high: text[low:high], parts, st.integers(0, 6), st.integers(1, 12))
    text = "".join(draw(st.lists(st.one_of(parts, halves, st.text(max_size=3)), max_size=14)))
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=8)))
    return [text[low:high] for low, high in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def outcome(make: Callable[[], Parser], text: str) -> list[Read]:
    """The same text whole, and one character at a time."""
    return [read(make(), [text]), read(make(), list(text))]
