"""Every family of reasoning parsers keeps the contract of `dynamo.parsers.base`, and that of its own format."""

import time

import pytest
from hypothesis import given, settings
from tests.unit.parsers.reading import Read, outcome, read, texts

from dynamo.parsers.base import ReasoningFamily
from dynamo.parsers.reasoning import FAMILIES, opened_by_prompt
from dynamo.parsers.registry import REASONING

FAMILY = {family.name: family for family in FAMILIES}
MARKED = sorted(name for name, family in FAMILY.items() if family.markers)
FRAGMENTS = sorted({marker for family in FAMILIES for marker in family.markers})
OF_CALLS = [
    " to=self",
    " to=user",
    "to=f",
    "assistant",
    "analysis",
    "final",
    "commentary",
    "think",
    "response",
    "tools",
]

NAMES = [
    "basic",
    "deepseek_r1",
    "deepseek_v3",
    "deepseek_v3_1",
    "deepseek_v3_2",
    "deepseek_v4",
    "deepseek-v4",
    "deepseekv4",
    "deepseek_v41",
    "gemma4",
    "gemma-4",
    "glm45",
    "glm47",
    "gpt_oss",
    "granite",
    "inkling",
    "kimi",
    "kimi_k2",
    "kimi_k25",
    "kimi_k3",
    "kimi-k3",
    "minimax_append_think",
    "minimax_m2",
    "minimax_m3",
    "minimax-m3",
    "mistral",
    "muse",
    "muse_glimmer",
    "nemotron3",
    "nemotron_deci",
    "nemotron_nano",
    "nemotron_v3",
    "qwen3",
    "qwen3_coder",
    "step3",
]


def test_every_released_reasoning_parser_name_is_supported() -> None:
    assert sorted(REASONING) == sorted(NAMES)


@pytest.mark.parametrize("name", MARKED)
def test_family_example_is_parsed_as_reasoning_and_content(name: str) -> None:
    family = FAMILY[name]
    for found in outcome(lambda: family.make(family.starts_inside), family.example):
        assert found == Read("Four.", "two and two")


@pytest.mark.parametrize("name", sorted(FAMILY))
@settings(max_examples=15, deadline=None)
@given(pieces=texts([*FRAGMENTS, *OF_CALLS, "<tool_call>", "</tool_call>"]))
def test_result_is_independent_of_chunking_and_contains_no_markers(name: str, pieces: list[str]) -> None:
    family = REASONING[name]
    for is_inside in (False, True):
        found = read(family.make(is_inside), pieces)
        assert found == read(family.make(is_inside), ["".join(pieces)])
        assert found == read(family.make(is_inside), list("".join(pieces)))
        for marker in family.markers:
            assert marker not in found.content
            assert marker not in found.reasoning
        if family.make_before_calls is not None:
            calls = ("<tool_call>", "</tool_call>")
            assert read(family.make_before_calls(is_inside, calls), pieces) == read(
                family.make_before_calls(is_inside, calls), list("".join(pieces))
            )


@pytest.mark.parametrize("name", MARKED)
@settings(max_examples=8, deadline=None)
@given(data=texts([]))
def test_text_without_markers_is_unchanged_content(name: str, data: list[str]) -> None:
    text = "".join(data)
    found = read(FAMILY[name].make(False), data)
    assert (found.content, found.reasoning) == (text, "")


@pytest.mark.parametrize("name", sorted(FAMILY))
def test_reasoning_parser_time_is_linear_in_text_length(name: str) -> None:
    family = FAMILY[name]
    unit = "".join(family.markers) + "text <| and < more\n to=" + family.example

    def fed_s(times: int) -> float:
        parser, text = family.make(False), unit * times
        began_s = time.process_time()
        for at in range(0, len(text), 3):
            parser.feed(text[at : at + 3])
        parser.finish()
        return time.process_time() - began_s

    short_s = min(fed_s(20) for _ in range(3))
    assert fed_s(200) < 25 * short_s + 0.05  # A parser that rescans its input takes a hundred times as long.


@pytest.mark.parametrize(
    ("name", "prompt", "expected"),
    [
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("qwen3", "<|im_start|>assistant\n", None),
        ("qwen3", "What does <think> mean?<|im_end|>\n<|im_start|>assistant\n", None),
        ("deepseek_v3_1", "<｜Assistant｜></think>", False),
        ("gemma4", "<|turn>model\n<|channel>thought\n", True),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", False),
        ("gpt_oss", "<|start|>assistant", None),
        ("gpt_oss", "<|start|>assistant<|channel|>analysis<|message|>", True),
        ("kimi_k3", "<|open|>think<|sep|>", True),
        ("muse", "<|start|>assistant to=self<|message|>", True),
        ("inkling", "<|message_model|><|content_text|>", False),
        ("mistral", "[THINK]", True),
        ("minimax_append_think", "<think>\n", None),
        ("unheard", "<think>\n", None),
    ],
)
def test_prompt_end_determines_whether_reasoning_is_open(name: str, prompt: str, expected: bool | None) -> None:
    assert opened_by_prompt(name, prompt) is expected
    assert opened_by_prompt(REASONING.get(name, name), prompt) is expected


@pytest.mark.parametrize(
    ("answer", "expected"), [("<think>\nLet me", True), ("<think>\nHm</think>\nSo", False), ("So", None)]
)
def test_continued_response_determines_whether_reasoning_is_open(answer: str, expected: bool | None) -> None:
    assert opened_by_prompt("qwen3", answer, is_continued=True) is expected


def test_family_parser_can_start_inside_reasoning() -> None:
    for name in MARKED:
        family: ReasoningFamily = FAMILY[name]
        assert read(family.make(True), ["two and"]) == Read("", "two and")
