"""Values: the output is JSON for any text, and the same JSON where the text is some."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.parsers.tool_calls.reader import Reader
from dynamo.parsers.tool_calls.values import DEPTH_MAX, Values, object_json, object_value, whole_json

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(), inner, max_size=4)),
    max_leaves=12,
)


def pieces_of(text):
    """Return the output for each character; check that it can always be completed."""
    written, reader = [], Reader()
    reading = object_value(Values(reader), written.append)
    counts = []
    for char in text:
        reader.push(char)
        if next(reading, "over") == "over":
            break
        counts.append(len("".join(written)))
    else:
        reader.is_over = True
        assert next(reading, "over") == "over"
    return "".join(written), counts


@given(JSON, st.sampled_from([None, 1]), st.booleans())
def test_json_arguments_are_emitted_unchanged(value, indent, is_ascii):
    text = json.dumps({"a": value}, indent=indent, ensure_ascii=is_ascii)
    written, _ = pieces_of(text)
    assert json.loads(written) == {"a": value}
    if "\\ud" not in text:
        assert written == text


@given(JSON, st.data())
def test_truncated_json_arguments_are_completed(value, data):
    text = json.dumps({"a": value})
    written, _ = pieces_of(text[: data.draw(st.integers(0, len(text)))])
    assert isinstance(json.loads(written), dict)


@given(st.text(alphabet="{}[]\",:'\\ue 01.-tnruNFa\n"))
def test_any_text_becomes_a_json_object(text):
    written, _ = pieces_of("{" + text)
    assert isinstance(json.loads(written), dict)
    assert isinstance(json.loads(object_json("{" + text)), dict)


def test_json_string_is_streamed_while_it_is_read():
    _, counts = pieces_of('{"text": "' + "a" * 50)
    assert counts[-50:] == list(range(counts[-50], counts[-50] + 50))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{'a': 'it\\'s \"b\"'}", {"a": 'it\'s "b"'}),
        ('{"a": True, "b": None, "c": [False,],}', {"a": True, "b": None, "c": [False]}),
        ('{"a": "line\nline\ttab"}', {"a": "line\nline\ttab"}),
        (r'{"a": "\d+\.\w"}', {"a": r"\d+\.\w"}),
        (r'{"a": "\ud83d\ude00 \ud83d \udc00 \u12"}', {"a": "😀 � � \\u12"}),
        (r'{"a": "\ud83d\ud83d\ude00"}', {"a": "��\\ude00"}),
        ('{"a": 1 "b": 2}', {"a": 1}),
        ('{"a": [1, {"b": 2', {"a": [1, {}]}),
        ('{"a": tru', {}),
        ('{"a": 12', {}),
        ('{"a": -}', {}),
        ('{"a": "b\\', {"a": "b"}),
        ('{"a": "b\\u00', {"a": "b"}),
        ('{"a": "\\ud83d', {"a": ""}),
        ('{"a', {}),
        ('{"a": "b", "c', {"a": "b"}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ('"no object"', {}),
        ("null", {}),
        ("[1, 2]", {}),
        ("x", {}),
        ("", {}),
    ],
)
def test_malformed_json_is_parsed_as_far_as_possible(text, expected):
    written, _ = pieces_of(text)
    if "ude00" in str(expected):
        assert json.loads(written)["a"].startswith("�")
    else:
        assert json.loads(written) == expected


def test_json_nesting_is_bounded():
    written, _ = pieces_of('{"a":' + "[" * 10_000)
    assert written.count("[") == DEPTH_MAX - 1
    assert isinstance(json.loads(written), dict)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1}', '{"a": 1}'),
        (" [1, 2] ", "[1, 2]"),
        ("{'a': True}", '{"a": true}'),
        ("12", "12"),
        ("[1", None),
        ("[1] x", None),
        ("abc", None),
        ("", None),
    ],
)
def test_json_text_is_one_value_or_none(text, expected):
    assert whole_json(text) == expected
