"""The emitted part of an object is always a prefix of one, and closing completes it."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.parsers.json_object import JsonObject

VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=4)


def through(pieces: list[str]) -> str:
    reader = JsonObject()
    return "".join([*(reader.feed(piece) for piece in pieces), reader.close()])


@settings(max_examples=60, deadline=None)
@given(value=OBJECTS, indent=st.sampled_from([None, 1]), is_ascii=st.booleans(), at=st.integers(0, 200))
def test_json_object_is_unchanged_and_a_truncated_one_is_completed(
    value: dict[str, object], indent: int | None, is_ascii: bool, at: int
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    assert through([text[:at], text[at:]]) == through(list(text)) == text
    begun = through([text[:at]])
    assert begun == through(list(text[:at]))
    assert isinstance(json.loads(begun), dict)


@settings(max_examples=120, deadline=None)
@given(text=st.text(st.sampled_from('{}[]",:\\u0e1-.+ \ntrfalsn'), max_size=30), at=st.integers(0, 30))
def test_any_text_after_an_opening_brace_becomes_an_object(text: str, at: int) -> None:
    text = '{"' + text
    found = through([text[:at], text[at:]])
    assert found == through(list(text))
    assert isinstance(json.loads(found), dict)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "{}"),
        ("[1]", "{}"),
        ("nothing", "{}"),
        ('{"a"', '{"a": null}'),
        ('{"a', '{"a": null}'),
        ('{"a":', '{"a":null}'),
        ('{"a": tr', '{"a": true}'),
        ('{"a": -', '{"a": null}'),
        ('{"a": 1.', '{"a": 1}'),
        ('{"a": 1, ', '{"a": 1}'),
        ('{"a": 1, "b', '{"a": 1, "b": null}'),
        ('{"a": [1, ', '{"a": [1]}'),
        ('{"a": "b\\', '{"a": "b"}'),
        ('{"a": "\\u12', '{"a": ""}'),
        ('{"a": "\\q"}', '{"a": "\\\\q"}'),
        ('{"a": "\t"}', '{"a": "\\u0009"}'),
        ('{"a": 1 2}', '{"a": 1 }'),
        ('{"a": 1,}', '{"a": 1}'),
        ('{"a": nix}', '{"a": null}'),
        ('{"a": 1}}}', '{"a": 1}'),
        (f'{{"a": {"1" * 500}}}', '{"a": null}'),
    ],
)
def test_text_that_is_not_an_object_becomes_an_object(text: str, expected: str) -> None:
    assert through([text]) == through(list(text)) == expected


def test_json_object_depth_is_bounded() -> None:
    assert json.loads(through(['{"a":' * 10_000])) is not None


def test_json_object_reports_its_parser_state() -> None:
    reader = JsonObject()
    reader.feed('{"a')
    assert (reader.is_in_string, reader.is_whole) == (True, False)
    reader.feed('": 1}')
    assert (reader.is_in_string, reader.is_whole, reader.is_broken) == (False, True, False)
    reader = JsonObject()
    reader.feed("x")
    assert reader.is_broken


def test_json_object_time_is_linear_in_text_length() -> None:
    def fed_s(times: int) -> float:
        text = '{"a": [' + '{"b": "cd\\n", "e": 1},   ' * times
        reader = JsonObject()
        began_s = time.process_time()
        for at in range(0, len(text), 3):
            reader.feed(text[at : at + 3])
        return time.process_time() - began_s

    assert fed_s(2000) < 25 * min(fed_s(200) for _ in range(3)) + 0.05
