"""Each family's calls, as the released frontend describes them to engines."""

from typing import Any

import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.model_card.tool_call_tags import FAMILIES, AllowedCalls, TaggedTool, TagPolicy, structural_tag
from dynamo.protocols.model_card import RuntimeConfig

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER, NOW = TaggedTool("get_weather", CITY), TaggedTool("now", True)
NEEDED = AllowedCalls(tools=[WEATHER, NOW], is_needed=True, is_single=False)
FREE = AllowedCalls(tools=[WEATHER], is_needed=False, is_single=True)
NAMED = AllowedCalls(tools=[WEATHER], is_needed=True, is_single=False, is_named=True)


def written(schema: Any, style: str = "json") -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "style": style}


def tag(begin: str, content: Any, end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def form(parser: str, calls: AllowedCalls) -> Any:
    whole = structural_tag(parser, calls)
    assert whole is not None
    assert whole["type"] == "structural_tag"
    return whole["format"]


def test_tool_call_tags_are_none_for_an_unknown_family() -> None:
    assert structural_tag("pythonic", NEEDED) is None
    assert structural_tag(None, NEEDED) is None


@pytest.mark.parametrize("parser", FAMILIES)
def test_tool_call_tags_of_every_family_list_each_tool(parser: str) -> None:
    assert "get_weather" in str(form(parser, NEEDED))
    assert "now" in str(form(parser, NEEDED))


@pytest.mark.parametrize("parser", ["hermes", "qwen25", "qwen3_coder", "nemotron_nano", "inkling"])
def test_tool_call_tags_start_at_a_trigger_after_free_text(parser: str) -> None:
    needed, free = form(parser, NEEDED), form(parser, FREE)
    assert needed["type"] == free["type"] == "triggered_tags"
    assert all(one["begin"].startswith(needed["triggers"][0]) for one in needed["tags"])
    assert (needed["at_least_one"], needed["stop_after_first"]) == (True, False)
    assert (free["at_least_one"], free["stop_after_first"]) == (False, True)


def test_tool_call_tags_of_qwen3_coder_write_parameters_between_tags() -> None:
    end = "\n</function>\n</tool_call>"
    assert form("qwen3_coder", NEEDED)["tags"] == [
        tag("<tool_call>\n<function=get_weather>\n", written(CITY, "qwen_xml"), end),
        tag("<tool_call>\n<function=now>\n", written(True, "qwen_xml"), end),
    ]
    assert form("qwen3_coder", NEEDED)["triggers"] == ["<tool_call>\n<function="]


def test_tool_call_tags_of_inkling_use_another_arguments_key() -> None:
    begin = '<|content_invoke_tool_json|>{"name": "get_weather", "args": '
    assert form("inkling", FREE)["tags"] == [tag(begin, written(CITY), "}<|end_message|>")]


def test_tool_call_tags_of_glm47_exclude_markers_from_text_and_allow_a_single_named_call() -> None:
    one = tag("<tool_call>get_weather", written(CITY, "glm_xml"), "</tool_call>")
    needed = form("glm47", NEEDED)
    assert needed["tags"][0] == one
    assert "</think>" in needed["excludes"]
    assert form("glm47", NAMED) == one


@pytest.mark.parametrize(("parser", "block"), [("deepseek_v3_2", "function_calls"), ("deepseek_v4", "tool_calls")])
def test_tool_call_tags_of_deepseek_write_calls_in_one_block(parser: str, block: str) -> None:
    needed = form(parser, NEEDED)
    assert needed["triggers"] == [f"<｜DSML｜{block}>"]
    (whole,) = needed["tags"]
    assert (whole["begin"], whole["end"]) == (f"<｜DSML｜{block}>\n", f"</｜DSML｜{block}>")
    inner = whole["content"]
    assert inner["type"] == "tags_with_separator"
    assert inner["tags"][0] == tag(
        '<｜DSML｜invoke name="get_weather">\n', written(CITY, "deepseek_xml"), "</｜DSML｜invoke>\n"
    )
    assert form(parser, FREE)["tags"][0]["content"]["at_least_one"] is True


def test_tool_call_tags_of_kimi_k2_number_calls_within_a_section() -> None:
    one = tag(
        "<|tool_call_begin|>functions.get_weather:",
        {
            "type": "sequence",
            "elements": [
                {"type": "regex", "pattern": r"\d+"},
                {"type": "const_string", "value": "<|tool_call_argument_begin|>"},
                written(CITY),
            ],
        },
        "<|tool_call_end|>",
    )
    needed, named, free = form("kimi_k2", NEEDED), form("kimi_k2", NAMED), form("kimi_k2", FREE)
    assert [each["type"] for each in needed["elements"]] == ["const_string", "tags_with_separator", "const_string"]
    assert needed["elements"][1]["tags"][0] == one
    assert named["elements"][1] == one
    assert free["triggers"] == ["<|tool_calls_section_begin|>"]
    assert free["tags"][0]["content"]["tags"] == [one]
    assert free["tags"][0]["content"]["stop_after_first"] is True


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("true", TagPolicy("always")),
        ("ON", TagPolicy("always")),
        ("false", None),
        ("{}", TagPolicy("always")),
        ('{"scope": "auto"}', TagPolicy("auto")),
        ('{"schema": "strict", "tool_arguments_any_order": false}', TagPolicy("always", "strict")),
        ('{"reasoning_boundary": "backend"}', TagPolicy("always")),
    ],
)
def test_tool_call_tags_flag_is_a_keyword_or_an_object(text: str, policy: TagPolicy | None) -> None:
    assert TagPolicy.read(text) == policy


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense", "expected true, false or JSON"),
        ("[]", "expected an object"),
        ("null", "expected an object"),
        ('{"mode": "on"}', "unknown field `mode`; expected one of scope"),
        ('{"scope": "x"}', 'structural_tag.scope \'x\': expected one of "auto", "always"'),
        ('{"tool_arguments_any_order": true}', "tool_arguments_any_order True"),
        ('{"tool_arguments_any_order": 0}', "tool_arguments_any_order 0"),
        ('{"exclude_special_tokens": true}', "exclude_special_tokens"),
        ('{"reasoning_boundary": "structural_tag"}', "reasoning_boundary"),
    ],
)
def test_tool_call_tags_error_names_an_unsupported_flag_value(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        TagPolicy.read(text)
    assert words in str(caught.value)


def test_tool_call_tags_are_written_to_the_card_in_either_form() -> None:
    card = RuntimeConfig()
    assert TagPolicy.on(card) is None
    TagPolicy("always", "strict").put_on(card)
    assert TagPolicy.on(card) == TagPolicy("always", "strict")
    assert TagPolicy.on(RuntimeConfig(structural_tag_mode="on", structural_tag_scope="always")) == TagPolicy("always")
    assert TagPolicy.on(RuntimeConfig(structural_tag={"schema": "strict"})) == TagPolicy("auto", "strict")
    assert TagPolicy.on(RuntimeConfig(structural_tag=None, structural_tag_mode="on")) is None
