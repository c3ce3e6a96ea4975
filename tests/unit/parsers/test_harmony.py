"""Harmony: one parser separates reasoning, content and calls by their channels."""

import json
import time

import pytest
from hypothesis import given, settings
from tests.unit.parsers.reading import Read, outcome, read, texts

from dynamo.parsers.base import CallArguments, CallBegin, ReasoningDelta, Tool
from dynamo.parsers.harmony import HEADER_CHARS_MAX, MARKERS, HarmonyParser
from dynamo.parsers.registry import output_parser

TOOLS = (Tool("f", {}), Tool("g", {}))
NEXT = "<|start|>assistant"


def analysis(text: str) -> str:
    return f"<|channel|>analysis<|message|>{text}<|end|>"


def final(text: str) -> str:
    return f"{NEXT}<|channel|>final<|message|>{text}<|return|>"


def call(name: str, arguments: str, end: str = "<|call|>") -> str:
    return f"{NEXT}<|channel|>commentary to={name} <|constrain|>json<|message|>{arguments}{end}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (analysis("a") + final("b"), Read("b", "a")),
        (analysis("a") + call("functions.f", '{"x": 1}'), Read("", "a", [("f", '{"x": 1}')])),
        (call("functions.f", "{}") + call("functions.g", '{"y":[]}'), Read("", "", [("f", "{}"), ("g", '{"y":[]}')])),
        (call("f", "{}"), Read("", "", [("f", "{}")])),
        (f"{NEXT} to=functions.f<|channel|>commentary json<|message|>{{}}<|call|>", Read("", "", [("f", "{}")])),
        (f"{NEXT}<|channel|>analysis to=functions.f code<|message|>{{}}<|call|>", Read("", "", [("f", "{}")])),
        (call("python", "print(1)"), Read("", "print(1)")),
        (call("functions.", "{}"), Read("", "{}")),
        ("<|channel|>commentary<|message|>I look.<|end|>" + final("b"), Read("I look.\nb", "")),
        (analysis("a") + NEXT + analysis("b") + final("c"), Read("c", "a\nb")),
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", Read("b", "a")),
        ("plain text, no channels", Read("plain text, no channels", "")),
        ("a<|message|>b<|constrain|>c", Read("a\nbc", "")),
        ("<|channel|>final<|message|>cut off <|re", Read("cut off <|re", "")),
        ("<|start|>assistant<|channel|>ana", Read()),
        ("<|channel|>analysis<|start|>assistant<|message|>b", Read("b", "")),
        ("", Read()),
    ],
)
def test_harmony_separates_channels(text: str, expected: Read) -> None:
    for found in outcome(lambda: HarmonyParser(TOOLS), text):
        assert found == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "Os', {"city": "Os"}),
        ("", {}),
        ("city=Oslo", {}),
        ('{"city": "Oslo"} and more', {"city": "Oslo"}),
        ('{"city": "a\nb"}', {"city": "a\nb"}),
    ],
)
@pytest.mark.parametrize("end", ["", "<|call|>", "<|end|>", "<|start|>"])
def test_harmony_call_arguments_are_a_json_object_after_any_end(
    arguments: str, expected: dict[str, str], end: str
) -> None:
    for found in outcome(lambda: HarmonyParser(TOOLS), call("functions.f", arguments, end)):
        assert [(name, json.loads(text)) for name, text in found.calls] == [("f", expected)]
        assert (found.content, found.reasoning) == ("", "")


def test_harmony_text_longer_than_a_header_is_content() -> None:
    text = "<|start|>" + "x" * (HEADER_CHARS_MAX + 1)
    for found in outcome(lambda: HarmonyParser(TOOLS), text + "<|message|>y"):
        assert found == Read("x" * (HEADER_CHARS_MAX + 1) + "y", "")


def test_harmony_calls_without_tools_are_reasoning() -> None:
    parser = output_parser(tool_calls="harmony", reasoning="gpt_oss", tools=())
    assert parser is not None
    assert read(parser, [call("functions.f", "{}") + final("b")]) == Read("b", "{}")


@pytest.mark.parametrize("reasoning", [None, "gpt_oss"])
def test_harmony_call_and_reasoning_names_select_one_parser(reasoning: str | None) -> None:
    parser = output_parser(tool_calls="harmony", reasoning=reasoning, tools=TOOLS)
    assert isinstance(parser, HarmonyParser)
    assert read(parser, [analysis("a") + call("functions.f", "{}")]) == Read("", "a", [("f", "{}")])


def test_harmony_parser_can_start_inside_reasoning() -> None:
    parser = output_parser(tool_calls="harmony", reasoning="gpt_oss", tools=TOOLS, is_reasoning=True)
    assert parser is not None
    assert read(parser, ["a<|end|>" + final("b")]) == Read("b", "a")


def test_harmony_output_is_streamed_as_it_arrives() -> None:
    parser = HarmonyParser(TOOLS)
    assert parser.feed(analysis("")[: -len("<|end|>")] + "Let") == [ReasoningDelta("Let")]
    assert parser.feed(" me") == [ReasoningDelta(" me")]
    assert parser.feed("<|end|>" + call("functions.f", '{"a', "")) == [CallBegin(0, "f"), CallArguments(0, '{"a')]
    assert parser.feed('bc": 1') == [CallArguments(0, 'bc": ')]
    assert parser.feed("2}") == [CallArguments(0, "12}")]
    assert parser.finish() == []


@settings(max_examples=60, deadline=None)
@given(pieces=texts([*MARKERS, call("functions.f", '{"a": "b"}'), "final", "analysis", "to=functions.f"]))
def test_result_is_independent_of_chunking_and_contains_no_markers(pieces: list[str]) -> None:
    found = read(HarmonyParser(TOOLS), pieces)
    assert found == read(HarmonyParser(TOOLS), list("".join(pieces)))
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in found.calls)
    assert not any(marker in text for marker in MARKERS for text in (found.content, found.reasoning))


def test_harmony_parser_time_is_linear_in_text_length() -> None:
    def fed_s(times: int) -> float:
        text = "".join(MARKERS) * times + call("functions.f", '{"a": "' + "b" * 100 * times)
        parser = HarmonyParser(TOOLS)
        began_s = time.process_time()
        for at in range(0, len(text), 3):
            parser.feed(text[at : at + 3])
        parser.finish()
        return time.process_time() - began_s

    assert fed_s(500) < 25 * min(fed_s(50) for _ in range(3)) + 0.05
