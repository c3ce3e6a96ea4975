"""The text format of a request, in the fields that the released frontend sends to its workers."""

import contextlib
import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.model_card import RuntimeConfig
from dynamo.protocols.openai import decode_chat, decode_completion
from dynamo.text.guided import check_schema, form_bytes, guided_decoding

MESSAGES = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now"}}
CLOSED = {**CITY, "additionalProperties": False}
STRICT = {"type": "function", "function": {"name": "s", "strict": True, "parameters": CLOSED}}
LOOSE = {"type": "function", "function": {"name": "l", "strict": False, "parameters": CITY}}
PLAIN = RuntimeConfig()
TAGGED = RuntimeConfig(tool_call_parser="hermes", structural_tag_mode="on")


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def wire(config: RuntimeConfig = PLAIN, **fields: Any) -> Any:
    """`sampling_options.guided_decoding` as it travels."""
    body = json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode()
    guided = guided_decoding(decode_chat(body), config)
    return None if guided is None else msgspec.to_builtins(guided)


def call_schema(name: str, parameters: Any) -> dict[str, Any]:
    return {
        "properties": {"name": {"type": "string", "enum": [name]}, "parameters": parameters},
        "required": ["name", "parameters"],
    }


def calls_schema(*ways: Any, **more: Any) -> dict[str, Any]:
    return {"json": {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": list(ways)}, **more}}


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json": {"type": "object"}}),
        ({"response_format": schema_format(CITY)}, {"json": CITY}),
        ({"response_format": schema_format(CITY, strict=True)}, {"json": CITY}),
        ({"response_format": schema_format(CITY, strict=False, description="d")}, {"json": CITY}),
        ({"guided_json": CITY}, {"json": CITY}),
        ({"guided_json": json.dumps(CITY)}, {"json": json.dumps(CITY)}),
        ({"guided_json": True}, {"json": True}),
        ({"guided_json": {}}, {"json": {}}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_regex": ""}, {"regex": ""}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_choice": []}, None),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"guided_decoding_backend": "xgrammar"}, None),
        ({"guided_whitespace_pattern": " *"}, None),
        (
            {"guided_json": CITY, "guided_decoding_backend": "xgrammar", "guided_whitespace_pattern": "[ ]*"},
            {"json": CITY, "backend": "xgrammar", "whitespace_pattern": "[ ]*"},
        ),
        (
            {"response_format": {"type": "json_object"}, "guided_whitespace_pattern": " "},
            {"json": {"type": "object"}, "whitespace_pattern": " "},
        ),
        ({"guided_json": CITY, "response_format": {"type": "json_object"}}, {"json": CITY}),
        ({"guided_regex": "a+", "response_format": {"type": "text"}}, {"regex": "a+"}),
        ({"tools": [WEATHER]}, None),
        ({"tools": [WEATHER], "tool_choice": "auto", "guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"tools": [WEATHER], "tool_choice": "none", "guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, {"json": {"type": "object"}}),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            {"structural_tag": {"type": "structural_tag", "format": {"type": "any_text"}}},
        ),
        (
            {"response_format": {"type": "structural_tag", "structures": [{"begin": "<f>"}], "triggers": ["<f"]}},
            {"structural_tag": {"type": "structural_tag", "structures": [{"begin": "<f>"}], "triggers": ["<f"]}},
        ),
    ],
)
def test_guided_format_is_sent_as_released_dynamo(fields: dict[str, Any], sent: Any) -> None:
    assert wire(**fields) == sent


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        (
            {"tools": [WEATHER, NOW], "tool_choice": "required"},
            calls_schema(call_schema("get_weather", CITY), call_schema("now", {"type": "object", "properties": {}})),
        ),
        (
            {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False},
            calls_schema(call_schema("get_weather", CITY), maxItems=1),
        ),
        ({"tools": [WEATHER, NOW], "tool_choice": named("get_weather")}, {"json": CITY}),
        ({"tools": [WEATHER, NOW], "tool_choice": named("now")}, {"json": {"type": "object", "properties": {}}}),
        (
            {"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}},
            calls_schema(call_schema("get_weather", CITY)),
        ),
        (
            {"tools": [WEATHER], "tool_choice": "required", "guided_choice": [], "guided_whitespace_pattern": " "},
            calls_schema(call_schema("get_weather", CITY)),
        ),
    ],
)
def test_guided_forced_call_is_sent_as_a_schema(fields: dict[str, Any], sent: Any) -> None:
    assert wire(**fields) == sent
    assert wire(RuntimeConfig(tool_call_parser="hermes"), **fields) == sent
    assert wire(RuntimeConfig(tool_call_parser="pythonic", structural_tag_mode="on"), **fields) == sent


def test_guided_call_schema_has_its_definitions_at_the_top() -> None:
    parameters = {"$defs": {"P": {"type": "integer"}}, "type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    bare = {key: value for key, value in parameters.items() if key != "$defs"}
    want = calls_schema(call_schema("f", bare), **{"$defs": {"P": {"type": "integer"}}})
    assert wire(tools=[tool], tool_choice="required") == want
    assert wire(tools=[tool], tool_choice=named("f")) == {"json": parameters}
    other = {
        "type": "function",
        "function": {"name": "g", "parameters": parameters | {"$defs": {"P": {"type": "string"}}}},
    }
    with pytest.raises(InvalidArgument, match=re.escape("`$defs.P` differs")) as caught:
        wire(tools=[tool, other], tool_choice="required")
    assert caught.value.param == "tools[1].function.parameters.$defs.P"


def tag(tool: dict[str, Any], schema: Any) -> dict[str, Any]:
    return {
        "type": "tag",
        "begin": f'<tool_call>\n{{"name": "{tool["function"]["name"]}", "arguments": ',
        "content": {"type": "json_schema", "json_schema": schema, "style": "json"},
        "end": "}\n</tool_call>",
    }


def hermes(*tags: Any, needed: bool, single: bool = False) -> dict[str, Any]:
    return {
        "structural_tag": {
            "type": "structural_tag",
            "format": {
                "type": "triggered_tags",
                "triggers": ["<tool_call>"],
                "tags": list(tags),
                "at_least_one": needed,
                "stop_after_first": single,
            },
        }
    }


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({"tools": [WEATHER]}, None),
        ({"tools": [WEATHER], "tool_choice": "none", "parallel_tool_calls": False}, None),
        (
            {"tools": [WEATHER, NOW], "tool_choice": "required"},
            hermes(tag(WEATHER, CITY), tag(NOW, True), needed=True),
        ),
        ({"tools": [WEATHER, NOW], "tool_choice": named("now")}, hermes(tag(NOW, True), needed=True)),
        ({"tools": [WEATHER, STRICT]}, hermes(tag(WEATHER, CITY), tag(STRICT, CLOSED), needed=False)),
        ({"tools": [WEATHER], "parallel_tool_calls": False}, hermes(tag(WEATHER, CITY), needed=False, single=True)),
        (
            {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False},
            hermes(tag(WEATHER, CITY), needed=True, single=True),
        ),
        (
            {"tools": [LOOSE, STRICT], "tool_choice": "required"},
            hermes(tag(LOOSE, True), tag(STRICT, CLOSED), needed=True),
        ),
        ({"tools": [STRICT], "response_format": {"type": "json_object"}}, {"json": {"type": "object"}}),
        ({"tools": [STRICT], "guided_regex": "a"}, {"regex": "a"}),
    ],
)
def test_guided_worker_with_structural_tags_receives_the_family_format(fields: dict[str, Any], sent: Any) -> None:
    assert wire(TAGGED, **fields) == sent


def test_guided_structural_tag_scope_and_strictness_come_from_the_worker() -> None:
    always = RuntimeConfig(tool_call_parser="qwen25", structural_tag_mode="on", structural_tag_scope="always")
    assert wire(always, tools=[WEATHER]) == hermes(tag(WEATHER, CITY), needed=False)
    assert wire(always, tools=[WEATHER], tool_choice="none") is None
    strict = RuntimeConfig(tool_call_parser="hermes", structural_tag_mode="on", structural_tag_schema="strict")
    assert wire(strict, tools=[LOOSE], tool_choice="required") == hermes(tag(LOOSE, CITY), needed=True)
    unknown = RuntimeConfig(tool_call_parser="mistral", structural_tag_mode="on", structural_tag_scope="always")
    assert wire(unknown, tools=[STRICT]) is None


def test_guided_text_completion_is_supported() -> None:
    def sent(**fields: Any) -> Any:
        body = json.dumps({"model": "m", "prompt": "x", **fields}).encode()
        return guided_decoding(decode_completion(body), TAGGED)

    assert sent() is None
    guided = sent(guided_regex="a+")
    assert guided is not None
    assert guided.regex == "a+"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing field `json_schema`"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": CITY}}},
            "response_format.json_schema.name",
            "missing field `name`",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "missing field `schema`",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": 5, "schema": CITY}}},
            "response_format.json_schema.name",
            "must be a string",
        ),
        (
            {"response_format": schema_format("zz")},
            "response_format.json_schema.schema",
            "`response_format.json_schema.schema` must be a JSON object, got string",
        ),
        ({"response_format": schema_format(None)}, "response_format.json_schema.schema", "is required when"),
        ({"response_format": schema_format(True)}, "response_format.json_schema.schema", "got boolean"),
        ({"response_format": schema_format([])}, "response_format.json_schema.schema", "got array"),
        (
            {"response_format": schema_format({"type": "object", "properties": {"a": {"type": "intger"}}})},
            "response_format.json_schema.schema",
            ".properties.a.type: 'intger' is not a JSON type",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "needs a `format`"),
        (
            {"response_format": {"type": "structural_tag", "format": 5}},
            "response_format.format",
            "must be a JSON object",
        ),
        ({"response_format": {"type": "structural_tag", "structures": 5, "triggers": []}}, "response_format", "needs"),
        ({"guided_json": "not json"}, "guided_json", "not valid JSON"),
        ({"guided_json": 5}, "guided_json", "must be a JSON schema, got number"),
        ({"guided_json": []}, "guided_json", "got array"),
        ({"guided_regex": "a(b"}, "guided_regex", "the parenthesis at 1 is never closed"),
        ({"guided_regex": "a)b"}, "guided_regex", "the parenthesis at 1 was never opened"),
        ({"guided_regex": "[a-z"}, "guided_regex", "the bracket at 0 is never closed"),
        ({"guided_regex": "a\\"}, "guided_regex", "ends with a backslash"),
        ({"guided_regex": "a" * 70_000}, "guided_regex", "70000 characters"),
        ({"guided_choice": ["a"] * 5000}, "guided_choice", "5000 members"),
        ({"guided_choice": ["a" * 70_000]}, "guided_choice", "characters"),
        ({"guided_grammar": " "}, "guided_grammar", "empty"),
        ({"guided_grammar": "a" * 70_000}, "guided_grammar", "characters"),
        ({"guided_json": {}, "guided_whitespace_pattern": "("}, "guided_whitespace_pattern", "never closed"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "received: regex, choice"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "response_format",
            "Only one guided-decoding constraint can be set; received: json, regex",
        ),
        (
            {"guided_json": {}, "response_format": {"type": "structural_tag", "format": {}}},
            "response_format",
            "received: structural_tag, json",
        ),
        (
            {"tools": [WEATHER], "tool_choice": "required", "guided_regex": "a"},
            "guided_regex",
            "cannot be combined with guided_regex",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}]}
            | {"tool_choice": "required"},
            "tools[0].function.parameters",
            "'x' is not a JSON type",
        ),
    ],
)
def test_guided_error_names_an_unsupported_option(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(words)) as caught:
        wire(**fields)
    assert caught.value.param == param


def test_guided_tools_of_a_free_call_are_checked_when_compiled_to_a_grammar() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}
    assert wire(tools=[tool]) is None
    with pytest.raises(InvalidArgument, match="is not a JSON type"):
        wire(TAGGED, tools=[tool, STRICT])


@pytest.mark.parametrize("choice", ["none", "auto", "required"])
def test_guided_strict_tool_has_a_closed_schema(choice: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": CITY}}
    with pytest.raises(InvalidArgument, match="require additionalProperties: false") as caught:
        wire(tools=[STRICT, tool], tool_choice=choice)
    assert caught.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": ["string", "nil"]}, ".type: 'nil'"),
        ({"type": 5}, ".type: '5'"),
        ({"properties": []}, ".properties must be an object"),
        ({"properties": {"a": 5}}, ".properties.a must be a JSON schema, got number"),
        ({"anyOf": []}, ".anyOf must be a non-empty list"),
        ({"oneOf": {}}, ".oneOf must be a non-empty list"),
        ({"anyOf": [{"enum": []}]}, ".anyOf[0].enum"),
        ({"required": "a"}, ".required must be a list of strings"),
        ({"required": [5]}, ".required must be a list of strings"),
        ({"items": {"minItems": -1}}, ".items.minItems must be a number of at least 0"),
        ({"maxLength": "5"}, ".maxLength"),
        ({"maxLength": True}, ".maxLength"),
        ({"maxLength": 1.5}, ".maxLength"),
        ({"pattern": 5}, ".pattern must be a string"),
        ({"$ref": 5}, ".$ref must be a string"),
        ({"$ref": "#/$defs/Q", "$defs": {"P": {}}}, ".$ref: '#/$defs/Q' does not exist"),
        ({"items": [{"type": "x"}]}, ".items[0].type"),
        ({"not": None, "if": 5}, ".if must be a JSON schema"),
    ],
)
def test_guided_schema_error_contains_the_given_path(schema: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(f"here{words}")) as caught:
        check_schema(schema, "here")
    assert caught.value.param == "here"


def test_guided_valid_schema_is_accepted() -> None:
    check_schema(
        {
            "$defs": {"a/b": {"type": "integer"}, "list": {"items": [True, False]}},
            "type": ["object", "null"],
            "properties": {
                "a": {"$ref": "#/$defs/a~1b"},
                "b": {"$ref": "#/$defs/list/items/1"},
                "c": {"$ref": "#"},
                "d": {"$ref": "other.json#/x"},
                "type": {"enum": [None, 1]},
                "e": {"$ref": "#/%24defs/list"},
            },
            "additionalProperties": False,
            "minProperties": 1.0,
            "required": [],
            "x-anything": {"type": "nothing"},
        },
        "here",
    )


def test_guided_schema_that_is_too_large_or_too_deep_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="bytes"):
        check_schema({"enum": ["x" * (1 << 18)]}, "here")
    deep: Any = {"type": "string"}
    for _ in range(80):
        deep = {"items": deep}
    with pytest.raises(InvalidArgument, match="nested more than"):
        check_schema(deep, "here")
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(InvalidArgument, match="at most"):
        check_schema(deep, "here")
    with pytest.raises(InvalidArgument, match="more than 8192 schemas"):
        check_schema({"anyOf": [{}] * 9000}, "here")


def test_guided_format_size_is_checked_first() -> None:
    def size(**fields: Any) -> int:
        return form_bytes(decode_chat(json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode()))

    assert size() == size(guided_regex="a") == size(tools=[WEATHER], tool_choice="none") == 0
    assert size(guided_json={"enum": ["x" * 5000]}) > 5000
    assert size(response_format=schema_format({"enum": ["x" * 5000]})) > 5000
    assert size(tools=[WEATHER] * 50) == 0
    assert size(tools=[WEATHER] * 50, tool_choice="required") > 5000
    assert size(tools=[STRICT] * 50) > 5000
    deep: Any = {}
    for _ in range(500):
        deep = {"a": deep}
    assert size(guided_json=deep) > 1000


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["type", "items", "properties", "anyOf", "$defs", "$ref", "required", "enum", "not", "x"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_guided_schema_check_never_raises_internal_errors(schema: Any) -> None:
    with contextlib.suppress(InvalidArgument):
        check_schema(schema, "here")


@given(st.text(alphabet="()[]\\^a|*", max_size=12))
def test_guided_regex_supported_by_python_is_accepted(pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, FutureWarning):
        return
    assert wire(guided_regex=pattern) == {"regex": pattern}


def test_strict_tool_above_the_size_limit_is_refused_before_its_schema_is_checked() -> None:
    names = [f"field_{number}" for number in range(20_000)]
    schema = {"type": "object", "properties": {name: {} for name in names}, "required": names}
    tool = {"type": "function", "function": {"name": "s", "strict": True, "parameters": schema}}
    with pytest.raises(
        InvalidArgument, match=r"tools\[0\].function.parameters has \d+ bytes; at most 262144"
    ) as refused:
        wire(tools=[tool])
    assert refused.value.param == "tools[0].function.parameters"
