"""Calls that were requested as JSON are parsed as calls, for any chunking and truncation of the text."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.parsers.base import CallArguments, CallBegin, ContentDelta, Event
from dynamo.parsers.guided_calls import GuidedCalls

ARGUMENTS = '{"city": "Os\\u006co \\"}{\\\\", "days": [1, 2.5e3, {"deep": null}], "is": true}'
LIST = f'[{{"name": "get_weather", "parameters": {ARGUMENTS}}}, {{"name":"now","parameters":{{}}}}]'


def read(text: str, tool: str | None = None, cuts: list[int] | None = None) -> list[Event]:
    parser, events, at = GuidedCalls(tool), [], 0
    for cut in [*sorted(cuts or ()), len(text)]:
        events += parser.feed(text[at:cut])
        at = max(at, cut)
    return [*events, *parser.finish()]


def calls_of(events: list[Event]) -> list[tuple[str, Any]]:
    """Names and arguments, which must be JSON; content must not be among them."""
    names: list[str] = []
    parts: list[list[str]] = []
    for event in events:
        if isinstance(event, CallBegin):
            assert event.index == len(names)
            names.append(event.name)
            parts.append([])
        else:
            assert isinstance(event, CallArguments)
            assert event.index == len(names) - 1
            parts[-1].append(event.text)
    return [(name, json.loads("".join(part))) for name, part in zip(names, parts, strict=True)]


def content_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentDelta))


def test_list_of_guided_calls_is_parsed() -> None:
    assert calls_of(read(LIST)) == [("get_weather", json.loads(ARGUMENTS)), ("now", {})]


def test_guided_call_arguments_are_streamed_unchanged() -> None:
    assert read(LIST)[:2] == [CallBegin(0, "get_weather"), CallArguments(0, ARGUMENTS)]
    parser = GuidedCalls()
    parser.feed('[{"name": "get_weather", "parameters": ')
    assert parser.feed('{"city": "Os') == [CallBegin(0, "get_weather"), CallArguments(0, '{"city": "Os')]
    assert parser.feed("lo") == [CallArguments(0, "lo")]


def test_guided_arguments_of_a_named_tool_are_one_call() -> None:
    assert read("\n" + ARGUMENTS + "\n", "get_weather") == [CallBegin(0, "get_weather"), CallArguments(0, ARGUMENTS)]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "now", "parameters": {"a": 1}}', [("now", {"a": 1})]),
        ('[{"parameters": {"a": 1}, "name": "now"}]', [("now", {"a": 1})]),
        ('[{"name": "now", "arguments": {"a": 1}}]', [("now", {"a": 1})]),
        ('[{"name": "now"}]', [("now", {})]),
        ('[{"name": "now", "id": [1, {"x": "y"}], "parameters": {}}]', [("now", {})]),
        ("[{}]", []),
    ],
)
def test_guided_calls_in_alternative_forms_are_parsed(text: str, calls: list[tuple[str, Any]]) -> None:
    assert calls_of(read(text)) == calls


@pytest.mark.parametrize("text", ["I cannot do that.", "[see above] yes", " 42", "[", "[]", "  ", ""])
@pytest.mark.parametrize("tool", [None, "now"])
def test_guided_text_that_is_no_call_is_content(text: str, tool: str | None) -> None:
    events = read(text, tool)
    assert content_of(events) == text
    assert all(isinstance(event, ContentDelta) for event in events)


@given(cuts=st.lists(st.integers(0, len(LIST)), max_size=12), end=st.integers(0, len(LIST)))
def test_calls_are_independent_of_chunking_and_truncation(cuts: list[int], end: int) -> None:
    whole = calls_of(read(LIST))
    text = LIST[:end]
    events = [
        event for event in read(text, None, [cut for cut in cuts if cut <= end]) if not isinstance(event, ContentDelta)
    ]
    calls = calls_of(events)
    assert calls == calls_of([event for event in read(text) if not isinstance(event, ContentDelta)])
    assert [name for name, _ in calls] == [name for name, _ in whole[: len(calls)]]
    assert all(isinstance(arguments, dict) for _, arguments in calls)
    if end == len(LIST):
        assert calls == whole


@given(end=st.integers(1, len(ARGUMENTS)), cuts=st.lists(st.integers(0, len(ARGUMENTS)), max_size=8))
def test_truncated_guided_arguments_are_completed(end: int, cuts: list[int]) -> None:
    text = ARGUMENTS[:end]
    ((name, arguments),) = calls_of(read(text, "get_weather", [cut for cut in cuts if cut <= end]))
    assert name == "get_weather"
    assert set(arguments) <= {"city", "days", "is"}


@given(text=st.text(alphabet='[]{}",:\\ namepratsu1tfl\n', max_size=60), tool=st.sampled_from([None, "now"]))
def test_any_guided_text_is_parsed_without_an_error(text: str, tool: str | None) -> None:
    events = read(text, tool)
    calls_of([event for event in events if not isinstance(event, ContentDelta)])
    letters = [event for event in read(text, tool, list(range(len(text)))) if not isinstance(event, ContentDelta)]
    assert calls_of(letters) == calls_of([event for event in events if not isinstance(event, ContentDelta)])


def test_guided_parser_buffer_is_bounded_for_a_long_text() -> None:
    text = '[{"name": "f", "parameters": {"a": "' + "x" * 200_000 + '"}}]'
    parser = GuidedCalls()
    kept = 0
    for at in range(0, len(text), 7):
        parser.feed(text[at : at + 7])
        kept = max(kept, parser._reader.kept_chars)
    assert kept < 32
