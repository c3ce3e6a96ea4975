"""The text of any model has the requested format, or the request is refused by name."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamo.core.errors import InvalidArgument
from dynamo.cpu.guided import BYTES_MAX, GRAMMARS_MAX, Grammars, Guide, is_plain, key_of
from dynamo.protocols.engine import GuidedDecoding

Make = Callable[..., Any]
END = 95
"""Token that ends the output of the tiny model."""

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars(letters_model: Path) -> Grammars:
    return Grammars(str(letters_model), 96)


@pytest.fixture
def compile_of(grammars: Grammars) -> Callable[..., Guide]:
    def compiled(thoughts_end: str | None = None, **constraint: Any) -> Guide:
        guided = GuidedDecoding(**constraint)
        return grammars.compile(guided, key_of(guided, thoughts_end), thoughts_end).fresh()

    return compiled


def walk(guide: Guide, seed: int, tokens_max: int = 400) -> list[int] | None:
    """Choose any allowed token until the text ends; None if it became too long."""
    rng = np.random.default_rng(seed)
    output: list[int] = []
    while not guide.is_complete and len(output) < tokens_max:
        allowed = guide.allowed([END])
        if allowed is None:
            return output
        token = END if allowed[END] and rng.random() < 0.5 else int(rng.choice(np.flatnonzero(allowed)))
        if token == END:
            return output
        guide.take(token)
        output.append(token)
    return output if guide.is_complete else None


@pytest.fixture
def accepts(letters: str) -> Callable[[Guide, str], bool]:
    """Whether the grammar accepts a text letter by letter, to its end."""

    def check(guide: Guide, text: str) -> bool:
        for char in text:
            token = letters.index(char)
            allowed = None if guide.is_complete else guide.allowed([END])
            if allowed is None or not allowed[token]:
                return False
            guide.take(token)
        if guide.is_complete:
            return True
        allowed = guide.allowed([END])
        return allowed is None or bool(allowed[END])

    return check


@pytest.mark.parametrize(
    ("constraint", "right", "wrong"),
    [
        ({"regex": "[a-c]+-[0-9]{2}"}, ["a-12", "cab-00"], ["", "a-1", "a-123", "A-12"]),
        ({"regex": "^(yes|no)$"}, ["yes", "no"], ["ye", "yesno"]),
        ({"choice": ["yes", 'a "quoted" \\ one\n', "yesterday"]}, ["yes", "yesterday", 'a "quoted" \\ one\n'], ["y"]),
        ({"choice": ["", "a"]}, ["", "a"], ["b"]),
        ({"grammar": 'root ::= "a" ("b" | [0-9]+)'}, ["ab", "a123"], ["a", "abb"]),
        ({"grammar": 'start: "a" DIGITS\nDIGITS: /[0-9]+/'}, ["a12"], ["a", "ab"]),
        ({"json": CITY}, ['{"city":"Oslo"}', '{ "city": "Oslo", "days": 2 }'], ["{}", "[]", '{  "city":"Oslo"}']),
        ({"json": CITY, "whitespace_pattern": r"\n *"}, ['{\n  "city":\n"Oslo"\n}'], ['{"city": "Oslo"}']),
        ({"json": json.dumps(CITY)}, ['{"city":"Oslo"}'], ['{"days":1}']),
        ({"json": {}}, ["1", "null", '{"a":[]}'], ["", "nope"]),
        ({"json": True}, ["1"], [""]),
        ({"json": CITY, "whitespace_pattern": "[ ]{3}"}, ['{   "city":"Oslo"}'], ['{ "city":"Oslo"}']),
    ],
)
def test_guided_text_satisfies_its_constraint(
    compile_of: Make, accepts: Make, constraint: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    assert [text for text in right if not accepts(compile_of(**constraint), text)] == []
    assert [text for text in wrong if accepts(compile_of(**constraint), text)] == []


def test_guided_constraint_may_start_after_reasoning(compile_of: Make, accepts: Make) -> None:
    def guide() -> Guide:
        guide: Guide = compile_of("</think>", regex="[0-9]+")
        return guide

    assert accepts(guide(), "Hm, 3 > 2 < 4.</think>\n\n42")
    assert accepts(guide(), "<think>hm</think>42")
    assert not accepts(guide(), "42")
    assert not accepts(guide(), "hm</think>x")


@pytest.mark.parametrize(
    ("constraint", "param", "words"),
    [
        ({"regex": "("}, "guided_regex", "unclosed group"),
        ({"regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"json": {"type": "nope"}}, "guided_json", "Invalid type: nope"),
        ({"json": {"not": {"type": "string"}}}, "guided_json", "not"),
        ({"json": "{"}, "guided_json", "invalid JSON"),
        ({"json": 5}, "guided_json", "expected an object"),
        ({"json": {"$ref": "http://localhost/other"}}, "guided_json", "http://localhost/other"),
        ({"grammar": "nonsense"}, "guided_grammar", "::="),
        ({"grammar": 'start: "a" missing'}, "guided_grammar", "missing"),
        ({"structural_tag": {"format": {"type": "magic"}}}, "structural_tag", "magic"),
    ],
)
def test_guided_impossible_constraint_is_refused_by_name(
    compile_of: Make, constraint: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(words)) as caught:
        compile_of(**constraint)
    assert caught.value.param == param
    assert len(str(caught.value)) < 600


def test_guided_unbounded_constraint_is_refused_before_compilation() -> None:
    with pytest.raises(InvalidArgument, match="bytes") as caught:
        key_of(GuidedDecoding(regex="a" * BYTES_MAX), None)
    assert caught.value.param == "guided_regex"


def test_guided_decoding_requires_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    guided = GuidedDecoding(regex="a")
    with pytest.raises(InvalidArgument, match=re.escape("tokenizer.json")):
        Grammars(str(tmp_path), 96).compile(guided, key_of(guided, None))


def test_guided_cache_evicts_the_least_used_grammars(letters_model: Path) -> None:
    grammars = Grammars(str(letters_model), 96)
    keys = []
    for number in range(GRAMMARS_MAX + 2):
        guided = GuidedDecoding(regex=str(number))
        keys.append(key_of(guided, None))
        grammars.compile(guided, keys[-1])
        assert grammars.kept(keys[0]) is not None
    assert len(grammars) == GRAMMARS_MAX
    assert [number for number, key in enumerate(keys) if grammars.kept(key) is None] == [1, 2]


def test_guided_eos_is_allowed_only_when_the_text_is_complete(compile_of: Make, letters: str) -> None:
    guide = compile_of(regex="ab?")
    assert not guide.allowed([END])[END]
    guide.take(letters.index("a"))
    allowed = guide.allowed([END])
    assert {letters[at] if at < END else "end" for at in np.flatnonzero(allowed)} == {"b", "end"}
    assert not guide.is_complete


def test_guided_additional_eos_tokens_are_allowed_when_complete(compile_of: Make, letters: str) -> None:
    guide = compile_of(regex="ab?")
    other = letters.index("z")
    assert not guide.allowed([other])[other]
    guide.take(letters.index("a"))
    assert guide.allowed([other])[other]


def test_guided_mask_forbids_tokens_and_a_complete_text_allows_none(compile_of: Make, letters: str) -> None:
    guide = compile_of(regex="a+")
    guide.take(letters.index("a"))
    assert not guide.allowed([END], [END])[END]
    assert guide.allowed([END], [END, letters.index("a")]) is None
    guide = compile_of(regex="a")
    with pytest.raises(InvalidArgument, match="no token fits"):
        guide.allowed([END], [letters.index("a")])
    guide.take(letters.index("a"))
    assert guide.is_complete


def test_guided_refuses_a_token_outside_the_grammar(compile_of: Make, letters: str) -> None:
    guide = compile_of(regex="a")
    with pytest.raises(InvalidArgument, match="guided decoding"):
        guide.take(letters.index("b"))


def test_guided_supports_thousands_of_choices(compile_of: Make, accepts: Make) -> None:
    choices = [f"number {number} of them" for number in range(4000)]
    assert accepts(compile_of(choice=choices), choices[1234])
    assert not accepts(compile_of(choice=choices), "number 4000 of them")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    choices=st.lists(st.text(alphabet="ab <>()[]{}|/\\^$.*+?-#&~'\"\n1", max_size=6), min_size=1, max_size=5),
    data=st.data(),
)
def test_guided_choices_are_matched_literally(
    grammars: Grammars, accepts: Make, choices: list[str], data: st.DataObject
) -> None:
    guided = GuidedDecoding(choice=choices)
    kept = grammars.compile(guided, key_of(guided, None))
    assert all(accepts(kept.fresh(), choice) for choice in choices)
    other = data.draw(st.text(alphabet="ab <>()[]{}|/\\^$.*+?-\n1", max_size=6))
    assert accepts(kept.fresh(), other) == (other in choices)


def test_guided_grammar_copies_are_independent(grammars: Grammars, letters: str) -> None:
    guided = GuidedDecoding(regex="ab")
    kept = grammars.compile(guided, key_of(guided, None))
    first, second = kept.fresh(), kept.fresh()
    first.take(letters.index("a"))
    assert second.allowed([])[letters.index("a")]
    assert first.allowed([])[letters.index("b")]


# ---- any small schema --------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "c d", 'q"'])
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-20, 20),
        st.integers(0, 30),
    ),
    st.builds(lambda size: {"type": "string", "maxLength": size}, st.integers(0, 5)),
    st.builds(
        lambda values: {"enum": values}, st.lists(st.sampled_from(["x", "yy", 3, None, True]), min_size=1, max_size=3)
    ),
    st.builds(lambda value: {"const": value}, st.sampled_from(["k", 7, False])),
    st.sampled_from(
        [
            {"type": "string", "pattern": "^[ab]{1,3}$"},
            {"type": "string", "pattern": "b", "maxLength": 4},
            {"type": "string", "minLength": 2, "maxLength": 3},
            {"type": "string", "format": "date"},
            {"type": "number", "exclusiveMinimum": 0, "maximum": 1.5},
            {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 99},
            {"type": ["integer", "null"], "minimum": 0, "maximum": 5},
            {"$ref": "#/$defs/leaf"},
        ]
    ),
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def made(properties: dict[str, Any], needed: int) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:needed],
            "additionalProperties": False,
        }

    return st.builds(made, st.dictionaries(NAMES, inner, max_size=3), st.integers(0, 3))


def arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def made(items: Any, least: int, more: int) -> dict[str, Any]:
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + more}

    return st.builds(made, inner, st.integers(0, 2), st.integers(0, 2))


def with_leaf(schema: Any) -> Any:
    """The schema, with the definition that some of its parts refer to."""
    return schema | {"$defs": {"leaf": {"enum": ["leaf", 0]}}}


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        arrays(inner),
        st.builds(lambda ways: {"anyOf": ways}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
).map(with_leaf)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_guided_text_under_a_schema_is_valid(grammars: Grammars, letters: str, schema: Any, seed: int) -> None:
    guided = GuidedDecoding(json=schema)
    output = walk(grammars.compile(guided, key_of(guided, None)).fresh(), seed)
    if output is not None:
        jsonschema.validate(json.loads("".join(letters[token] for token in output)), schema)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pattern=st.sampled_from(["[a-z]{0,5}", "(ab|c)*d", "x?y{2,4}z*", "(red|green|blue)-[0-9]{1,3}", "a(b(c)?)?"]),
    seed=st.integers(0, 10_000),
)
def test_guided_text_under_a_pattern_matches_it(grammars: Grammars, letters: str, pattern: str, seed: int) -> None:
    guided = GuidedDecoding(regex=pattern)
    output = walk(grammars.compile(guided, key_of(guided, None)).fresh(), seed)
    assert output is not None
    assert re.fullmatch(pattern, "".join(letters[token] for token in output))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_guided_random_model_under_a_schema_is_valid(
    grammars: Grammars, letters: str, make_core: Make, make_generation: Make, run: Make, schema: Any, seed: int
) -> None:
    guided = GuidedDecoding(json=schema)
    kept = grammars.compile(guided, key_of(guided, None))
    generation = make_generation(
        [seed % 96, 5], max_tokens=150, choices=2, temperature=1.0, seed=seed, rules={"end_ids": frozenset({END})}
    )
    for choice in generation.choices:
        choice.guide = kept.fresh()
    core = make_core()
    core.add(generation)
    run(core)
    ends = {word.index: word.finish_reason for word in generation.reply.messages if hasattr(word, "index")}
    for choice in generation.choices:
        sequence = choice.sequence
        output = [token for token in sequence.tokens[sequence.prompt_tokens :] if token != END]
        if ends[choice.index] != "length":
            jsonschema.validate(json.loads("".join(letters[token] for token in output)), schema)


@pytest.mark.parametrize(
    "guided",
    [
        GuidedDecoding(json={"type": "object"}),
        GuidedDecoding(json={"type": "object", "properties": {"a": {"anyOf": [{"type": "integer"}, {"const": 1}]}}, "required": ["a"]}),
        GuidedDecoding(json={"type": "array", "items": {"enum": ["a", "b"]}, "additionalProperties": False}),
        GuidedDecoding(choice=["a", "b"]),
    ],
)  # fmt: skip
def test_guided_simple_constraints_skip_the_trial(guided: GuidedDecoding) -> None:
    assert is_plain(guided, key_of(guided, None))


@pytest.mark.parametrize(
    "guided",
    [
        GuidedDecoding(regex="a"),
        GuidedDecoding(grammar='start: "a"'),
        GuidedDecoding(json='{"type": "object"}'),
        GuidedDecoding(json={"type": "object"}, whitespace_pattern="(a*)*"),
        GuidedDecoding(json={"type": "object", "properties": {"a": {"allOf": [{"type": "string"}]}}}),
        GuidedDecoding(json={"anyOf": [{"type": "string", "pattern": "a"}]}),
        GuidedDecoding(json={"items": {"maxItems": 10**9}}),
        GuidedDecoding(json={"additionalProperties": {"$ref": "#"}}),
        GuidedDecoding(json={"properties": []}),
        GuidedDecoding(json={"anyOf": {}}),
        GuidedDecoding(json={"items": [1]}),
        GuidedDecoding(choice=["a" * 5000]),
        GuidedDecoding(structural_tag={"type": "structural_tag"}),
    ],
)
def test_guided_constraints_of_unknown_cost_require_a_trial(guided: GuidedDecoding) -> None:
    assert not is_plain(guided, key_of(guided, None))
