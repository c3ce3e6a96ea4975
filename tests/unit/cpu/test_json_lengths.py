"""Numbers and strings of JSON end where their grammar would allow an unbounded length."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.cpu.guided import Grammars, Guide, key_of
from dynamo.cpu.json_lengths import DIGITS_MAX, REPEATED_TOKENS_MAX, JsonLengths, TokenStarts
from dynamo.protocols.engine import GuidedDecoding

END = 95
ANSWER = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}},
    "required": ["answer"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars(letters_model: Path) -> Grammars:
    return Grammars(str(letters_model), 96)


@pytest.fixture
def write(grammars: Grammars, letters: str) -> Callable[..., str | None]:
    """Generate with the first allowed character of `wanted`, else any but those; None: no end."""

    def written(wanted: str, tokens_max: int = 2000, **constraint: Any) -> str | None:
        guided = GuidedDecoding(**constraint)
        guide: Guide = grammars.compile(guided, key_of(guided, None)).fresh()
        text = ""
        for _ in range(tokens_max):
            if guide.is_complete or (allowed := guide.allowed([END])) is None:
                return text
            choice = next((one for one in wanted if allowed[letters.index(one)]), None)
            if choice is None:
                if allowed[END]:
                    return text
                choice = next(one for one in '}]"' + letters if allowed[letters.index(one)])
            guide.take(letters.index(choice))
            text += choice
        return None

    return written


def test_json_length_limit_ends_an_unbounded_integer_of_an_object(write: Callable[..., str]) -> None:
    text = write("7", json=ANSWER)
    assert json.loads(text) == {"answer": int("7" * DIGITS_MAX)}


@pytest.mark.parametrize("wanted", ["7", "-7", ".7", "e7", "0", "7.", "+e.7"])
@pytest.mark.parametrize("schema", [{"type": "integer"}, {"type": "number"}, {"type": ["number", "null"]}])
def test_json_length_limit_ends_an_unbounded_number(write: Callable[..., str], schema: Any, wanted: str) -> None:
    text = write(wanted, json=schema)
    assert isinstance(json.loads(text), int | float)
    assert sum(char.isdigit() for char in text) <= DIGITS_MAX + 1


def test_json_length_limit_applies_to_each_number_of_a_list(write: Callable[..., str]) -> None:
    text = write("7,", json={"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3})
    assert json.loads(text) == [int("7" * DIGITS_MAX)] * 3


def test_json_length_limit_permits_a_required_longer_number() -> None:
    starts = TokenStarts.of([b"1", b"}", b"a", b'"', b".5"])
    lengths = JsonLengths(starts)
    for _ in range(DIGITS_MAX + 10):
        lengths.take(0)
    only_digits = np.array([True, False, False, False, True])
    assert lengths.limited(only_digits, may_end=False) is only_digits
    assert not lengths.limited(only_digits, may_end=True).any()
    closing = np.array([True, True, False, False, True])
    assert lengths.limited(closing, may_end=False).tolist() == [False, True, False, False, False]
    lengths.take(1)
    assert lengths.limited(closing, may_end=False) is closing


def test_json_length_limit_ignores_digits_in_strings(write: Callable[..., str]) -> None:
    assert write("7", json={"type": "string", "minLength": 40, "maxLength": 60}) == '"' + "7" * 60 + '"'
    assert write("7", json={"type": "string", "pattern": "^[0-9]+$", "maxLength": 50}) == '"' + "7" * 50 + '"'


def test_json_length_limit_does_not_apply_to_regular_expressions(write: Callable[..., str]) -> None:
    assert write("7", regex="[0-9]{0,60}") == "7" * 60


def test_json_length_limit_closes_tool_arguments(write: Callable[..., str]) -> None:
    tag = {
        "format": {
            "type": "tag",
            "begin": "<a>",
            "content": {"type": "json_schema", "json_schema": ANSWER},
            "end": "</a>",
        }
    }
    text = write("7", structural_tag=tag)
    assert text == '<a>{"answer":' + "7" * DIGITS_MAX + "}</a>" or text.count("7") == DIGITS_MAX


@pytest.mark.parametrize("word", ["s", "so ", "la la!!"])
def test_json_length_limit_closes_a_repeating_string(grammars: Grammars, letters: str, word: str) -> None:
    guided = GuidedDecoding(json={"type": "string"})
    guide = grammars.compile(guided, key_of(guided, None)).fresh()
    text, place = '"', 0
    guide.take(letters.index('"'))
    while not guide.is_complete:
        allowed = guide.allowed([END])
        assert allowed is not None
        char = word[place % len(word)]
        if not allowed[letters.index(char)]:
            char = '"'
        guide.take(letters.index(char))
        text, place = text + char, place + 1
        assert place < 1000, "the string never ends"
    assert REPEATED_TOKENS_MAX < len(json.loads(text)) <= REPEATED_TOKENS_MAX + 8


def test_json_length_limit_permits_a_string_with_new_content(write: Callable[..., str]) -> None:
    long = "".join(f"{number} " for number in range(400))
    assert json.loads(write('"', json={"const": long})) == long


def test_json_length_limit_ignores_tokens_without_text() -> None:
    starts = TokenStarts.of([b"", b"1", b"a", b'"', b"-"])
    assert starts.number.tolist() == [False, True, False, False, True]
    assert starts.letter.tolist() == [False, False, True, False, False]
    assert starts.quote.tolist() == [False, False, False, True, False]
