"""Text with constrained parts: the texts that a structural tag allows and rejects."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.cpu.config import DEMO_MODEL
from dynamo.cpu.guided import Grammars, Guide, key_of
from dynamo.protocols.engine import GuidedDecoding
from dynamo.text.tokenizer.tokenizer import Tokenizer

Accepts = Callable[[Any, str], bool]
ENDS = [2041]

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}


def call(name: str, schema: Any) -> dict[str, Any]:
    return {
        "type": "tag",
        "begin": f'<tool_call>\n{{"name": "{name}", "arguments": ',
        "content": {"type": "json_schema", "json_schema": schema, "style": "json"},
        "end": "}\n</tool_call>",
    }


def hermes(**more: Any) -> dict[str, Any]:
    tags = [call("get_weather", CITY), call("now", True)]
    return {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags, **more}


WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
BAD = '<tool_call>\n{"name": "get_weather", "arguments": {"town": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def accepts() -> Accepts:
    grammars, tokenizer = Grammars(DEMO_MODEL, 2048), Tokenizer.from_dir(DEMO_MODEL)

    def check(tag: Any, text: str) -> bool:
        guided = GuidedDecoding(structural_tag=tag)
        guide: Guide = grammars.compile(guided, key_of(guided, None)).fresh()
        for token in tokenizer.encode(text):
            allowed = None if guide.is_complete else guide.allowed(ENDS)
            if allowed is None or not allowed[token]:
                return False
            guide.take(token)
        allowed = None if guide.is_complete else guide.allowed(ENDS)
        return allowed is None or bool(allowed[ENDS].any())

    return check


@pytest.mark.parametrize(
    ("more", "right", "wrong"),
    [
        ({}, ["", "hi", "hi" + WEATHER, WEATHER + "\n" + NOW + " bye"], [BAD, "hi <tool_call>x", WEATHER[:-3]]),
        ({"at_least_one": True}, [WEATHER, NOW + "\n" + WEATHER, NOW + " bye"], ["", "hi", "hi" + WEATHER, BAD]),
        ({"stop_after_first": True}, ["", "hi", "hi" + WEATHER], [WEATHER + "x", WEATHER + NOW]),
        ({"at_least_one": True, "stop_after_first": True}, [WEATHER, NOW], ["", "hi", WEATHER + "x", WEATHER + NOW]),
    ],
)
def test_structural_tags_start_at_their_trigger(
    accepts: Accepts, more: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    tag = {"type": "structural_tag", "format": hermes(**more)}
    assert [text for text in right if not accepts(tag, text)] == []
    assert [text for text in wrong if accepts(tag, text)] == []


def test_structural_tag_vocabulary_marker_is_one_token() -> None:
    grammars, tokenizer = Grammars(DEMO_MODEL, 2048), Tokenizer.from_dir(DEMO_MODEL)
    guided = GuidedDecoding(structural_tag={"format": hermes(at_least_one=True)})
    allowed = grammars.compile(guided, key_of(guided, None)).fresh().allowed(ENDS)
    assert allowed is not None
    assert [token for token, is_allowed in enumerate(allowed) if is_allowed] == [tokenizer.token_to_id("<tool_call>")]


def test_structural_tags_accept_the_older_form_with_text_triggers(accepts: Accepts) -> None:
    tag = {
        "structures": [
            {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
            {"begin": "[g]", "schema": {"type": "boolean"}, "end": "[/g]"},
        ],
        "triggers": ["<f", "[g]"],
    }
    for given in (tag, json.dumps(tag)):
        assert accepts(given, "a < b <f=a>12</f> and [g]true[/g].")
        assert accepts(given, "nothing at all")
        assert not accepts(given, "<f=c>")
        assert not accepts(given, "<f=a>x</f>")
        assert not accepts(given, "[g]1[/g]")


STYLED = {
    "qwen_xml": (
        ("<tool_call>\n<function=get_weather>\n", "\n</function>\n</tool_call>"),
        "<parameter=city>\nNew\nYork\n</parameter>",
        "\n<parameter=days>\n2\n</parameter>",
    ),
    "glm_xml": (
        ("<tool_call>get_weather\n", "</tool_call>"),
        "<arg_key>city</arg_key>\n<arg_value>New York</arg_value>",
        "\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>",
    ),
    "deepseek_xml": (
        ('<｜DSML｜invoke name="get_weather">\n', "</｜DSML｜invoke>\n"),
        '<｜DSML｜parameter name="city" string="true">New York</｜DSML｜parameter>\n',
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n',
    ),
}


@pytest.mark.parametrize("style", STYLED)
def test_structural_tag_arguments_follow_the_family_style(accepts: Accepts, style: str) -> None:
    (begin, end), city, days = STYLED[style]
    content = {"type": "json_schema", "json_schema": CITY, "style": style}
    tag = {"format": {"type": "tag", "begin": begin, "content": content, "end": end}}
    assert accepts(tag, begin + city + end)
    assert accepts(tag, begin + city + days + end)
    assert not accepts(tag, begin + end)
    assert not accepts(tag, begin + days.lstrip("\n") + end)
    assert not accepts(tag, begin + city + days.replace("2", "two") + end)


@pytest.mark.parametrize("style", STYLED)
def test_structural_tag_without_schema_allows_any_arguments(accepts: Accepts, style: str) -> None:
    (begin, end), city, days = STYLED[style]
    days = days.replace("false", "true")
    content = {"type": "json_schema", "json_schema": True, "style": style}
    tag = {"format": {"type": "tag", "begin": begin, "content": content, "end": end}}
    for arguments in ("", city, city + days, city + days + (days if days[0] == "\n" else city)):
        assert accepts(tag, begin + arguments + end)


@pytest.mark.parametrize("style", STYLED)
def test_structural_tag_optional_parameters_may_be_omitted(accepts: Accepts, style: str) -> None:
    properties = {name: {"type": "integer"} for name in ("a", "b", "c")} | {
        "d": {"type": "string", "enum": ["x y", "z"]}
    }
    (begin, end), *_ = STYLED[style]

    def written(arguments: dict[str, str]) -> str:
        if style == "qwen_xml":
            return "\n".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in arguments.items())
        if style == "glm_xml":
            return "\n".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in arguments.items()
            )
        return "".join(
            f'<｜DSML｜parameter name="{key}" string="{"true" if key == "d" else "false"}">{value}</｜DSML｜parameter>\n'
            for key, value in arguments.items()
        )

    whole = {"a": "1", "b": "2", "c": "3", "d": "x y"}
    for required in ([], ["b"], ["a", "d"]):
        schema = {"type": "object", "properties": properties, "required": required}
        content = {"type": "json_schema", "json_schema": schema, "style": style}
        tag = {"format": {"type": "tag", "begin": begin, "content": content, "end": end}}
        for picked in range(16):
            some = {key: value for at, (key, value) in enumerate(whole.items()) if picked >> at & 1}
            assert accepts(tag, begin + written(some) + end) == (set(required) <= set(some)), (required, some)
        assert not accepts(tag, begin + written(whole | {"d": "w"}) + end)


def test_structural_tag_parameters_may_refer_to_schema_definitions(accepts: Accepts) -> None:
    schema = {
        "$defs": {"P": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/P"}},
        "required": ["p"],
    }
    tag = {
        "format": {
            "type": "tag",
            "begin": "<function=f>\n",
            "content": {"type": "json_schema", "json_schema": schema, "style": "qwen_xml"},
            "end": "\n</function>",
        }
    }
    assert accepts(tag, '<function=f>\n<parameter=p>\n{"x": 1}\n</parameter>\n</function>')
    assert not accepts(tag, '<function=f>\n<parameter=p>\n{"x": "1"}\n</parameter>\n</function>')


def test_structural_tags_support_sequences_separators_and_choices(accepts: Accepts) -> None:
    one = {
        "type": "tag",
        "begin": "<|b|>functions.f:",
        "content": {
            "type": "sequence",
            "elements": [
                {"type": "regex", "pattern": "[0-9]+"},
                {"type": "const_string", "value": "<|a|>"},
                {"type": "json_schema", "json_schema": CITY},
            ],
        },
        "end": "<|e|>",
    }
    several = {"type": "tags_with_separator", "tags": [one], "separator": ", ", "at_least_one": True}
    tag = {"format": {"type": "sequence", "elements": [{"type": "const_string", "value": "<|s|>"}, several]}}
    first = '<|b|>functions.f:0<|a|>{"city":"x"}<|e|>'
    assert accepts(tag, "<|s|>" + first)
    assert accepts(tag, "<|s|>" + first + ", " + first.replace(":0", ":1"))
    assert not accepts(tag, "<|s|>")
    assert not accepts(tag, "<|s|>" + first + first)
    several |= {"at_least_one": False, "stop_after_first": True}
    assert accepts(tag, "<|s|>")
    assert not accepts(tag, "<|s|>" + first + ", " + first)


def test_structural_tags_support_alternatives_repetitions_and_grammars(accepts: Accepts) -> None:
    tag = {
        "format": {
            "type": "or",
            "elements": [
                {"type": "const_string", "value": "a"},
                {"type": "grammar", "grammar": "start: /b+/"},
                {"type": "plus", "content": {"type": "const_string", "value": "xy"}},
                {"type": "sequence", "elements": [
                    {"type": "optional", "content": {"type": "const_string", "value": "("}},
                    {"type": "star", "content": {"type": "const_string", "value": "."}},
                    {"type": "const_string", "value": ")"},
                ]},
            ],
        }
    }  # fmt: skip
    for text in ("a", "bbb", "xy", "xyxy", ")", "(...)", "..)"):
        assert accepts(tag, text), text
    for text in ("", "ab", "xyx", "((.)"):
        assert not accepts(tag, text), text


def test_structural_tag_text_can_exclude_substrings(accepts: Accepts) -> None:
    inner = {"type": "tag", "begin": "<a>", "content": {"type": "any_text", "excludes": ["no"]}, "end": "</a>"}
    tag = {"format": {"type": "sequence", "elements": [inner, {"type": "any_text", "excludes": ["END"]}]}}
    assert accepts(tag, "<a>hi</a> bye")
    assert accepts(tag, "<a></a>")
    assert not accepts(tag, "<a>no</a>")
    assert not accepts(tag, "<a>x</a> END")
    assert not accepts(tag, "<a>x")


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        (5, "expected an object"),
        ("{", "invalid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ({}, "expected `format`"),
        ({"format": 5}, "`format` must be an object"),
        ({"format": {"type": "magic"}}, "'magic' are not supported; supported: const_string"),
        ({"format": {"type": "tag"}}, "`begin` must be a string"),
        ({"format": {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": 5}}, "`end`"),
        ({"format": {"type": "tag", "begin": "", "content": 5, "end": ""}}, "must be an object"),
        ({"format": {"type": "triggered_tags", "triggers": ["<"], "tags": []}}, "must not be empty"),
        ({"format": hermes(triggers=["<x"])}, "no trigger begins"),
        ({"format": hermes(triggers=[5])}, "list of strings"),
        ({"structures": 5, "triggers": []}, "list of objects"),
        ({"format": {"type": "tags_with_separator", "tags": []}}, "`tags`"),
        ({"format": {"type": "tags_with_separator", "tags": [call("a", True)], "separator": 5}}, "`separator`"),
        ({"format": {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "any_text"}]}}, "`any_text`"),
        ({"format": {"type": "json_schema", "json_schema": False}}, "no value"),
        ({"format": {"type": "json_schema", "json_schema": 5}}, "must be a schema"),
        ({"format": {"type": "json_schema", "style": "yaml"}}, "style 'yaml'"),
        ({"format": {"type": "json_schema", "style": "qwen_xml", "json_schema": False}}, "no value"),
    ],
)
def test_structural_tag_error_names_an_unsupported_format(accepts: Accepts, tag: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(words)) as caught:
        accepts(tag, "")
    assert caught.value.param == "structural_tag"


def test_structural_tags_limit_nesting(accepts: Accepts) -> None:
    inner: dict[str, Any] = {"type": "const_string", "value": "a"}
    for _ in range(100):
        inner = {"type": "star", "content": inner}
    with pytest.raises(InvalidArgument, match="nested too deeply"):
        accepts({"format": inner}, "")
