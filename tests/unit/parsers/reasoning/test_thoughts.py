"""Reasoning between markers: stray markers are dropped, a call ends unterminated reasoning, labels are not reasoning."""

import json

import pytest
from tests.unit.parsers.reading import Read, outcome, read

from dynamo.parsers.base import Tool
from dynamo.parsers.reasoning.thoughts import BracketParser, Brackets, InlineParser, blocks_of
from dynamo.parsers.registry import REASONING, output_parser


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("basic", "<think>a</think>b<think>c</think>d", Read("bd", "ac")),
        ("basic", "a</think>b", Read("ab", "")),
        ("basic", "<think>a<think>b</think>c", Read("c", "ab")),
        ("basic", "<think>never closed", Read("", "never closed")),
        ("basic", "a <thin and </thin", Read("a <thin and </thin", "")),
        ("basic", "", Read()),
        ("deepseek_r1", "a</think>\n\nb", Read("\n\nb", "a")),
        ("deepseek_r1", "<think>a</think>b", Read("b", "a")),
        ("deepseek_r1", "no end", Read("", "no end")),
        ("kimi", "◁think▷a◁/think▷b", Read("b", "a")),
        ("kimi", "<think>a</think>b", Read("<think>a</think>b", "")),
        ("kimi_k25", "a<|tool_calls_section_begin|>x", Read("<|tool_calls_section_begin|>x", "a")),
        ("kimi_k25", "a</think>b<|tool_calls_section_begin|>", Read("b<|tool_calls_section_begin|>", "a")),
        ("minimax_m2", 'a<invoke name="f">', Read('<invoke name="f">', "a")),
        ("minimax_m3", "<mm:think>a</mm:think>b ]<]minimax c", Read("b ]<]minimax c", "a")),
        ("deepseek_v4", "<think>a<｜DSML｜tool_calls>x", Read("<｜DSML｜tool_calls>x", "a")),
        ("deepseek_v41", "<think>a<｜DSML｜ calls>x", Read("<｜DSML｜ calls>x", "a")),
        ("mistral", "[THINK]a[/THINK]b", Read("b", "a")),
        ("mistral", "b", Read("b", "")),
        ("deepseek_v3", "b", Read("b", "")),
        ("kimi_k2", "b", Read("b", "")),
        ("kimi_k2", "<think>a</think>b", Read("b", "a")),
        ("granite", "Here is my thought process: a Here's my response: b", Read(" b", " a ")),
        ("granite", "Here's my cat.", Read("Here's my cat.", "")),
        ("gemma4", "<|channel>thought\na<channel|>b", Read("b", "a")),
        ("gemma4", "<|channel>thoughtful<channel|>b", Read("b", "thoughtful")),
        ("gemma4", "<|channel>thou", Read("", "thou")),
        ("gemma4", "<|channel>thou<channel|>b", Read("b", "thou")),
        ("minimax_append_think", "a</think>b", Read("<think>a</think>b", "")),
    ],
)
def test_reasoning_format_is_parsed(name: str, text: str, expected: Read) -> None:
    family = REASONING[name]
    for found in outcome(lambda: family.make(family.starts_inside), text):
        assert found == expected


def test_gemma4_label_is_removed_when_the_prompt_opened_reasoning() -> None:
    family = REASONING["gemma4"]
    assert read(family.make(True), ["thought\na<channel|>b"]) == Read("b", "a")
    assert read(family.make(True), ["a<channel|>b"]) == Read("b", "a")


def test_reasoning_is_streamed_as_it_arrives() -> None:
    parser = BracketParser(Brackets(), is_inside=True)
    assert [len(parser.feed(text)) for text in ("Let", " me", " <", "/think", ">", "")] == [1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<thi</think>nk>a", Read("<thia", "")),
        ("<thi</think></think>nk>nk>a", Read("<thia", "")),
        ("<thi</think>nka", Read("<thinka", "")),
        ("<thi<think>x</think>nk>a", Read("<thia", "x")),
        ("<thi</think>n</think>k>a", Read("<thina", "")),
    ],
)
def test_removed_marker_does_not_join_its_neighbours_into_a_new_marker(text: str, expected: Read) -> None:
    for found in outcome(lambda: BracketParser(Brackets(), is_inside=False), text):
        assert found == expected


CALL = '<tool_call>{"name": "f", "arguments": {"text": "<think>a</think>"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think>b" + CALL + "c</think>d", Read("b" + CALL + "cd", "a")),
        ("<think>" + CALL, Read('"}}</tool_call>', '<tool_call>{"name": "f", "arguments": {"text": "a')),
        ("<tool_call>never closed</think>", Read("<tool_call>never closed</think>", "")),
        ("</tool_call><think>a", Read("</tool_call>", "a")),
    ],
)
def test_reasoning_markers_inside_a_call_are_ignored(text: str, expected: Read) -> None:
    blocks = blocks_of(("<tool_call>", "</tool_call>"), Brackets())
    for found in outcome(lambda: BracketParser(Brackets(), False, blocks), text):
        assert found == expected


def test_reasoning_markers_inside_call_arguments_are_preserved() -> None:
    parser = output_parser(tool_calls="hermes", reasoning="qwen3", tools=(Tool("f", {}),))
    assert parser is not None
    found = read(parser, list("<think>a</think>" + CALL))
    assert (found.reasoning, json.loads(found.calls[0][1])) == ("a", {"text": "<think>a</think>"})


@pytest.mark.parametrize(
    ("markers", "expected"),
    [
        (("<tool_call>", "</tool_call>", "<function="), {"<tool_call>": "</tool_call>"}),
        (("<|x_begin|>", "<|x_end|>"), {"<|x_begin|>": "<|x_end|>"}),
        (("<|tool_call>", "<tool_call|>"), {"<|tool_call>": "<tool_call|>"}),
        (("[TOOL_CALLS]", "[/TOOL_CALLS]"), {"[TOOL_CALLS]": "[/TOOL_CALLS]"}),
        (("<think>", "</think>"), {}),
        (("<a<think>>", "</a<think>>"), {}),
        (("functools",), {}),
    ],
)
def test_blocks_are_identified_by_their_markers(markers: tuple[str, ...], expected: dict[str, str]) -> None:
    assert blocks_of(markers, Brackets()) == expected


def test_empty_text_opens_no_inline_reasoning() -> None:
    assert read(InlineParser("<think>"), ["", ""]) == Read()
