"""Turns: conversion of messages and thinking modes into what a chat template expects. Pure.

Templates differ in their input: content as text or as parts, arguments as text or as an object, one system turn or
several. A template's form is determined once, from renderings of conversations that differ in one aspect (`TemplateForm`,
created by `text.chat_template.template`); if the template accepts the client's form, messages are passed unchanged.

Whether a model reasons before it responds is decided, in descending precedence, by the request's `thinking`, its template
arguments, its `reasoning_effort`, and the worker's `--dyn-default-thinking-mode`. All of them become the three arguments
that templates use (`template_arguments`).
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo.model_card.card import ADAPTIVE, DISABLED, ENABLED
from dynamo.protocols.openai import ChatCompletionRequest, ChatMessage, ContentPart

TEXT_SEPARATOR = "\n"  # Joins the text parts of one message, as upstream does.
SYSTEM_SEPARATOR = "\n\n"  # Joins several system turns into one.

MEDIA = {"image_url": "image", "video_url": "video", "audio_url": "audio", "input_audio": "audio"}
"""Kind of a part in a request to its kind in a template."""

INSTRUCTIONS = ("system", "developer")
"""Roles whose turns are instructions."""

SHORT_ID_CHARS = 9
SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
"""Format of call ids that Mistral's templates accept."""

Turn = dict[str, Any]
"""A message in the form passed to a template."""

NO_EFFORT = "none"  # The `reasoning_effort` that disables reasoning.

_SWITCHES = ("thinking", "enable_thinking")


@dataclass(frozen=True, slots=True)
class TemplateForm:
    """Features of a template's input form."""

    has_developers: bool = False
    """The role `developer` is supported; otherwise it is mapped to `system`."""
    has_parts: bool = False
    """Content is a list of parts; otherwise it is text."""
    media: frozenset[str] = frozenset()
    """Kinds of parts, besides text, that appear in the prompt."""
    has_several_systems: bool = True
    """Every leading system turn is shown; otherwise they are joined into one."""
    has_late_systems: bool = True
    """A system turn is shown anywhere; otherwise it is joined to the first."""
    has_text_arguments: bool = True
    """The arguments of a call may be JSON text; otherwise they must be an object."""
    has_null_content: bool = False
    """A turn of calls may have no content; otherwise its content is empty text."""
    has_empty_content: bool = True
    """A turn of calls may have empty text for content; otherwise it has none."""
    has_thoughts_with_content: bool = True
    """A turn of calls may have content and `thinking`."""
    has_long_ids: bool = True
    """The id of a call is unrestricted; otherwise it is nine letters and digits."""


def conversation(messages: Sequence[ChatMessage], form: TemplateForm) -> list[Turn]:
    """Convert messages into the template's form."""
    turns: list[Turn] = []
    is_leading = True
    for message in messages:
        turn = _turn(message, form)
        if turn["role"] not in INSTRUCTIONS:
            is_leading = False
        elif turns and not (form.has_several_systems if is_leading else form.has_late_systems):
            _join_instructions(turns, turn)
            continue
        turns.append(turn)
    return turns


def _join_instructions(turns: list[Turn], turn: Turn) -> None:
    """Append to the instructions at the beginning, or add them."""
    if turns[0]["role"] in INSTRUCTIONS:
        turns[0]["content"] = _join(turns[0]["content"], turn["content"])
    else:
        turns.insert(0, turn)


def _turn(message: ChatMessage, form: TemplateForm) -> Turn:
    role = "system" if message.role == "developer" and not form.has_developers else message.role
    turn: Turn = {"role": role, "content": _content(message, form)}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = _id(message.tool_call_id, form)
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": _id(call.id, form),
                "type": call.type,
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments, form)},
            }
            for call in message.tool_calls
        ]
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if reasoning is not None:
        turn["reasoning_content"] = reasoning
        if form.has_thoughts_with_content or not (message.tool_calls and turn["content"]):
            turn["thinking"] = reasoning  # Key that gpt-oss's template reads.
    return turn


def _content(message: ChatMessage, form: TemplateForm) -> str | list[Turn] | None:
    content = message.content
    if (
        not content
        and message.tool_calls
        and (form.has_null_content if content is None else not form.has_empty_content)
    ):
        return None
    if content is None:
        content = ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if form.has_parts else content
    if form.has_parts or (form.media and any(MEDIA.get(part.type) in form.media for part in content)):
        return [shown for part in content if (shown := _part(part, form)) is not None]
    return TEXT_SEPARATOR.join(_text(part) for part in content if part.type not in MEDIA)


def _part(part: ContentPart, form: TemplateForm) -> Turn | None:
    """Convert a part into the template's form; None if the template does not support it."""
    kind = MEDIA.get(part.type)
    if kind is None:
        return {"type": "text", "text": _text(part)}
    return {"type": kind} if kind in form.media else None


def _text(part: ContentPart) -> str:
    return part.text if part.text is not None else part.refusal or ""


def _join(first: str | list[Turn], second: str | list[Turn]) -> str | list[Turn]:
    if isinstance(first, str) and isinstance(second, str):
        return first + SYSTEM_SEPARATOR + second
    return [*first, *second]


def _arguments(arguments: str | dict[str, Any], form: TemplateForm) -> Any:
    """Convert a call's arguments into the template's form; text that is not a JSON object is unchanged."""
    if isinstance(arguments, str) and not form.has_text_arguments:
        try:
            return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
            return arguments
    return arguments


def _id(call_id: str | None, form: TemplateForm) -> str | None:
    """Convert the id of a call into the template's form; equal for the call and its result."""
    if call_id is None or form.has_long_ids or SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:SHORT_ID_CHARS]


def template_arguments(request: ChatCompletionRequest, default_mode: str | None = None) -> dict[str, Any] | None:
    """Return the request's arguments for the chat template, None if there are none."""
    given = request.chat_template_args if request.chat_template_args is not None else request.chat_template_kwargs
    mode = thinking_mode(request)
    if mode is None and not _is_controlled(given):
        mode = default_mode
    if mode is None and request.reasoning_effort is None:
        return given
    arguments: dict[str, Any] = {}
    if request.reasoning_effort is not None:
        arguments["reasoning_effort"] = request.reasoning_effort
    if request.thinking is not None:
        return arguments | (given or {}) | _arguments_of(mode)
    return arguments | _arguments_of(mode) | (given or {})


def thinking_mode(request: ChatCompletionRequest) -> str | None:
    """Return the mode that the request selects, None if it selects none."""
    thinking = request.thinking
    if thinking is not None:
        return _switched(thinking) if isinstance(thinking, bool) else str(thinking.get("type"))
    given = request.chat_template_args if request.chat_template_args is not None else request.chat_template_kwargs
    for name in _SWITCHES:
        value = (given or {}).get(name)
        if isinstance(value, bool):
            return _switched(value)
    mode = (given or {}).get("thinking_mode")
    if mode in (ENABLED, DISABLED, ADAPTIVE):
        return str(mode)
    effort = (given or {}).get("reasoning_effort") or request.reasoning_effort
    return None if effort is None else _switched(effort != NO_EFFORT)


def _switched(is_on: bool) -> str:
    return ENABLED if is_on else DISABLED


def _arguments_of(mode: str | None) -> dict[str, Any]:
    if mode is None:
        return {}
    if mode == ADAPTIVE:
        return {"thinking_mode": ADAPTIVE}
    return {**dict.fromkeys(_SWITCHES, mode == ENABLED), "thinking_mode": mode}


def _is_controlled(given: Mapping[str, Any] | None) -> bool:
    return given is not None and any(name in given for name in (*_SWITCHES, "thinking_mode", "reasoning_effort"))
