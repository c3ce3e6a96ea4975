"""Reader: grammars see one text, for any chunking."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.parsers.tool_calls.reader import Landmarks, Reader, Reading, landmarks

MARKS = landmarks("[", "[CALLS]", "<end>", "ab<")


def split(reader: Reader, found: list[str]) -> Reading[None]:
    """Yield every landmark, and the text between them."""
    parts: list[str] = []
    while mark := (yield from reader.until(MARKS, parts.append)):
        found += ["".join(parts), mark]
        parts.clear()
    found.append("".join(parts))


def read(pieces: list[str]) -> list[str]:
    reader, found = Reader(), []
    reading = split(reader, found)
    for piece in pieces:
        reader.push(piece)
        next(reading)
        assert reader.kept_chars < len("[CALLS]"), "what was read is let go"
    reader.is_over = True
    with pytest.raises(StopIteration):
        next(reading)
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a[b", ["a", "[", "b"]),
        ("a[CALLS]b", ["a", "[CALLS]", "b"]),
        ("a[CALLSb", ["a", "[", "CALLSb"]),
        ("[", ["", "[", ""]),
        ("[CALLS", ["", "[", "CALLS"]),
        ("ab<end>", ["", "ab<", "end>"]),
        ("a<end>", ["a", "<end>", ""]),
        ("a<en", ["a<en"]),
        ("", [""]),
    ],
)
def test_reader_finds_the_first_and_longest_landmark(text, expected):
    assert read([text]) == expected
    assert read(list(text)) == expected


@given(st.lists(st.sampled_from(["[", "[CALLS]", "CALLS", "]", "<end>", "<", "a", "b", "ab<", "e", ">"])), st.data())
def test_reader_landmarks_are_independent_of_chunking(parts, data):
    text = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[low:high] for low, high in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces) == read([text])


def wait(reading):
    """True while a reading waits for more text; otherwise what it returned."""
    try:
        next(reading)
    except StopIteration as end:
        return end.value
    return True


def test_reader_waits_for_a_partial_landmark():
    reader = Reader("[CA")
    reading = reader.at_any(landmarks("[CALLS]"))
    assert wait(reading) is True
    reader.push("LLS]")
    assert wait(reading) == "[CALLS]"
    assert reader.kept_chars == len("[CALLS]")


def test_reader_returns_no_landmark_when_a_prefix_does_not_continue():
    reader = Reader("[CA")
    reading = reader.at_any(landmarks("[CALLS]"))
    assert wait(reading) is True
    reader.push("B")
    assert wait(reading) == ""


def test_reader_word_ends_at_the_first_other_character():
    reader = Reader("ab")
    reading = reader.word(re.compile("[a-z]*"))
    assert wait(reading) is True
    reader.push("c1")
    assert wait(reading) == "abc"
    reader.is_over = True
    assert wait(reader.word(re.compile("[0-9]*"))) == "1"
    assert wait(reader.peek()) == ""


def test_reader_reads_returned_text_again():
    reader = Reader("[x] y", is_over=True)
    assert wait(reader.until(MARKS, lambda _: None)) == "["
    reader.back("[")
    assert wait(reader.peek()) == "["
    reader.skip(3)
    reader.restore("[x]")
    assert reader.kept_chars == len("[x] y")


def test_landmark_sets_are_cached():
    assert landmarks("a", "b") is landmarks("a", "b")
    assert Landmarks(["a", "ab"]).texts == ("ab", "a")
