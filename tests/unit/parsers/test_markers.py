"""Markers are found however the text is cut, and what only looks like one is given back."""

import pytest

from dynamo.parsers.base import CallBegin, Content, Reasoning
from dynamo.parsers.markers import Markers, Output, Scanner

THINK = ("<think>", "</think>")


def test_text_comes_out_between_markers() -> None:
    assert Scanner(THINK).feed("a<think>b</think>c") == [("a", "<think>"), ("b", "</think>"), ("c", "")]


def test_what_may_begin_a_marker_is_held_back_and_no_more() -> None:
    scanner = Scanner(THINK)
    assert scanner.feed("a < b </thi") == [("a < b ", "")]
    assert scanner.feed("s") == [("</this", "")]
    assert scanner.feed("<") == [("", "")]
    assert scanner.feed("think>") == [("", "<think>"), ("", "")]
    assert scanner.feed("<<th") == [("<", "")]
    assert scanner.finish() == "<th"
    assert scanner.finish() == ""


@pytest.mark.parametrize("texts", [(), ("<a>", "x<a>y")])
def test_a_set_that_no_scanner_could_tell_apart_is_a_mistake(texts: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError):
        Markers(texts)


def test_output_is_joined_and_kept_in_order() -> None:
    output = Output(THINK)
    output.emit(Content, "a")
    output.emit(Content, "b")
    output.emit(Reasoning, "c")
    output.add(CallBegin(0, "f"))
    output.emit(Content, "d")
    assert output.take() == [Content("ab"), Reasoning("c"), CallBegin(0, "f"), Content("d")]
    assert output.take() == []


def test_what_was_held_at_a_cut_is_said_in_the_end() -> None:
    output = Output(THINK)
    output.emit(Content, "<thi")
    output.cut()
    output.emit(Content, "n")
    assert output.take() == [Content("<thi")]
    assert output.finish() == [Content("n")]


def test_text_for_the_next_reader_comes_after_what_was_held() -> None:
    output = Output(THINK)
    output.emit(Content, "<thi")
    output.cut()
    output.emit(Content, "n")
    output.emit_as_is(Content, "<think>")
    assert output.take() == [Content("<thin<think>")]


def test_output_keeps_markers_apart_whose_beginning_came_in_pieces() -> None:
    output = Output(("[CALLS]", "[ARGS]"))
    for piece in ("[", "CAL"):
        output.emit(Content, piece)
    output.cut()
    output.emit(Content, "LS]x")
    assert "".join(event.text for event in output.finish() if isinstance(event, Content)) == "[CALx"
