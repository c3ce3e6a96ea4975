"""ToolCallTags: structural tags that constrain a model's tool calls to its own format. Pure.

    {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [...]}}

The text up to the trigger is free; after it, the text must be a call of one of the tools, with arguments that match its
schema. For other model families a required call is constrained to JSON (`dynamo.text.guided`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from msgspec import Struct

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.model_card import RuntimeConfig

OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "scope": ("auto", "always"),
    "schema": ("auto", "strict"),
    "allow_tool_calls_with_structured_output": (False,),
    "exclude_special_tokens": (None,),
    "reasoning_boundary": ("auto", "backend"),
    "tool_arguments_any_order": (False,),
}
"""Options of structural tags and their supported values. The engine leaves reasoning unconstrained."""


class TagPolicy(Struct, frozen=True):
    """When tool calls are constrained to the model's own format, and how strictly."""

    scope: str = "auto"
    """`auto`: if a call is required, a tool is strict, or parallel calls are disabled. `always`: if there are tools."""
    schema: str = "auto"
    """`auto`: the arguments of a tool that is not strict are unconstrained. `strict`: all arguments are constrained."""

    @classmethod
    def of(cls, given: Any) -> Self:
        """Return the policy of a card's options. Raise `InvalidArgument` that names the invalid option."""
        if not isinstance(given, Mapping):
            raise InvalidArgument(f"structural_tag: expected an object, got {given!r}")
        for name, value in given.items():
            if name not in OPTIONS:
                raise InvalidArgument(f"structural_tag: unknown field `{name}`; expected one of {', '.join(OPTIONS)}")
            if value not in OPTIONS[name] or isinstance(value, bool) != isinstance(OPTIONS[name][0], bool):
                allowed = ", ".join(map(json.dumps, OPTIONS[name]))
                raise InvalidArgument(f"structural_tag.{name} {value!r}: expected one of {allowed}")
        return cls(given.get("scope", "auto"), given.get("schema", "auto"))

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Parse `--dyn-structural-tag`: true, false, or an object, whose scope defaults to `always`."""
        word = text.strip().lower()
        if word in ("false", "off", "no", "0"):
            return None
        if word in ("true", "on", "yes", "1"):
            return cls("always")
        try:
            given = json.loads(text)
        except ValueError as error:
            raise InvalidArgument(f"structural_tag: expected true, false or JSON ({error})") from None
        return cls.of({"scope": "always", **given} if isinstance(given, dict) else given)

    @classmethod
    def on(cls, config: RuntimeConfig) -> Self | None:
        """Return the policy of a card, in its present form or the one before."""
        given = config.structural_tag
        if isinstance(given, dict):
            return cls(str(given.get("scope", "auto")), str(given.get("schema", "auto")))
        if given is None or config.structural_tag_mode != "on":
            return None
        return cls(config.structural_tag_scope, config.structural_tag_schema)

    def put_on(self, config: RuntimeConfig) -> None:
        """Write the policy to a card, in both forms, as upstream does."""
        config.structural_tag = {
            "scope": self.scope,
            "schema": self.schema,
            "allow_tool_calls_with_structured_output": False,
            "reasoning_boundary": "auto",
            "tool_arguments_any_order": False,
        }
        config.structural_tag_mode = "on"
        config.structural_tag_scope, config.structural_tag_schema = self.scope, self.schema


class TaggedTool(Struct, frozen=True):
    """Name of a tool and the schema of its arguments; True accepts any arguments."""

    name: str
    schema: Any


class AllowedCalls(Struct, frozen=True, kw_only=True):
    """Allowed tool calls of a response."""

    tools: Sequence[TaggedTool]
    is_needed: bool
    """At least one call."""
    is_single: bool
    """At most one call."""
    is_named: bool = False
    """The caller selected the tool, which is the only one in `tools`."""


Format = dict[str, Any]

JSON_CALL = "<tool_call>\n", "}\n</tool_call>"
XML_CALL = "<tool_call>\n<function="
GLM_EXCLUDES = ["<think>", "</think>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
INKLING = "<|content_invoke_tool_json|>"


def structural_tag(parser: str | None, calls: AllowedCalls) -> dict[str, Any] | None:
    """Return the tag for the calls of a parser's family; None for a family whose format cannot be expressed as a tag."""
    make = FAMILIES.get(parser or "")
    return None if make is None else {"type": "structural_tag", "format": make(calls)}


def _tag(begin: str, tool: TaggedTool, end: str, style: str = "json") -> Format:
    return {"type": "tag", "begin": begin, "content": _arguments(tool, style), "end": end}


def _arguments(tool: TaggedTool, style: str = "json") -> Format:
    return {"type": "json_schema", "json_schema": tool.schema, "style": style}


def _triggered(trigger: str, tags: Sequence[Format], calls: AllowedCalls, **more: Any) -> Format:
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": list(tags),
        **more,
        "at_least_one": calls.is_needed,
        "stop_after_first": calls.is_single,
    }


def _in_a_row(tags: Sequence[Format], calls: AllowedCalls) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": "",
        "at_least_one": True,
        "stop_after_first": calls.is_single,
    }


def _hermes(calls: AllowedCalls) -> Format:
    begin, end = JSON_CALL
    tags = [_tag(f'{begin}{{"name": {json.dumps(tool.name)}, "arguments": ', tool, end) for tool in calls.tools]
    return _triggered("<tool_call>", tags, calls)


def _qwen3_coder(calls: AllowedCalls) -> Format:
    tags = [_tag(f"{XML_CALL}{tool.name}>\n", tool, "\n</function>\n</tool_call>", "qwen_xml") for tool in calls.tools]
    return _triggered(XML_CALL, tags, calls)


def _glm47(calls: AllowedCalls) -> Format:
    tags = [_tag(f"<tool_call>{tool.name}", tool, "</tool_call>", "glm_xml") for tool in calls.tools]
    if calls.is_named:
        return tags[0]
    return _triggered("<tool_call>", tags, calls, excludes=GLM_EXCLUDES)


def _deepseek(block: str) -> Callable[[AllowedCalls], Format]:
    def make(calls: AllowedCalls) -> Format:
        tags = [
            _tag(f'<｜DSML｜invoke name="{tool.name}">\n', tool, "</｜DSML｜invoke>\n", "deepseek_xml")
            for tool in calls.tools
        ]
        opening = f"<｜DSML｜{block}>"
        whole = {
            "type": "tag",
            "begin": f"{opening}\n",
            "content": _in_a_row(tags, calls),
            "end": f"</｜DSML｜{block}>",
        }
        return _triggered(opening, [whole], calls)

    return make


def _kimi_k2(calls: AllowedCalls) -> Format:
    opening, closing = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    tags: list[Format] = [
        {
            "type": "tag",
            "begin": f"<|tool_call_begin|>functions.{tool.name}:",
            "content": {
                "type": "sequence",
                "elements": [
                    {"type": "regex", "pattern": r"\d+"},
                    {"type": "const_string", "value": "<|tool_call_argument_begin|>"},
                    _arguments(tool),
                ],
            },
            "end": "<|tool_call_end|>",
        }
        for tool in calls.tools
    ]
    inner = tags[0] if calls.is_named else _in_a_row(tags, calls)
    if not calls.is_needed:
        return _triggered(opening, [{"type": "tag", "begin": opening, "content": inner, "end": closing}], calls)
    return {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": opening},
            inner,
            {"type": "const_string", "value": closing},
        ],
    }


def _inkling(calls: AllowedCalls) -> Format:
    tags = [
        _tag(f'{INKLING}{{"name": {json.dumps(tool.name)}, "args": ', tool, "}<|end_message|>") for tool in calls.tools
    ]
    return _triggered(INKLING, tags, calls)


FAMILIES: Mapping[str, Callable[[AllowedCalls], Format]] = {
    "hermes": _hermes,
    "qwen25": _hermes,
    "qwen3_coder": _qwen3_coder,
    "nemotron_nano": _qwen3_coder,
    "glm47": _glm47,
    "deepseek_v3_2": _deepseek("function_calls"),
    "deepseek_v4": _deepseek("tool_calls"),
    "deepseek-v4": _deepseek("tool_calls"),
    "deepseekv4": _deepseek("tool_calls"),
    "kimi_k2": _kimi_k2,
    "inkling": _inkling,
}
"""Tag builders by the name of the tool-call parser."""
