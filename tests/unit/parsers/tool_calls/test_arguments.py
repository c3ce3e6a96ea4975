"""Arguments: an object is written parameter by parameter."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.parsers.tool_calls.arguments import Arguments, read_parameter
from dynamo.parsers.tool_calls.reader import Reader, landmarks

NULLABLE = frozenset({"string", "null"})
END = landmarks("</v>")


def written(pieces, types, *, is_framed=False):
    """Return the object with one parameter whose text arrives in those pieces, and its intermediate states."""
    found, grown, reader = [], [], Reader()
    arguments = Arguments(found.append)
    reading = read_parameter(reader, arguments.parameter("x", frozenset(types), is_framed=is_framed), END)
    for piece in pieces:
        reader.push(piece)
        if next(reading, END) is END:
            break
        grown.append("".join(found))
    else:
        reader.is_over = True
        assert next(reading, END) is END
    arguments.close()
    return json.loads("".join(found)), grown


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("a</v>", {"string"}, {"x": "a"}),
        ("a", {"string"}, {"x": "a"}),
        ("</v>", {"string"}, {"x": ""}),
        ("", {"string"}, {}),
        ("null</v>", NULLABLE, {"x": None}),
        ("nul</v>", NULLABLE, {"x": "nul"}),
        (" None </v>", NULLABLE, {"x": None}),
        ("null", NULLABLE, {"x": None}),
        (" " * 40 + "null</v>", NULLABLE, {"x": " " * 40 + "null"}),
        ("12</v>", {"integer"}, {"x": 12}),
        ("12", {"integer"}, {}),
    ],
)
def test_truncated_parameter_keeps_its_parsed_part(text, types, expected):
    assert written([text], types)[0] == expected
    assert written(list(text), types)[0] == expected


@given(st.text(alphabet='ab\n"\\é< '), st.sampled_from([frozenset({"string"}), NULLABLE]), st.booleans())
def test_string_parameter_round_trips(text, types, is_framed):
    framed = f"\n{text}\n</v>" if is_framed else f"{text}</v>"
    assert written(list(framed), types, is_framed=is_framed)[0] == {"x": text}


def test_string_parameter_is_streamed_and_other_types_are_sent_complete():
    assert written(["ab", "cd", "</v>"], {"string"})[1][:2] == ['{"x":"ab', '{"x":"abcd']
    assert written(["12", "34", "</v>"], {"integer"})[1][:2] == ["", ""]


def test_several_parameters_form_one_object():
    found = []
    arguments = Arguments(found.append)
    arguments.value("a")("1")
    arguments.value("unused")("")
    write = arguments.value("b")
    write("[")
    write("2]")
    arguments.close()
    assert "".join(found) == '{"a":1,"b":[2]}'
