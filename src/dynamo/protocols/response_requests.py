"""Requests of `/v1/responses` (OpenAI's Responses API): a response, a token count, the compaction of a conversation.

decode_response_request(body)   bytes -> a typed request, its `input` still raw
with_items(decode, body)        the request and the items of its `input`
"""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.nvext import I32, NvExt
from dynamo.protocols.openai import I64, ResponseFormat
from dynamo.protocols.response_items import InputItem, decode_items
from dynamo.protocols.strict import MALFORMED, StrictDecoder

Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


class FunctionTool(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    output_schema: dict[str, Any] | None = None
    is_async: bool | None = msgspec.field(default=None, name="async")


class ChosenFunction(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """A tool choice that names one function."""

    name: str


class AllowedTools(msgspec.Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    """A tool choice that permits a subset of the tools."""

    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Free text."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """Any JSON object."""


class SchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True, omit_defaults=True):
    """A JSON object that matches this schema."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Format and verbosity of the text."""

    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Effort and summary of the reasoning."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: str | None = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a streamed response."""

    include_obfuscation: bool | None = None


ToolChoice = Literal["none", "auto", "required"] | ChosenFunction | AllowedTools


class ResponsesPromptFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that define the prompt, shared by response and token count requests."""

    model: str | None = None
    input: str | list[msgspec.Raw] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    conversation: Any = None
    personality: str | None = None


class ResponseRequest(ResponsesPromptFields, kw_only=True):
    """The body of `POST /v1/responses`."""

    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: I32 | None = None
    min_p: float | None = None
    seed: I64 | None = None
    stop: str | list[str] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    response_format: ResponseFormat | None = None
    """Format as in a chat request; `text.format` is this API's own."""
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    include: list[Includable] | None = None
    metadata: dict[str, str] | None = None
    nvext: NvExt | None = None
    # Rejected if set to a value with an effect.
    background: bool | None = None
    max_tool_calls: int | None = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    image: Any = None
    access_programs: Any = None
    # Accepted without an effect on the output; some are repeated in the response.
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None


class TokenCountRequest(ResponsesPromptFields, kw_only=True):
    """The body of `POST /v1/responses/input_tokens`."""


class CompactRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/responses/compact`."""

    model: str
    input: str | list[msgspec.Raw] | None = None
    previous_response_id: str | None = None
    instructions: str | None = None
    prompt_cache_key: str | None = None


_request = StrictDecoder(ResponseRequest)
_count = StrictDecoder(TokenCountRequest)
_compact = StrictDecoder(CompactRequest)


def decode_response_request(body: bytes, *, ignore_unknown: bool = False) -> ResponseRequest:
    """Decode a request for a response. Raise `InvalidArgument`."""
    return _request.decode(body, ignore_unknown=ignore_unknown)


def decode_token_count(body: bytes, *, ignore_unknown: bool = False) -> TokenCountRequest:
    """Decode a request for a token count. Raise `InvalidArgument`."""
    return _count.decode(body, ignore_unknown=ignore_unknown)


def decode_compact_request(body: bytes, *, ignore_unknown: bool = False) -> CompactRequest:
    """Decode a request to compact a conversation. Raise `InvalidArgument`."""
    return _compact.decode(body, ignore_unknown=ignore_unknown)


P = TypeVar("P", bound=ResponsesPromptFields)


def with_items(decode: Callable[[bytes], P], body: bytes) -> tuple[P, list[InputItem]]:
    """Return a request and its items. Raise `InvalidArgument`."""
    request = decode(body)
    if request.input is None:
        raise InvalidArgument(f"{MALFORMED}missing field `input`", param="input")
    return request, decode_items(request.input)
