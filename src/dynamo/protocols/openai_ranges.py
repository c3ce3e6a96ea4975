"""Value checks of OpenAI requests: ranges, combinations, sizes, and options that are not supported.

    check_common(request), check_chat(request), check_completion(request)   raise `InvalidArgument`

The error texts are upstream's. `RequestBounds` has the maximum number of entries and characters of the lists and texts of a
request, which bound the work that one request causes before it reaches a worker. Each error names the field, the value seen
and the limit; limits that deployments may need to change can be set by an environment variable.
"""

import binascii
import functools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec import Struct

from dynamo.core.config import setting
from dynamo.core.errors import ConfigError, HttpError, InvalidArgument
from dynamo.core.slices import slices
from dynamo.protocols.strict import INVALID, MALFORMED, NAME_CHARS_MAX

if TYPE_CHECKING:
    from dynamo.protocols.openai import (
        ChatCompletionRequest,
        ChatMessage,
        CommonRequest,
        CompletionRequest,
        ContentPart,
        Role,
    )

TOP_LOGPROBS_MAX = 20  # OpenAI's limit, as the three below are upstream's.
MAX_TOKENS_MAX = 1 << 20
STOPS_MAX = 32
CACHE_KEY_CHARS_MAX = 512  # OpenAI allows 64; routers keep a session under each.
EMBEDS_BYTES_MIN, EMBEDS_BYTES_MAX = 100, 10 << 20  # Size of `prompt_embeds`, as in the released frontend.
DESCRIPTION_CHARS_MAX = 1 << 20
CHOICES_MAX = 128  # Prompts of a batch times `n`.

TEXT_PARTS = ("text", "refusal")
MEDIA_PARTS = ("image_url", "video_url", "audio_url")
MEDIA_ROLES = ("user", "tool", "system", "developer")  # Assistant messages cannot contain media.
AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg", "aac", "opus", "m4a", "pcm16")
PARTS = (*TEXT_PARTS, *MEDIA_PARTS, "input_audio")
MODALITIES = ("text",)
URL = re.compile(r"(?:data:[^,]*,|[a-z][a-z0-9+.-]*://)[^\s]", re.IGNORECASE)
"""The start of a URL. The component that fetches media decides which URLs are allowed."""

RANGES: Sequence[tuple[str, str, float, float]] = (
    ("temperature", "Temperature", 0, 2),
    ("top_p", "Top_p", 0, 1),
    ("frequency_penalty", "Frequency penalty", -2, 2),
    ("presence_penalty", "Presence penalty", -2, 2),
    ("min_p", "Min_p", 0, 1),
    ("n", "n", 1, 128),
)

GUIDED = ("guided_json", "guided_regex", "guided_grammar", "guided_choice")

DEPRECATED = (("function_call", "tool_choice"), ("functions", "tools"))

Refusal = tuple[str, Callable[[Any], bool], str]
"""A field, a predicate for the values that would change the response, and the error text."""

NOT_YET = "is not supported by this release"

MESSAGES_VARIABLE = "DYN_HTTP_MAX_MESSAGES"
TOKENS_VARIABLE = "DYN_HTTP_MAX_PROMPT_TOKENS"
TEXT_VARIABLE = "DYN_HTTP_TEXT_LIMIT_MB"
STOP_VARIABLE = "DYN_HTTP_MAX_STOP_CHARS"
BOUNDS_VARIABLES = (MESSAGES_VARIABLE, TOKENS_VARIABLE, TEXT_VARIABLE, STOP_VARIABLE)

TOOLS_MAX = 2048  # OpenAI allows 128.
TOKEN_IDS_MAX = 1 << 18  # In stop_token_ids, allowed_token_ids and logit_bias: the size of the largest vocabularies.
OBJECTS_MAX = (
    1 << 16
)  # Objects and lists in a whole body; a conversation has four per message. Decoding so many takes up to 40 ms.
ENTRIES_MAX = 1024  # In lists of names, such as annotations.


def _always(_: Any) -> bool:
    return True


def _is_more_than_text(value: Any) -> bool:
    return any(one not in MODALITIES for one in value)


REFUSALS_CHAT: Sequence[Refusal] = (
    ("audio", _always, f"audio output {NOT_YET}"),
    ("modalities", _is_more_than_text, f"modalities other than `text` {NOT_YET}"),
    ("web_search_options", _always, f"web_search_options {NOT_YET}: there is no search backend"),
)


def _invalid(message: str, param: str) -> NoReturn:
    raise InvalidArgument(f"{INVALID}{message}", param=param)


def check_common(request: "CommonRequest", *, may_be_empty: bool = False) -> None:
    """Check the fields that chats and completions share; `max_tokens` may be 0 where `may_be_empty`."""
    for name, label, low, high in RANGES:
        value = getattr(request, name)
        if value is not None and not low <= value <= high:
            _invalid(f"{label} must be between {low} and {high}, got {value:g}", name)
    if request.max_tokens is not None and not (request.max_tokens == 0 and may_be_empty):
        _check_max_tokens(request.max_tokens, "Max tokens", "max_tokens")
    if request.top_k is not None and request.top_k < -1:
        _invalid("Top_k must be null or greater than or equal to -1", "top_k")
    if request.repetition_penalty is not None and not 0 < request.repetition_penalty <= 2:
        _invalid(
            f"Repetition penalty must be between 0 and 2, got {request.repetition_penalty:g}", "repetition_penalty"
        )
    if request.prompt_cache_key is not None and len(request.prompt_cache_key) > CACHE_KEY_CHARS_MAX:
        _invalid(
            f"prompt_cache_key must have at most {CACHE_KEY_CHARS_MAX} characters, got {len(request.prompt_cache_key)}",
            "prompt_cache_key",
        )
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        check_count(getattr(request, name), TOKEN_IDS_MAX, name)
    if request.nvext is not None:
        check_count(
            request.nvext.token_data, request_bounds().prompt_tokens, "nvext.token_data", variable=TOKENS_VARIABLE
        )
        check_count(request.nvext.annotations, ENTRIES_MAX, "nvext.annotations")
    if request.logit_bias:
        _check_logit_bias(request.logit_bias)
    if request.stop is not None:
        _check_stop(request.stop)
    if request.stream_options is not None and not request.stream:
        _invalid("The 'stream_options' field is only allowed when 'stream' is set to true.", "stream_options")
    if request.prompt_logprobs is not None and request.stream and not _names_extra(request, "prompt_logprobs"):
        _invalid(
            "prompt_logprobs cannot be streamed: omit `stream`, or list prompt_logprobs in nvext.extra_fields",
            "prompt_logprobs",
        )
    given = [name for name in GUIDED if getattr(request, name) is not None]
    if len(given) > 1:
        received = ", ".join(name.removeprefix("guided_") for name in given)
        raise InvalidArgument(f"Only one guided-decoding constraint can be set; received: {received}", param=given[1])


def _names_extra(request: "CommonRequest", name: str) -> bool:
    """Return whether the request selects a field of `nvext`, or every field that the engine reports."""
    wanted = request.nvext.extra_fields if request.nvext is not None else None
    return any(one in (name, "engine_data") for one in wanted or ())


def _check_max_tokens(value: int, label: str, param: str) -> None:
    if value < 1:
        _invalid(f"{label} must be greater than 0, got {value}", param)
    if value > MAX_TOKENS_MAX:
        _invalid(f"{label} must not exceed {MAX_TOKENS_MAX}, got {value}", param)


def _check_stop(stop: str | list[str]) -> None:
    if not stop:
        _invalid(f"Stop sequence{'' if isinstance(stop, str) else 's array'} cannot be empty", "stop")
    if isinstance(stop, list):
        if "" in stop:
            _invalid(f"Stop sequence at index {stop.index('')} cannot be empty", "stop")
        if len(stop) > STOPS_MAX:
            raise InvalidArgument(f"Maximum of {STOPS_MAX} stop sequences allowed, got {len(stop)}", param="stop")
    most = request_bounds().stop_chars
    for number, one in enumerate([stop] if isinstance(stop, str) else stop):
        if len(one) > most:
            field = "stop" if isinstance(stop, str) else f"stop[{number}]"
            refuse_count(len(one), most, field, "characters", STOP_VARIABLE)


def _check_logit_bias(logit_bias: dict[int, float]) -> None:
    for token_id, bias in logit_bias.items():
        if not 0 <= token_id < 1 << 32:
            _invalid("Logit bias key must be a non-negative 32-bit integer token id", "logit_bias")
        if not -100 <= bias <= 100:
            _invalid(f"Logit bias for token '{token_id}' must be between -100 and 100, got {bias:g}", "logit_bias")


def check_chat(request: "ChatCompletionRequest") -> None:
    """Check the fields of chats alone. Raise `HttpError` 501 for fields that OpenAI has deprecated."""
    for name, instead in DEPRECATED:
        if getattr(request, name) is not None:
            raise HttpError(501, f"{INVALID}`{name}` is deprecated. Please migrate to use `{instead}` instead.")
    if not request.messages:
        _invalid("The 'messages' field cannot be empty. At least one message is required.", "messages")
    _check_conversation(request)
    if request.max_completion_tokens is not None:
        _check_max_tokens(request.max_completion_tokens, "Max completion tokens", "max_completion_tokens")
    for number, message in enumerate(request.messages):
        if message.content.__class__ is not str or message.role == "tool" or message.function_call is not None:
            _check_unusual_message(message, f"messages[{number}]")
    if request.top_logprobs is not None:
        if request.top_logprobs > TOP_LOGPROBS_MAX:
            _invalid(
                f"Top_logprobs must be between 0 and {TOP_LOGPROBS_MAX}, got {request.top_logprobs}", "top_logprobs"
            )
        if request.top_logprobs > 0 and not request.logprobs:
            _invalid("Top_logprobs is only allowed when logprobs is true", "top_logprobs")
    if request.continue_final_message and request.add_generation_prompt:
        _invalid(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.", "continue_final_message"
        )
    if request.chat_template_args is not None and request.chat_template_kwargs is not None:
        raise InvalidArgument(f"{MALFORMED}duplicate field `chat_template_args`", param="chat_template_kwargs")
    if request.thinking is not None:
        _check_thinking(request.thinking)
    if request.tools:
        for number, tool in enumerate(request.tools):
            _check_tool(tool, f"tools[{number}]")
    if request.tool_choice is not None and request.tool_choice not in ("none", "auto"):
        _check_tool_choice(request)
    _refuse(request, REFUSALS_CHAT)


def _check_conversation(request: "ChatCompletionRequest") -> None:
    """Bound the messages, their parts, their text and the tools."""
    bounds = request_bounds()
    check_count(request.messages, bounds.messages, "messages", variable=MESSAGES_VARIABLE)
    check_count(request.tools, TOOLS_MAX, "tools")
    parts = chars = 0
    for message in request.messages:
        content = message.content
        if isinstance(content, str):
            chars += len(content)
        elif content is not None:
            parts += len(content)
            if parts > bounds.messages:
                refuse_count(parts, bounds.messages, "messages", "parts", MESSAGES_VARIABLE)
            chars += sum(len(part.text or part.refusal or "") for part in content)
        if message.tool_calls:
            parts += len(message.tool_calls)
        for thought in (message.reasoning_content, message.reasoning):
            chars += 0 if thought is None else len(thought)
    if parts > bounds.messages:
        refuse_count(parts, bounds.messages, "messages", "parts", MESSAGES_VARIABLE)
    if chars > bounds.text_chars:
        refuse_count(chars, bounds.text_chars, "messages", "characters of text", TEXT_VARIABLE)


def _check_unusual_message(message: "ChatMessage", where: str) -> None:
    """Check a tool message, or a message whose content is not plain text."""
    if message.function_call is not None:
        _invalid(f"{where}.function_call is deprecated. Please migrate to use `tool_calls` instead.", where)
    if message.role == "tool" and message.tool_call_id is None:
        raise InvalidArgument(f"{MALFORMED}{where}: missing field `tool_call_id`", param=f"{where}.tool_call_id")
    if isinstance(message.content, str):
        return
    if message.content is None:
        if message.role != "assistant":
            raise InvalidArgument(f"{MALFORMED}{where}: missing field `content`", param=f"{where}.content")
        return
    for number, part in enumerate(message.content):
        _check_part(part, message.role, f"{where}.content[{number}]")


def _check_part(part: "ContentPart", role: "Role", spot: str) -> None:
    kind = part.type
    if kind not in PARTS:
        _invalid(f"{spot}: `{kind[:NAME_CHARS_MAX]}` parts {NOT_YET}, only {', '.join(PARTS)}", spot)
    value = getattr(part, kind)
    if value is None:
        raise InvalidArgument(f"{MALFORMED}{spot}: missing field `{kind}`", param=spot)
    if kind in TEXT_PARTS:
        return
    if role not in MEDIA_ROLES:
        _invalid(f"{spot}: a message of role `{role}` cannot have `{kind}` parts", spot)
    if kind == "input_audio":
        if value.format not in AUDIO_FORMATS:
            expected = ", ".join(AUDIO_FORMATS)
            _invalid(f"{spot}.input_audio.format: expected one of {expected}", f"{spot}.input_audio.format")
    elif not URL.match(value.url):
        _invalid(f"{spot}.{kind}.url is not a URL", f"{spot}.{kind}.url")


def _check_tool(tool: dict[str, Any], where: str) -> None:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise InvalidArgument(f'{MALFORMED}{where} must be {{"type": "function", "function": {{…}}}}', param=where)
    if not isinstance(function.get("name"), str) or not function["name"]:
        _invalid(f"{where}.function.name must be a non-empty string", f"{where}.function.name")
    description = function.get("description")
    if isinstance(description, str) and len(description) > DESCRIPTION_CHARS_MAX:
        refuse_count(len(description), DESCRIPTION_CHARS_MAX, f"{where}.function.description", "characters")
    if not isinstance(function.get("parameters", {}), dict | None):
        _invalid(f"{where}.function.parameters must be a JSON schema object", f"{where}.function.parameters")


def _check_tool_choice(request: "ChatCompletionRequest") -> None:
    choice = request.tool_choice
    if choice == "required":
        if not request.tools:
            _invalid('tool_choice is "required" but tools is empty', "tool_choice")
        return
    name = chosen_tool(choice)
    if name is None:
        raise InvalidArgument(
            f"{MALFORMED}tool_choice must be `none`, `auto`, `required` or a named function", param="tool_choice"
        )
    if not any(tool["function"]["name"] == name for tool in request.tools or ()):
        _invalid(f'tool named "{name[:NAME_CHARS_MAX]}" in tool_choice is not present in tools', "tool_choice")


def chosen_tool(choice: str | dict[str, Any] | None) -> str | None:
    """Return the function name in `tool_choice`; None if it contains none."""
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def is_call_forced(request: "ChatCompletionRequest") -> bool:
    """Return whether the answer must be a tool call."""
    return request.tool_choice == "required" or chosen_tool(request.tool_choice) is not None


def _check_thinking(thinking: bool | dict[str, Any]) -> None:
    if isinstance(thinking, dict) and thinking.get("type") not in ("enabled", "disabled", "adaptive"):
        _invalid("`thinking.type` must be `enabled`, `disabled`, or `adaptive`", "thinking")


def check_completion(request: "CompletionRequest") -> None:
    """Check the fields of completions alone."""
    if request.prompt_embeds is not None:
        _check_prompt_embeds(request)
    elif request.prompt is None:
        raise InvalidArgument(f"{MALFORMED}missing field `prompt`", param="prompt")
    elif not request.prompt:
        _invalid(f"Prompt string{'' if isinstance(request.prompt, str) else ' array'} cannot be empty", "prompt")
    texts = [request.prompt] if isinstance(request.prompt, str) else (request.prompt or [])[: CHOICES_MAX + 1]
    chars = sum(len(one) for one in texts if isinstance(one, str))
    if chars > request_bounds().text_chars:
        refuse_count(chars, request_bounds().text_chars, "prompt", "characters", TEXT_VARIABLE)
    if isinstance(request.prompt, list):
        _check_prompts(request.prompt, request.n or 1)
    if request.logprobs is not None and request.logprobs > 5:
        _invalid(f"Logprobs must be between 0 and 5, got {request.logprobs}", "logprobs")
    if request.best_of and request.best_of < (request.n or 1):
        _invalid(
            f"Best_of must be greater than or equal to n, got best_of={request.best_of} and n={request.n}", "best_of"
        )
    if (request.best_of or 1) > (request.n or 1):
        _check_best_of(request)
    if request.suffix and request.echo:
        _invalid("echo and suffix are mutually exclusive: the response is the text between prompt and suffix", "echo")
    if request.echo and request.logprobs is not None and request.stream:
        _invalid("echo together with logprobs cannot be streamed", "echo")


def _check_prompt_embeds(request: "CompletionRequest") -> None:
    """Check the properties that need no PyTorch: the worker decodes the tensor."""
    name = "prompt_embeds"
    if request.prompt:
        _invalid("prompt and prompt_embeds are mutually exclusive: prompt must be missing or empty", name)
    for other in ("suffix", "echo"):
        if getattr(request, other):
            _invalid(f"{other} is not supported together with prompt_embeds", other)
    if request.nvext is not None and request.nvext.token_data is not None:
        _invalid("prompt_embeds and nvext.token_data are mutually exclusive", name)
    text = request.prompt_embeds or ""
    size = len(text) * 3 // 4
    if size > EMBEDS_BYTES_MAX + 2:
        _invalid(f"prompt_embeds decoded data exceeds maximum size of 10MB, got {size} bytes", name)
    try:
        size = len(binascii.a2b_base64(text, strict_mode=True))
    except (binascii.Error, ValueError):
        _invalid("prompt_embeds must be base64", name)
    if size < EMBEDS_BYTES_MIN:
        _invalid(f"prompt_embeds decoded data must be at least {EMBEDS_BYTES_MIN} bytes, got {size} bytes", name)
    if size > EMBEDS_BYTES_MAX:
        _invalid(f"prompt_embeds decoded data exceeds maximum size of 10MB, got {size} bytes", name)


def _check_best_of(request: "CompletionRequest") -> None:
    if request.stream:
        _invalid("best_of greater than n cannot be streamed: candidates are ranked when all are complete", "best_of")
    if request.best_of is not None and request.best_of > CHOICES_MAX:
        _invalid(f"Best_of must be between 1 and {CHOICES_MAX}, got {request.best_of}", "best_of")


def _check_prompts(prompts: list[str | int | list[int]], n: int) -> None:
    check_count(prompts, request_bounds().prompt_tokens, "prompt", variable=TOKENS_VARIABLE)
    kinds = {kind for part in slices(prompts) for kind in set(map(type, part))}
    if len(kinds) > 1:
        raise InvalidArgument(
            f"{MALFORMED}prompt must be a string, a list of strings, a list of token ids or a list of token id lists",
            param="prompt",
        )
    if int in kinds:
        if not all(0 <= min(part) <= max(part) < 1 << 32 for part in slices(prompts)):
            raise InvalidArgument(f"{MALFORMED}a token id is out of range", param="prompt")
        return
    bounds = request_bounds()
    ids = sum(len(one) for one in prompts if isinstance(one, list))
    if ids > bounds.prompt_tokens:
        refuse_count(ids, bounds.prompt_tokens, "prompt", "token ids", TOKENS_VARIABLE)
    if len(prompts) * n > CHOICES_MAX:
        _invalid(
            f"Total choices (batch_size × n = {len(prompts)} × {n} = {len(prompts) * n}) "
            f"exceeds maximum of {CHOICES_MAX}",
            "prompt",
        )
    for number, prompt in enumerate(prompts):
        if not prompt:
            kind = "string" if isinstance(prompt, str) else "integer array"
            _invalid(f"Prompt {kind} at index {number} cannot be empty", "prompt")


def _refuse(request: "CommonRequest", refusals: Sequence[Refusal]) -> None:
    for name, is_refused, message in refusals:
        value = getattr(request, name)
        if value is not None and is_refused(value):
            _invalid(message, name)


class RequestBounds(Struct, frozen=True):
    """The limits of a request."""

    messages: int = 16_384
    """Maximum number of messages, and of parts of messages."""
    prompt_tokens: int = 1 << 20
    """Maximum number of token ids of all prompts."""
    text_chars: int = 16 << 20
    """Maximum characters of all messages or prompts, and of all strings of a larger body, without media: about four million
    tokens."""
    stop_chars: int = 4096
    """Maximum characters of each stop sequence."""

    @classmethod
    def from_environment(cls) -> "RequestBounds":
        """Return the limits that the environment sets. Raise `ConfigError`."""
        own = cls()
        return cls(
            messages=_positive(MESSAGES_VARIABLE, own.messages),
            prompt_tokens=_positive(TOKENS_VARIABLE, own.prompt_tokens),
            text_chars=_positive(TEXT_VARIABLE, own.text_chars >> 20) << 20,
            stop_chars=_positive(STOP_VARIABLE, own.stop_chars),
        )


@functools.cache
def request_bounds() -> RequestBounds:
    """Return the limits of this process, read once."""
    return RequestBounds.from_environment()


def check_count(values: Sequence[Any] | dict[Any, Any] | None, most: int, field: str, variable: str = "") -> None:
    """Raise `InvalidArgument` for a list with more entries than are allowed."""
    if values is not None and len(values) > most:
        refuse_count(len(values), most, field, "entries", variable)


def refuse_count(seen: int, most: int, field: str, unit: str, variable: str = "") -> NoReturn:
    """Raise `InvalidArgument` for a count above its maximum."""
    hint = f" ({variable})" if variable else ""
    raise InvalidArgument(f"{INVALID}{field} has {seen} {unit}; at most {most} are allowed{hint}", param=field)


def _positive(variable: str, default: int) -> int:
    value: int = setting(variable, default, int)
    if value < 1:
        raise ConfigError(f"{variable}={value}: must be at least 1")
    return value
