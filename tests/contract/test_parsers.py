"""Contract of parsers (parsers/base.py) for every family, on its own format and on mutations of it."""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.parsers.reading import Read, joined, outcome, read

from dynamo.parsers.base import CallArguments, CallBegin, Parser, ReasoningFamily, Tool, ToolCallFamily
from dynamo.parsers.registry import REASONING, TOOL_CALLS, output_parser

CALLS = sorted({family.name for family in TOOL_CALLS.values()})
THOUGHTS = sorted({family.name for family in REASONING.values()})

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "note": {"type": ["string", "null"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
}
TOOLS = (Tool("get_weather", SCHEMA), Tool("now", {}))
ARGUMENTS = {"city": "Oslo", "days": 2}
ARGUMENTS_DEEP = 400
STEPS_OF_A_LIMIT = 6_000
"""Allowance for text that exceeds a limit, such as that of a header's length, which the shorter text did not."""


@pytest.fixture(autouse=True)
def no_callback_fails() -> None:
    """Override the fixture: no loop runs in these tests."""


def makers(*, both_beginnings: bool = True) -> list[Any]:
    """Return parser factories of every family, including reasoning that begins before the text or in it."""
    calls = [pytest.param(make_calls(TOOL_CALLS[name]), TOOL_CALLS[name], id=f"calls-{name}") for name in CALLS]
    thoughts = [
        pytest.param(make_thoughts(REASONING[name], inside), REASONING[name], id=f"thoughts-{name}-{inside}")
        for name in THOUGHTS
        for inside in (False, *([True] if both_beginnings else []))
    ]
    return calls + thoughts


def make_calls(family: ToolCallFamily) -> Callable[[], Parser]:
    return lambda: family.make(TOOLS)


def make_thoughts(family: ReasoningFamily, inside: bool) -> Callable[[], Parser]:
    return lambda: family.make(inside)


def different() -> list[Any]:
    """Return families with different parsers or different markers."""
    unlike = {(type(one.values[0]()), one.values[1].markers): one for one in makers(both_beginnings=False)}
    return list(unlike.values())


EVERY = pytest.mark.parametrize(("make", "family"), makers())
EVERY_CALLS = pytest.mark.parametrize("name", CALLS)


def fragments(family: ToolCallFamily | ReasoningFamily) -> Sequence[str]:
    """Return text fragments of a family."""
    example = family.example
    return (
        *family.markers,
        example,
        example[: len(example) // 2],
        example[len(example) // 2 :],
        *example.split("\n"),
        '{"city": "Oslo", "days": [1, {"a": null}]}',
        '{"name": "now", "arguments": {"x": "',
        "get_weather(city='x', ",
        "now",
        '"Oslo',
        '"}}',
        '{"name": "now", "arguments": {}}',
    )


def mutated(family: ToolCallFamily | ReasoningFamily) -> st.SearchStrategy[str]:
    """Return the example of a family with characters removed, inserted or swapped, and random sequences of its
    fragments.
    """
    noise = st.one_of(
        st.sampled_from([*family.markers, "<", ">", '"', "{", "}", "\\", "\n", ",", "é"]), st.text(max_size=2)
    )

    @st.composite
    def changed(draw: st.DrawFn) -> str:
        text = draw(st.sampled_from(["", "Hello. "])) + family.example * draw(st.integers(1, 2))
        for _ in range(draw(st.integers(0, 4))):
            at = draw(st.integers(0, len(text)))
            text = text[:at] + draw(noise) + text[at + draw(st.integers(0, 3)) :]
        return text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text

    heaps = st.lists(st.one_of(st.sampled_from(fragments(family)), noise), max_size=8).map("".join)
    return st.one_of(changed(), heaps)


def check(found: Read, markers: Sequence[str]) -> None:
    """Check the properties of every parse, for any text."""
    for marker in markers:
        assert marker not in found.content, f"{marker!r} in content {found.content!r}"
        assert marker not in found.reasoning, f"{marker!r} in thoughts {found.reasoning!r}"
    for name, arguments in found.calls:
        assert name
        assert isinstance(json.loads(arguments), dict), arguments


@EVERY
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_result_does_not_depend_on_chunk_boundaries(
    make: Callable[[], Parser], family: Any, data: st.DataObject
) -> None:
    text = data.draw(mutated(family))
    whole, by_character = outcome(make, text)
    assert whole == by_character
    check(whole, family.markers)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[low:high] for low, high in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(make(), pieces) == whole


@EVERY
def test_truncated_text_is_parsed_without_error(make: Callable[[], Parser], family: Any) -> None:
    text = f"Hello. {family.example} Bye."
    for end in range(len(text) + 1):
        whole, by_character = outcome(make, text[:end])
        assert whole == by_character
        check(whole, family.markers)


@EVERY
def test_text_without_markers_is_unchanged_content(make: Callable[[], Parser], family: Any) -> None:
    text = 'So: a < b, {x} [y](z) "q" \'r\' \\n <b>bold</b>\n\n  def f(a=1):\n    return [f(a=2), {"a": 1}]\n é😀 '
    for found in outcome(make, text):
        added = "<think>" if getattr(family, "name", "") == "minimax_append_think" else ""  # The purpose of the parser.
        assert found.content + found.reasoning == added + text
        assert found.calls == []


@EVERY_CALLS
def test_example_is_parsed_as_one_call(name: str) -> None:
    for family_name in (name, *TOOL_CALLS[name].aliases):
        for found in outcome(make_calls(TOOL_CALLS[family_name]), TOOL_CALLS[name].example):
            assert found.content == ""
            assert [(called, json.loads(arguments)) for called, arguments in found.calls] == [
                ("get_weather", ARGUMENTS)
            ]


@EVERY_CALLS
def test_calls_between_content_are_separated(name: str) -> None:
    example = TOOL_CALLS[name].example
    for found in outcome(make_calls(TOOL_CALLS[name]), f"Hello. {example}\n{example}"):
        assert found.content.strip() == "Hello."
        assert [(called, json.loads(arguments)) for called, arguments in found.calls] == [
            ("get_weather", ARGUMENTS)
        ] * 2


@EVERY_CALLS
def test_arguments_are_streamed_incrementally(name: str) -> None:
    before, after = TOOL_CALLS[name].example.split("Oslo")
    parser = TOOL_CALLS[name].make(TOOLS)
    events = parser.feed(before)
    for _ in range(4):
        given = parser.feed("Oslo" * 8)
        assert isinstance(given[0], CallBegin | CallArguments), "a long string is not kept until it ends"
        events += given
    events += [*parser.feed(after), *parser.finish()]
    assert [(called, json.loads(arguments)["city"]) for called, arguments in joined(events).calls] == [
        ("get_weather", "Oslo" * 32)
    ]


def call_texts(name: str, city: str) -> str:
    """Return the example of a family with another city, written as the format writes strings."""
    return TOOL_CALLS[name].example.replace("Oslo", city)


QUOTED = [name for name in CALLS if name != "pythonic" and re.search('Oslo("|<\\|"\\|>)', TOOL_CALLS[name].example)]
"""Families that write strings in quotes and have markers."""

LISTS = {
    "hermes": "<tool_call>[{}]</tool_call>",
    "qwen3": "<tool_call>[{}]</tool_call>",
    "default": "<TOOLCALL>[{}]</TOOLCALL>",
    "nemotron_deci": "<TOOLCALL>[{}]</TOOLCALL>",
    "mistral": "[TOOL_CALLS][{}]",
    "jamba": "<tool_calls>[{}]</tool_calls>",
    "phi4": "functools[{}]",
    "llama3_json": "[{}]",
}
"""Families that write several calls as one JSON list."""

BAD_ITEMS = (
    '{"name": "now", "arguments": {"a": }}',
    '{"name": "now", "arguments": {"a": 1}',
    '{"name": "now", "arguments": {"a": 1}}}',
    '{"name": "now", "arguments": {"a": "x"y"}}',
    '{"name": "now", "arguments": {"a": "x}}',
    '{"name": "now" "arguments": {}}',
    '{"name": now, "arguments": {}}',
    '{"name": 5, "arguments": {}}',
    '{"arguments": {"a": 1}}',
    '{"name": "now", "arguments": [1, 2]}',
    "{}",
    "[]",
    "null",
    "7",
    '"x"',
    "oops",
)


@pytest.mark.parametrize("name", QUOTED)
def test_unterminated_string_ends_at_the_marker_and_the_next_call_survives(name: str) -> None:
    example = TOOL_CALLS[name].example
    if name == "harmony":
        example = f"<|start|>assistant{example}"
    unterminated = re.sub('Oslo("|<\\|"\\|>)', "Oslo", example)
    for found in outcome(make_calls(TOOL_CALLS[name]), f"Hello. {unterminated}\n{example}"):
        check(found, TOOL_CALLS[name].markers)
        calls = [(called, json.loads(arguments)) for called, arguments in found.calls]
        assert calls[-1] == ("get_weather", ARGUMENTS), f"{name}: {found}"
        assert [called for called, _ in calls] == ["get_weather", "get_weather"], f"{name}: {found}"
        assert str(calls[0][1]["city"]).startswith("Oslo")
        assert found.content.strip() == "Hello."


@pytest.mark.parametrize("name", [name for name in QUOTED if name != "harmony"])
def test_marker_text_inside_a_closed_string_belongs_to_the_string(name: str) -> None:
    quote = '<|"|>'
    for marker in TOOL_CALLS[name].markers:
        if marker == quote:
            continue
        city = f"a {marker} b}} {marker}"
        for found in outcome(make_calls(TOOL_CALLS[name]), f"{call_texts(name, city)}\n{TOOL_CALLS[name].example}"):
            assert [(called, json.loads(arguments)) for called, arguments in found.calls] == [
                ("get_weather", ARGUMENTS | {"city": city}),
                ("get_weather", ARGUMENTS),
            ], f"{name}: {marker!r}"


@pytest.mark.parametrize("item", BAD_ITEMS)
@pytest.mark.parametrize("name", sorted(LISTS))
def test_invalid_item_of_a_list_of_calls_does_not_drop_later_calls(name: str, item: str) -> None:
    key = "parameters" if name == "llama3_json" else "arguments"
    call = json.dumps({"name": "get_weather", key: ARGUMENTS})
    for items in ([call, item, call], [item, call, item, call]):
        text = LISTS[name].format(", ".join(items))
        if name in ("llama3_json",) and not text.startswith('[{"name": "'):
            continue  # Without a marker only a list that begins with a call is one.
        for found in outcome(make_calls(TOOL_CALLS[name]), text):
            calls = [json.loads(arguments) for called, arguments in found.calls if called == "get_weather"]
            assert calls == [ARGUMENTS, ARGUMENTS], f"{name}: {text} gives {found}"
            check(found, TOOL_CALLS[name].markers)


@EVERY_CALLS
def test_call_without_a_name_is_dropped_and_not_content(name: str) -> None:
    example = TOOL_CALLS[name].example
    nameless = example.replace("get_weather", "")
    if name in ("pythonic", "default", "harmony", "muse"):
        return  # Their calls have no marker of their own, or the name of a message is not the call's.
    for found in outcome(make_calls(TOOL_CALLS[name]), f"Hello. {nameless}\n{example}"):
        assert [called for called, _ in found.calls] == ["get_weather"], f"{name}: {found}"
        assert found.content.strip() == "Hello."


@EVERY_CALLS
def test_unknown_tool_is_called_only_after_a_marker(name: str) -> None:
    text = TOOL_CALLS[name].example.replace("get_weather", "no_such_tool")
    has_marker = any(marker in text for marker in TOOL_CALLS[name].markers)
    for found in outcome(make_calls(TOOL_CALLS[name]), text):
        assert [called for called, _ in found.calls] == (["no_such_tool"] if has_marker else [])


@EVERY_CALLS
def test_deeply_nested_arguments_are_parsed(name: str) -> None:
    family = TOOL_CALLS[name]
    for depth in (ARGUMENTS_DEEP, 20_000):
        for inside in ("[" * depth + "]" * depth, '{"a":' * depth, "<" * depth, "{" * depth):
            text = family.example.replace("Oslo", f"Oslo{inside}").replace("2", inside)
            for found in (read(family.make(TOOLS), [text]), read(family.make(TOOLS), [text[: len(text) // 2]])):
                check(found, ())


def steps(make: Callable[[], Parser], text: str, piece: int) -> int:
    """Return the number of function calls that parsing a text takes."""
    counted = 0

    def count(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    parser = make()
    pieces = [text[at : at + piece] for at in range(0, len(text), piece)]
    sys.setprofile(count)
    try:
        for one in pieces:
            parser.feed(one)
        parser.finish()
    finally:
        sys.setprofile(None)
    return counted


def long_texts(family: ToolCallFamily | ReasoningFamily) -> Mapping[str, str]:
    """Return patterns whose repetition could take superlinear time."""
    first = family.markers[0] if family.markers else "<t"
    half = len(family.example) // 2
    return {
        "calls": family.example,
        "openings": family.example[:half],
        "endings": family.example[half:],
        "marker": first,
        "beginnings of markers": first[:-1],
        "braces": '{"name": "',
        "brackets": "[",
        "spaces": " ",
        "backslashes": "\\",
        "quotes": '"',
    }


@pytest.mark.parametrize(("make", "family"), different())
def test_parsing_time_is_linear_in_text_length(make: Callable[[], Parser], family: Any) -> None:
    opening = family.example.split("Oslo")[0]
    for what, part in long_texts(family).items():
        modes = [(opening, 1, 100), ("", 1, 300), (opening, 499, 600)]
        for lead, piece, chars in modes[:1] if len(part) > 40 else modes:
            times = 4 + chars // len(part)
            once = steps(make, lead + part * times, piece)
            tenfold = steps(make, lead + part * times * 10, piece)
            assert tenfold <= 12 * once + STEPS_OF_A_LIMIT, (
                f"{what} behind {lead!r}, {piece} characters at a time: {once}, {tenfold}"
            )


def test_reasoning_precedes_calls() -> None:
    text = "<think>a</think>Hello. " + TOOL_CALLS["hermes"].example
    parser = output_parser(tool_calls="hermes", reasoning="qwen3", tools=TOOLS)
    assert parser is not None
    found = read(parser, list(text))
    assert (found.reasoning, found.content.strip()) == ("a", "Hello.")
    assert [name for name, _ in found.calls] == ["get_weather"]


@pytest.mark.parametrize("name", sorted({*CALLS} & {*REASONING} - {"harmony"}))
def test_family_with_reasoning_and_calls_parses_calls_after_reasoning(name: str) -> None:
    thoughts, calls = REASONING[name].example, TOOL_CALLS[name].example
    parser = output_parser(tool_calls=name, reasoning=name, tools=TOOLS, is_reasoning=False)
    assert parser is not None
    found = read(parser, list(thoughts + calls))
    assert [(called, json.loads(arguments)) for called, arguments in found.calls] == [("get_weather", ARGUMENTS)]
    check(found, TOOL_CALLS[name].markers)
