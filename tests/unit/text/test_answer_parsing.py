"""Parsed parts of a choice's text, until the response takes them."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dynamo.parsers.base import CallArguments, CallBegin, ContentDelta, Event, ReasoningDelta
from dynamo.text.answer_parsing import Reading, joined


class Scripted:
    """A parser that returns given results, a list for each piece."""

    def __init__(self, *found: Sequence[Event]) -> None:
        self.found = list(found)
        self.texts: list[str] = []

    def feed(self, text: str) -> list[Event]:
        self.texts.append(text)
        return list(self.found.pop(0))

    def finish(self) -> list[Event]:
        return list(self.found.pop(0)) if self.found else []


def test_answer_parsing_without_parsers_returns_content() -> None:
    reading = Reading(None)
    assert reading.feed("Hel") and reading.feed("lo") and not reading.feed("")
    assert reading.take() == [ContentDelta("Hello")]
    assert reading.close("!") and reading.take() == [ContentDelta("!")]


def test_answer_parsing_keeps_call_ids_and_generates_missing_ones() -> None:
    reading = Reading(Scripted([CallBegin(0, "f"), CallBegin(1, "g", "own")]))
    reading.feed("x")
    first, second = reading.take()
    assert isinstance(first, CallBegin) and (first.call_id or "").startswith("call-")
    assert second == CallBegin(1, "g", "own")
    assert reading.calls == 2


def test_answer_parsing_counts_tokens_until_they_are_taken() -> None:
    reading = Reading(Scripted([], [ContentDelta("a")], [ContentDelta("b")]))
    reading.feed("x")
    reading.feed("y")
    assert reading.fresh_tokens == 2
    reading.take()
    reading.feed("z")
    assert reading.fresh_tokens == 1


def test_answer_parsing_counts_reasoning_tokens_up_to_the_closing_token() -> None:
    reading = Reading(Scripted([], [ReasoningDelta("a")], [], [ReasoningDelta("bc")], [], [ContentDelta("d")], []))
    for text in ("<think>", "a", "b", "c", "</think>", "d", "e"):
        reading.feed(text)
    assert reading.reasoning_tokens == 4


def test_answer_parsing_drops_calls_beyond_the_limit() -> None:
    output = [CallBegin(0, "f"), CallArguments(0, "{}"), CallBegin(1, "g"), CallArguments(1, "{}"), ContentDelta("x")]
    reading = Reading(Scripted(output), calls_max=1)
    assert reading.feed("all")
    assert [getattr(event, "index", None) for event in reading.take()] == [0, 0, None]
    assert reading.calls == 1


def test_answer_parsing_returns_held_text_at_the_end() -> None:
    reading = Reading(Scripted([], [ContentDelta("tail")]))
    assert not reading.feed("<")
    assert reading.close("") and reading.take() == [ContentDelta("tail")]


EVENTS = st.lists(
    st.one_of(
        st.text(min_size=1).map(ContentDelta),
        st.text(min_size=1).map(ReasoningDelta),
        st.builds(CallBegin, st.integers(0, 2), st.just("f")),
        st.builds(CallArguments, st.integers(0, 2), st.text(min_size=1)),
    )
)


@given(EVENTS)
def test_answer_parsing_merges_neighbouring_events_of_one_kind(events: list[Event]) -> None:
    whole = joined(events)
    assert spelled(whole) == spelled(events)
    for before, after in pairwise(whole):
        same = before.__class__ is after.__class__ and getattr(before, "index", 0) == getattr(after, "index", 0)
        assert not same or isinstance(after, CallBegin)


def spelled(events: Sequence[Event]) -> list[object]:
    """Events letter by letter."""
    return [
        (event.__class__, getattr(event, "index", 0), letter)
        for event in events
        for letter in ([event.name] if isinstance(event, CallBegin) else event.text)
    ]
