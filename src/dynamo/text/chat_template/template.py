"""ChatTemplate: renders a conversation into a prompt, exactly as Hugging Face does.

An ordinary rendering takes 0.1 ms in this process, within bounds (`text.chat_template.sandbox`). One that exceeds them
is repeated in a child process, which is killed at its limits (`text.chat_template.child`). A template that rejects a
conversation, or fails on it, is a client error: `InvalidArgument` with the template's own message.
"""

import functools
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from jinja2 import TemplateError

from dynamo.core.child_pool import ChildError, ChildOutOfMemory, ChildPool, ChildPoolBusy, ChildTimeout
from dynamo.core.errors import ConfigError, InvalidArgument, Overloaded, Unknown
from dynamo.model_card.card import ModelFiles, read_bytes, read_json
from dynamo.protocols.openai import ChatMessage
from dynamo.text.chat_template.bounds import FULL, LONG, QUICK, Bounds, Budget, OverBudget, Unlisted
from dynamo.text.chat_template.child import MESSAGE_CHARS_MAX
from dynamo.text.chat_template.sandbox import environment, may_be_local, rendered
from dynamo.text.chat_template.turns import INSTRUCTIONS, MEDIA, TemplateForm, Turn, conversation

SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
    "additional_special_tokens",
)

RENDER_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
"""Exceptions that a template's code may raise for the request's values."""

LOAD_ERRORS = (TemplateError, SyntaxError, ValueError, OverflowError, RecursionError, MemoryError)
"""Exceptions that compiling a template may raise."""

SOURCE_CHARS_MAX = 1 << 20  # The largest known template has about 30,000.
CHILD_MEMORY_BYTES = 1 << 30
CHILDREN_MAX, CHILDREN_PER_TEMPLATE_MAX = 4, 2
OVER_BUDGET_PAUSE_S = 2.0  # After a rendering beyond a budget, the next ones begin with the larger one for this time:
UNLISTED_PAUSE_S = 60.0  # a slow template costs the event loop 1 % at most. Its set of operations rarely changes.
PROBE_FAILURES_MAX = 2  # After this many slow failures of short conversations, no more are tried.
PROBE_SLOW_S = 2.0

PROBE = "probe7f3a"
"""A text that no template contains."""

FINAL_MARK = "MARK7F3A "
"""Appended to a message that is to be continued. The space shows whether the template strips its content."""


class ChatTemplate:
    """A model's chat templates: one for conversations, and optionally one for conversations with tools."""

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, Any] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._now = now
        self._sources = {name: source for name, source in templates.items() if name in ("default", "tool_use")}
        self._sources.setdefault("default", next(iter(templates.values())))
        self._key = hashlib.sha256("".join(self._sources.values()).encode("utf-8", "replace")).hexdigest()
        jinja = environment(now)
        self._compiled: dict[str, Any] = {}
        for name, source in self._sources.items():
            self._load(name, source, jinja)
        # Values common to all renderings, in one dictionary: merging Jinja's globals each time takes a third longer.
        self._special_tokens = dict(special_tokens or {})
        self._constants = {**jinja.globals, **self._special_tokens}
        self._quick_from_s = self._long_from_s = 0.0
        """Earliest time at which a rendering may again begin with the budget, after one that exceeded it."""
        self._probe_failures = 0
        self._form = self._find_form(templates)

    def _load(self, name: str, source: str, jinja: Any) -> None:
        """Compile a template here or, if it is large, in a child process. Raise `ConfigError`."""
        if len(source) > SOURCE_CHARS_MAX:
            raise ConfigError(f"chat template: {len(source)} characters; at most {SOURCE_CHARS_MAX} are allowed")
        if not may_be_local(source):
            try:
                self._in_child(source, None)
            except InvalidArgument as error:
                raise ConfigError(str(error)) from None
            return
        try:
            template = self._compiled[name] = jinja.from_string(source)
        except LOAD_ERRORS as error:
            raise ConfigError(f"chat template: {str(error) or type(error).__name__}") from None
        template.globals = dict(template.globals)  # A ChainMap, which Jinja iterates over in every rendering.

    @classmethod
    def from_files(cls, files: ModelFiles) -> "ChatTemplate | None":
        """Return the template of a model, None if it has none. Raise `ConfigError` if it cannot be read."""
        config = read_json(files.tokenizer_config) if files.tokenizer_config else {}
        templates = _named_templates(config.get("chat_template"), files.tokenizer_config)
        if files.chat_template:
            try:
                templates = {**templates, "default": read_bytes(files.chat_template).decode()}
            except UnicodeDecodeError as error:
                raise ConfigError(f"{files.chat_template}: {error}") from None
        return cls(templates, special_tokens_of(config)) if templates else None

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] | None = None,
        budget: Budget = FULL,
    ) -> str:
        """Return the prompt. Raise `InvalidArgument` if the template rejects the conversation.

        With `QUICK` or `LONG`, raise `OverBudget` if the budget is exceeded. With `FULL`, wait for a child process
        instead.
        """
        turns = conversation(messages, self._form)
        if not continue_final_message:
            return self.render_turns(turns, tools, add_generation_prompt, arguments, budget)
        final = _append(turns[-1], FINAL_MARK)
        return _cut_at_mark(self.render_turns(turns, tools, False, arguments, budget), final)

    def render_turns(
        self,
        turns: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
        budget: Budget = FULL,
    ) -> str:
        """Return the prompt of turns that already have the template's form; otherwise as `render`."""
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        values = {
            "documents": None,
            **(arguments or {}),
            "messages": turns,
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._compiled.get(name)
        now_s = time.monotonic()
        is_tried = template is not None and now_s >= self._long_from_s
        if budget is not FULL and (not is_tried or (budget is QUICK and now_s < self._quick_from_s)):
            raise OverBudget("earlier renderings exceeded the budget")
        if template is not None and is_tried:
            bounds = Bounds(QUICK if budget is QUICK else LONG)
            try:
                return rendered(template, {**self._constants, **values}, bounds)
            except OverBudget as error:
                again_s = time.monotonic() + (UNLISTED_PAUSE_S if isinstance(error, Unlisted) else OVER_BUDGET_PAUSE_S)
                self._quick_from_s = again_s
                if budget is not QUICK:
                    self._long_from_s = again_s
                if budget is not FULL:
                    raise
            except RENDER_ERRORS as error:
                raise _refused(str(error) or type(error).__name__) from None
        return self._in_child(self._sources[name], {**self._special_tokens, **values})

    def _in_child(self, source: str, context: dict[str, Any] | None) -> str:
        """Render, or only compile, in a child process; block until done. Raise `InvalidArgument` or `Overloaded`."""
        job = {"source": source, "context": context, "now": self._now().isoformat()}
        try:
            prompt: str = _pool().call(job, key=self._key)
        except InvalidArgument as error:
            raise _refused(str(error)) from None
        except ChildTimeout:
            raise _refused(f"it takes longer than {FULL.seconds:g} s") from None
        except ChildOutOfMemory:
            raise _refused(f"it needs more than {CHILD_MEMORY_BYTES >> 20} MB of memory") from None
        except ChildPoolBusy as error:
            raise Overloaded(f"chat template: {error}") from None
        except ChildError as error:
            raise Unknown(f"chat template: {error}") from None
        except (OverflowError, TypeError, ValueError, RecursionError) as error:
            raise _refused(f"its values cannot be sent to a child process: {error}") from None
        return prompt

    def _find_form(self, templates: Mapping[str, str]) -> TemplateForm:
        """Determine the template's form from renderings of conversations that differ in one aspect."""
        has_parts = self._shows([_user([_text(PROBE)])]) and not self._shows([_user(PROBE)])
        has_developers = any("developer" in source for source in templates.values())
        text_arguments = f'{{"{PROBE}":  1}}'
        has_text_arguments = any(
            self._shows(_calling(content, text_arguments), text_arguments) for content in ("", None)
        )
        arguments = text_arguments if has_text_arguments else {PROBE: 1}
        with_text, with_null = self._try(_calling("", arguments)), self._try(_calling(None, arguments))
        has_empty_content = with_text is not None and (
            CALLED in with_text or with_null is None or CALLED not in with_null
        )
        with_both = _calling("!", arguments, reasoning_content=".")
        return TemplateForm(
            has_developers=has_developers,
            has_parts=has_parts,
            media=self._media(has_parts),
            has_several_systems=self._shows_instructions("sSu", has_parts)
            and (not has_developers or self._shows_instructions("sDu", has_parts)),
            has_late_systems=self._shows_instructions("suaSu", has_parts)
            and self._shows_instructions("uaSu", has_parts),
            has_text_arguments=has_text_arguments,
            has_null_content=with_null is not None
            and CALLED in with_null
            and (with_text is None or with_text.count("None") == with_null.count("None")),
            has_empty_content=has_empty_content,
            has_thoughts_with_content=self._try([{**turn, "thinking": "."} for turn in with_both]) is not None
            or self._try(with_both) is None,
            has_long_ids=(with_text or with_null) is None
            or self._try(_calling("" if has_empty_content else None, arguments, "call-probe-0123456789")) is not None,
        )

    def _shows_instructions(self, order: str, has_parts: bool) -> bool:
        """Return whether the prompt shows the instructions; `order`: s and S for system, D for developer.

        Also true if the template accepts no instructions at all.
        """
        turns = [_TURNS[letter] for letter in order]
        instructions = [turn["content"] for turn in turns if turn["role"] in INSTRUCTIONS]
        if has_parts:
            turns = [{**turn, "content": [_text(turn["content"])]} for turn in turns]
        shown = self._try(turns)
        if shown is not None and all(text in shown for text in instructions):
            return True
        return len(instructions) > 1 and not self._shows_instructions("su", has_parts)

    def _media(self, has_parts: bool) -> frozenset[str]:
        """Return the kinds of parts that appear in the prompt."""
        bare = self._try([_user([_text(PROBE)])])
        if bare is None or (not has_parts and bare != self._try([_user(PROBE)])):
            return frozenset()
        shown = {kind: self._try([_user([_text(PROBE), {"type": kind}])]) for kind in MEDIA.values()}
        return frozenset(
            kind for kind, found in shown.items() if found is not None and PROBE in found and found != bare
        )

    def _shows(self, turns: Sequence[Turn], text: str = PROBE) -> bool:
        """Return whether a text in these turns appears unchanged in the prompt."""
        found = self._try(turns)
        return found is not None and text in found

    def _try(self, turns: Sequence[Turn]) -> str | None:
        """Return the prompt; None if the template rejects the turns."""
        if self._probe_failures >= PROBE_FAILURES_MAX:
            return None
        began_s = time.monotonic()
        try:
            return self.render_turns(turns, [TOOL] if "tool_calls" in turns[-1] else None)
        except (InvalidArgument, Overloaded, Unknown):
            self._probe_failures += time.monotonic() - began_s > PROBE_SLOW_S
            return None


@functools.cache
def _pool() -> ChildPool:
    """Return the pool of processes that render templates, shared by all models."""
    return ChildPool(
        "dynamo.text.chat_template.child",
        deadline_s=FULL.seconds + 1,
        memory_bytes=CHILD_MEMORY_BYTES,
        children_max=CHILDREN_MAX,
        per_key_max=CHILDREN_PER_TEMPLATE_MAX,
    )


def _refused(reason: str) -> InvalidArgument:
    return InvalidArgument(f"chat template: {reason[:MESSAGE_CHARS_MAX]}", param="messages")


def special_tokens_of(tokenizer_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special tokens that a template may reference, as text."""
    tokens: dict[str, Any] = {}
    for name in SPECIAL_TOKENS:
        value = tokenizer_config.get(name)
        if isinstance(value, list):
            tokens[name] = [_token_text(token) for token in value]
        elif value is not None:
            tokens[name] = _token_text(value)
    return tokens


CALLED = "callme7f3a"
"""Name of a tool that no template mentions."""

TOOL: Turn = {
    "type": "function",
    "function": {
        "name": CALLED,
        "description": ".",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "."}}},
    },
}


def _user(content: Any) -> Turn:
    return {"role": "user", "content": content}


def _text(text: str) -> Turn:
    return {"type": "text", "text": text}


def _calling(content: str | None, arguments: Any, call_id: str = "callprobe", **others: Any) -> list[Turn]:
    call: Turn = {"id": call_id, "type": "function", "function": {"name": CALLED, "arguments": arguments}}
    return [_user("."), {"role": "assistant", "content": content, "tool_calls": [call], **others}]


_TURNS: dict[str, Turn] = {
    "s": {"role": "system", "content": PROBE + "s"},
    "S": {"role": "system", "content": PROBE + "S"},
    "D": {"role": "developer", "content": PROBE + "D"},
    "u": {"role": "user", "content": "."},
    "a": {"role": "assistant", "content": "."},
}


def _append(turn: Turn, text: str) -> str:
    """Append to the last text of a turn and return its previous value."""
    content = "" if turn["content"] is None else turn["content"]
    if isinstance(content, str):
        turn["content"] = content + text
        return content
    if not content or "text" not in content[-1]:
        content.append(_text(""))
    last: str = content[-1]["text"]
    content[-1]["text"] = last + text
    return last


def _cut_at_mark(prompt: str, final: str) -> str:
    """Cut the prompt at the end of the final message, so that the model continues it."""
    before, mark, after = prompt.rpartition(FINAL_MARK.rstrip())
    if not mark or final.strip() not in before:
        raise InvalidArgument(
            "continue_final_message: the chat template does not show the final message unchanged",
            param="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


def _named_templates(value: Any, path: str | None) -> dict[str, str]:
    """Return the templates of `chat_template` in a tokenizer_config.json: a string, or a list of named ones."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        return msgspec.convert({entry["name"]: entry["template"] for entry in value}, dict[str, str])
    except (TypeError, KeyError, msgspec.ValidationError):
        raise ConfigError(f"{path}: chat_template must be a string or a list of named templates") from None


def _token_text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)
