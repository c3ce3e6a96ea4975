"""Markers are found for any chunking, and text that only resembles one is returned."""

import pytest

from dynamo.parsers.base import CallBegin, ContentDelta, ReasoningDelta
from dynamo.parsers.markers import Markers, Output, Scanner

THINK = ("<think>", "</think>")


def test_scanner_splits_text_at_markers() -> None:
    assert Scanner(THINK).feed("a<think>b</think>c") == [("a", "<think>"), ("b", "</think>"), ("c", "")]


def test_scanner_holds_only_possible_marker_prefixes() -> None:
    scanner = Scanner(THINK)
    assert scanner.feed("a < b </thi") == [("a < b ", "")]
    assert scanner.feed("s") == [("</this", "")]
    assert scanner.feed("<") == [("", "")]
    assert scanner.feed("think>") == [("", "<think>"), ("", "")]
    assert scanner.feed("<<th") == [("<", "")]
    assert scanner.finish() == "<th"
    assert scanner.finish() == ""


@pytest.mark.parametrize("texts", [(), ("<a>", "x<a>y")])
def test_ambiguous_marker_sets_are_refused(texts: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError):
        Markers(texts)


def test_output_is_joined_and_kept_in_order() -> None:
    output = Output(THINK)
    output.emit(ContentDelta, "a")
    output.emit(ContentDelta, "b")
    output.emit(ReasoningDelta, "c")
    output.add(CallBegin(0, "f"))
    output.emit(ContentDelta, "d")
    assert output.take() == [ContentDelta("ab"), ReasoningDelta("c"), CallBegin(0, "f"), ContentDelta("d")]
    assert output.take() == []


def test_output_emits_held_text_at_the_end() -> None:
    output = Output(THINK)
    output.emit(ContentDelta, "<thi")
    output.cut()
    output.emit(ContentDelta, "n")
    assert output.take() == [ContentDelta("<thi")]
    assert output.finish() == [ContentDelta("n")]


def test_text_for_the_next_parser_follows_held_text() -> None:
    output = Output(THINK)
    output.emit(ContentDelta, "<thi")
    output.cut()
    output.emit(ContentDelta, "n")
    output.emit_as_is(ContentDelta, "<think>")
    assert output.take() == [ContentDelta("<thin<think>")]


def test_output_does_not_emit_a_marker_joined_from_pieces() -> None:
    output = Output(("[CALLS]", "[ARGS]"))
    for piece in ("[", "CAL"):
        output.emit(ContentDelta, piece)
    output.cut()
    output.emit(ContentDelta, "LS]x")
    assert "".join(event.text for event in output.finish() if isinstance(event, ContentDelta)) == "[CALx"
