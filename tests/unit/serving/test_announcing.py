"""Calls and reasoning are announced when they are complete, in addition to the chunks that carry them."""

import json
from typing import Any

import pytest

from dynamo.parsers.base import CallArguments, CallBegin, ContentDelta, Event, ReasoningDelta
from dynamo.serving.announcing import AnnouncingChunks, AnswerOptions
from dynamo.serving.postprocessor import ChatChunks


def decode_events(data: bytes) -> list[tuple[str, Any]]:
    """Events by name; chunks have none."""
    found = []
    for part in data.decode().removesuffix("\n\n").split("\n\n"):
        before, _, chunk = part.rpartition("data: ")
        found.append((before.removeprefix("event: ").strip(), json.loads(chunk)))
    return found


def make(*, calls: bool = True, thoughts: bool = True) -> AnnouncingChunks:
    return AnnouncingChunks("i", "m", 1, calls=calls, thoughts=thoughts)


def write_events(chunks: AnnouncingChunks, index: int, *events: Event) -> list[tuple[str, Any]]:
    return decode_events(chunks.events(index, events, b"", [], 0))


def test_tool_call_is_announced_when_the_next_element_begins() -> None:
    chunks = make()
    assert [name for name, _ in write_events(chunks, 0, CallBegin(0, "f", "c1"), CallArguments(0, '{"a"'))] == ["", ""]
    names = write_events(chunks, 0, CallArguments(0, ": 1}"), CallBegin(1, "g", "c2"))
    assert [name for name, _ in names] == ["", "tool_call_dispatch", ""]
    call = {"id": "c1", "function": {"name": "f", "arguments": '{"a": 1}'}, "type": "function", "index": 0}
    assert names[1][1] == {"choice_index": 0, "tool_call": call}
    (name, last), (_, chunk) = decode_events(chunks.finish(0, "tool_calls", None))
    assert (name, last["tool_call"]["id"], chunk["choices"][0]["finish_reason"]) == (
        "tool_call_dispatch",
        "c2",
        "tool_calls",
    )


def test_reasoning_is_announced_once_with_its_full_text() -> None:
    chunks = make()
    write_events(chunks, 1, ReasoningDelta("a"))
    names = write_events(chunks, 1, ReasoningDelta("b"), ContentDelta("c"))
    assert [name for name, _ in names] == ["", "reasoning_dispatch", ""]
    assert names[1][1] == {"index": 1, "reasoning_content": "ab"}
    assert [name for name, _ in decode_events(chunks.finish(1, "stop", None))] == [""]


def test_announcements_are_separate_per_choice() -> None:
    chunks = make()
    write_events(chunks, 0, ReasoningDelta("a"))
    assert [name for name, _ in write_events(chunks, 1, ContentDelta("x"))] == [""]
    assert [name for name, _ in write_events(chunks, 0, ContentDelta("x"))] == ["reasoning_dispatch", ""]


def test_disabled_announcements_are_not_sent() -> None:
    events = (ReasoningDelta("a"), ContentDelta("b"), CallBegin(0, "f", "c"), CallArguments(0, "{}"), ContentDelta("d"))
    assert [name for name, _ in write_events(make(thoughts=False), 0, *events) if name] == ["tool_call_dispatch"]
    assert [name for name, _ in write_events(make(calls=False), 0, *events) if name] == ["reasoning_dispatch"]


@pytest.mark.parametrize("wanted", [{}, {"announces_calls": True}, {"announces_thoughts": True}])
def test_chunks_without_announcements_are_plain_chat_chunks(wanted: dict[str, bool]) -> None:
    options = AnswerOptions(reasoning_field="reasoning", **wanted)
    chunks = options.chunks("i", "m", 1)
    assert type(chunks) is (AnnouncingChunks if wanted else ChatChunks)
    assert b'"reasoning":"hm"' in chunks.events(0, [ReasoningDelta("hm")], b"", [], 0)
