"""Strategies for parsed events of a response, whole and in pieces."""

from itertools import chain

from hypothesis import strategies as st

from dynamo.parsers.base import CallArguments, CallBegin, ContentDelta, Event, ReasoningDelta
from dynamo.text.answer_parsing import joined

VALUES = ("", "ä", "€😀", "a b")


@st.composite
def answers(draw: st.DrawFn) -> list[Event]:
    """Return text, reasoning and whole calls, in any order; neighbours of one kind are merged."""
    texts = st.text(alphabet=st.sampled_from('a \n€😀"\\'), min_size=1, max_size=6)
    events: list[Event] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "thought", "call"]), max_size=6)):
        if kind == "text":
            events.append(ContentDelta(draw(texts)))
        elif kind == "thought":
            events.append(ReasoningDelta(draw(texts)))
        else:
            arguments = f'{{"a": "{draw(st.sampled_from(VALUES))}"}}'
            events += [
                CallBegin(calls, draw(st.sampled_from(["f", "g"])), f"call-{calls:032x}"),
                CallArguments(calls, arguments),
            ]
            calls += 1
    return joined(events)


def parts(event: Event, place: int) -> list[Event]:
    """An event in two, where that can be."""
    if isinstance(event, CallBegin):
        return [event]
    texts = [text for text in (event.text[:place], event.text[place:]) if text]
    if isinstance(event, CallArguments):
        return [CallArguments(event.index, text) for text in texts]
    return [type(event)(text) for text in texts]


@st.composite
def cut(draw: st.DrawFn, events: list[Event]) -> list[list[Event]]:
    """The same events in pieces and batches."""
    pieces = chain.from_iterable(parts(event, draw(st.integers(0, 6))) for event in events)
    batches: list[list[Event]] = [[]]
    for piece in pieces:
        if draw(st.booleans()):
            batches.append([])
        batches[-1].append(piece)
    return [batch for batch in batches if batch]
