"""Muse: the recipient of a message determines its kind."""

import pytest
from tests.unit.parsers.reading import Read, outcome

from dynamo.parsers.reasoning.muse import HEADER_CHARS_MAX, MuseParser

CALL = '<|start|>assistant to=f<|message|>\n<atem:invoke name="f"></atem:invoke><|eom|>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" to=self<|message|>a<|eom|><|start|>assistant to=user<|message|>b<|eot|>", Read("b", "a")),
        (" to=self<|message|>a<|eom|><|start|>assistant to=self<|message|>b<|eom|>", Read("", "a\nb")),
        ("<|message|>b<|eot|>", Read("b", "")),
        ("to whom it may concern", Read("to whom it may concern", "")),
        ("tomato", Read("tomato", "")),
        (" to=self<|message|>I want to=go on<|eom|>", Read("", "I want to=go on")),
        (" to=self<|message|>potato=f<|message|>x", Read("", "potato=fx")),
        (" to=self<|message|>a to=self\n\nb<|start|>", Read("", "a to=self\n\nb")),
        (" to=self<|message|>cut off to", Read("", "cut off to")),
        (" to=user<|message|>write to=f<|message|>x<|eot|>", Read("write to=fx", "")),
        (" to=", Read(" to=", "")),
        ("<|start|>assistant", Read()),
    ],
)
def test_muse_separates_reasoning_and_content(text: str, expected: Read) -> None:
    for found in outcome(lambda: MuseParser(is_inside=False, leaves_calls=False), text):
        assert found == expected


def test_muse_leaves_calls_unchanged_for_the_call_parser() -> None:
    for found in outcome(lambda: MuseParser(is_inside=False, leaves_calls=True), " to=self<|message|>a<|eom|>" + CALL):
        assert found == Read(CALL, "a")


def test_muse_calls_without_a_call_parser_are_reasoning() -> None:
    for found in outcome(lambda: MuseParser(is_inside=False, leaves_calls=False), CALL):
        assert found == Read("", '\n<atem:invoke name="f"></atem:invoke>')


@pytest.mark.parametrize("gap", [" ", "\n"])
def test_muse_call_ends_unterminated_reasoning(gap: str) -> None:
    text = f" to=self<|message|>I ask.{gap}to=f<|message|>x<|eom|>"
    for found in outcome(lambda: MuseParser(is_inside=False, leaves_calls=True), text):
        assert found == Read("<|start|>assistant to=f<|message|>x<|eom|>", f"I ask.{gap}")


def test_muse_call_interrupted_by_the_next_message_is_closed() -> None:
    text = " to=f<|message|>x<|start|>assistant to=user<|message|>b<|eot|>"
    for found in outcome(lambda: MuseParser(is_inside=False, leaves_calls=True), text):
        assert found == Read("<|start|>assistant to=f<|message|>x<|eom|>b", "")


def test_muse_text_longer_than_a_header_is_not_a_header() -> None:
    long = "to=" + "f" * HEADER_CHARS_MAX
    for found in outcome(lambda: MuseParser(is_inside=True, leaves_calls=True), f"a {long}<|message|>b"):
        assert found == Read("", f"a {long}b")
    for found in outcome(lambda: MuseParser(is_inside=False, leaves_calls=True), f"{long}<|message|>b"):
        assert found == Read(f"{long}b", "")
