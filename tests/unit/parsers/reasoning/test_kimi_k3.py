"""Kimi K3: channels between tags."""

import pytest
from tests.unit.parsers.reading import Read, outcome

from dynamo.parsers.reasoning.kimi_k3 import TAG_CHARS_MAX, KimiK3Parser

TOOLS = '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>x<|close|>call<|sep|><|close|>tools<|sep|>'
ENDS = "<|close|>message<|sep|><|end_of_msg|>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|open|>think<|sep|>a<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|>", Read("b", "a")),
        ("<|open|> think <|sep|>a<|close|> think <|sep|>b" + ENDS, Read("b", "a")),
        ("b" + ENDS, Read("b", "")),
        ("a <|open|>x<|open|>think<|sep|>c", Read("a x", "c")),
        ("a<|open|>thi", Read("a", "")),
        ("a<|sep|>b", Read("ab", "")),
        ("<|open|>think<<|end_of_msg|>|sep|>a", Read("think<a", "")),
        ("<|open|>" + "x" * TAG_CHARS_MAX, Read("x" * TAG_CHARS_MAX, "")),
    ],
)
def test_kimi_k3_separates_reasoning_and_content(text: str, expected: Read) -> None:
    for found in outcome(lambda: KimiK3Parser(is_inside=False, leaves_calls=False), text):
        assert found == expected


def test_kimi_k3_leaves_calls_unchanged_for_the_call_parser() -> None:
    for found in outcome(lambda: KimiK3Parser(is_inside=True, leaves_calls=True), "a<|close|>think<|sep|>" + TOOLS):
        assert found == Read(TOOLS, "a")
    for found in outcome(lambda: KimiK3Parser(is_inside=False, leaves_calls=True), TOOLS[:40]):
        assert found == Read(TOOLS[:40], "")


def test_kimi_k3_calls_without_a_call_parser_are_reasoning() -> None:
    for found in outcome(lambda: KimiK3Parser(is_inside=False, leaves_calls=False), TOOLS + ENDS):
        assert found == Read("", "x")
