"""Inkling: a marker sets the kind of a message."""

import pytest
from tests.unit.parsers.reading import Read, outcome

from dynamo.parsers.reasoning.inkling import NAME_CHARS_MAX, InklingParser

CALL = '<|message_model|>f<|content_invoke_tool_json|>{"name": "f", "args": {"a": "<|end_message|>"}}<|end_message|>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|content_thinking|>a<|end_message|><|message_model|><|content_text|>b<|end_message|>", Read("b", "a")),
        ("<|content_text|>b<|content_model_end_sampling|>", Read("b", "")),
        ("Hello there", Read("Hello there", "")),
        ("Hello", Read("Hello", "")),
        ("<|message_model|><|content_image|>pixels<|end_message|>b", Read("b", "")),
        ("x" * (NAME_CHARS_MAX + 1), Read("x" * (NAME_CHARS_MAX + 1), "")),
        ("", Read()),
    ],
)
def test_inkling_separates_reasoning_and_content(text: str, expected: Read) -> None:
    for found in outcome(lambda: InklingParser(is_inside=False, leaves_calls=False), text):
        assert found == expected


@pytest.mark.parametrize("text", [CALL, CALL.removeprefix("<|message_model|>")])
def test_inkling_leaves_calls_unchanged_for_the_call_parser(text: str) -> None:
    for found in outcome(lambda: InklingParser(is_inside=False, leaves_calls=True), text + "<|message_model|>"):
        assert found == Read(CALL, "")


def test_inkling_calls_without_a_call_parser_are_reasoning() -> None:
    for found in outcome(lambda: InklingParser(is_inside=False, leaves_calls=False), CALL):
        assert found == Read("", '{"name": "f", "args": {"a": ""}}')


def test_inkling_call_interrupted_by_the_next_message_is_closed() -> None:
    text = "f<|content_invoke_tool_json|>{<|message_model|><|content_text|>b"
    for found in outcome(lambda: InklingParser(is_inside=False, leaves_calls=True), text):
        assert found == Read("<|message_model|>f<|content_invoke_tool_json|>{<|end_message|>b", "")


OPEN_STRING = '<|message_model|>f<|content_invoke_tool_json|>{"name": "f", "args": {"a": "x}}<|end_message|>'


@pytest.mark.parametrize(
    ("rest", "content", "reasoning"),
    [
        ("<|message_model|><|content_thinking|>so<|end_message|>", "", "so"),
        ('<|message_model|><|content_text|>Hi "you" there<|end_message|>', 'Hi "you" there', ""),
        (CALL, CALL, ""),
        (OPEN_STRING + CALL, OPEN_STRING + CALL, ""),
        ("", "", ""),
    ],
)
def test_inkling_call_with_unterminated_string_ends_at_its_marker(rest: str, content: str, reasoning: str) -> None:
    for found in outcome(lambda: InklingParser(is_inside=False, leaves_calls=True), OPEN_STRING + rest):
        assert found == Read(OPEN_STRING + content, reasoning)


@pytest.mark.parametrize(
    "string", ["<|end_message|>", 'a \\"<|end_message|>\\" <|content_text|> b', "\\\\<|end_message|>\\\\"]
)
def test_inkling_marker_in_a_closed_string_is_part_of_the_call(string: str) -> None:
    call = CALL.replace("<|end_message|>", string, 1)
    for found in outcome(lambda: InklingParser(is_inside=False, leaves_calls=True), call + "<|content_text|>b"):
        assert found == Read(call + "b", "")
