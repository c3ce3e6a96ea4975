"""Requests, items and responses of `/v1/responses` (OpenAI's Responses API).

    decode_response_request(body)   bytes -> a typed request, its `input` still raw
    decode_items(raw)               the items of an `input`, or InvalidArgument

Items have the same form in requests and responses: a client may send the items of a response back.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.nvext import I32, NvExt
from dynamo.protocols.openai import I64, ResponseFormat
from dynamo.protocols.strict import INVALID, MALFORMED, StrictDecoder, refuse

ITEMS_MAX = 10_000  # Larger than any conversation; bounds the decoding time of a body that contains only brackets.

ItemStatus = Literal["in_progress", "completed", "incomplete"]
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

# ---- content parts --------------------------------------------------------------------------------------------------


class ResponsePart(msgspec.Struct, tag_field="type", forbid_unknown_fields=True):
    """One part of a message's content."""


class InputText(ResponsePart, tag="input_text", omit_defaults=True):
    """Text of a user, a developer or a tool."""

    text: str
    prompt_cache_breakpoint: Any = None


class InputImage(ResponsePart, tag="input_image", omit_defaults=True):
    """An image, by its address or inline as a data URL."""

    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["low", "high", "auto", "original"] | None = None
    prompt_cache_breakpoint: Any = None


class ResponseTopLogprob(msgspec.Struct):
    """An alternative for a token."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class Logprob(msgspec.Struct):
    """A token of a response and its alternatives."""

    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[ResponseTopLogprob] = msgspec.field(default_factory=list)


class OutputText(ResponsePart, tag="output_text"):
    """Text of the assistant."""

    text: str
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[Logprob] | None = msgspec.field(default_factory=list)


class Refusal(ResponsePart, tag="refusal"):
    """The assistant's refusal."""

    refusal: str


class ReasoningText(ResponsePart, tag="reasoning_text"):
    """A piece of the model's reasoning."""

    text: str


class SummaryText(ResponsePart, tag="summary_text"):
    """A piece of a reasoning summary."""

    text: str


# ---- items ----------------------------------------------------------------------------------------------------------


class ResponseItem(msgspec.Struct, tag_field="type", forbid_unknown_fields=True, omit_defaults=True):
    """One item of a conversation: a message, reasoning, a tool call or its result."""


class MessageItem(ResponseItem, tag="message"):
    """A message of any role."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | InputImage | OutputText | Refusal]
    id: str | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(ResponseItem, tag="function_call"):
    """A tool call of the model; `arguments` is a JSON text."""

    arguments: str
    call_id: str
    name: str
    id: str | None = None
    status: ItemStatus | None = None
    namespace: str | None = None
    caller: Any = None
    is_async: bool | None = msgspec.field(default=None, name="async")


class FunctionOutputItem(ResponseItem, tag="function_call_output"):
    """The result of a tool call."""

    call_id: str
    output: str | list[InputText | InputImage]
    id: str | None = None
    status: ItemStatus | None = None
    name: str | None = None
    namespace: str | None = None
    caller: Any = None


class ReasoningItem(ResponseItem, tag="reasoning"):
    """Reasoning of the model."""

    summary: list[SummaryText]
    id: str | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: ItemStatus | None = None


class CompactionItem(ResponseItem, tag="compaction"):
    """A conversation that `/v1/responses/compact` has compacted; opaque to the client."""

    encrypted_content: str
    id: str | None = None
    created_by: str | None = None


class ItemReference(ResponseItem, tag="item_reference"):
    """An item of a stored response, by its id."""

    id: str


StoredItem = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem | CompactionItem
InputItem = StoredItem | ItemReference
OutputItem = MessageItem | FunctionCallItem | ReasoningItem

_ITEMS: dict[str, StrictDecoder[Any]] = {
    "message": StrictDecoder(MessageItem),
    "function_call": StrictDecoder(FunctionCallItem),
    "function_call_output": StrictDecoder(FunctionOutputItem),
    "reasoning": StrictDecoder(ReasoningItem),
    "compaction": StrictDecoder(CompactionItem),
    "item_reference": StrictDecoder(ItemReference),
}


class _Kind(msgspec.Struct):
    """The field that selects an item's type: messages may omit it, and references may set it to null."""

    type: str | None = None
    role: Any = None


_kind = msgspec.json.Decoder(_Kind)


def decode_items(raw: str | Sequence[msgspec.Raw]) -> list[InputItem]:
    """Return the items of an `input`; a string becomes a user message. Raise `InvalidArgument`."""
    if isinstance(raw, str):
        return [MessageItem(role="user", content=raw)]
    if not raw:
        raise InvalidArgument(f"{INVALID}`input` must not be empty", param="input")
    if len(raw) > ITEMS_MAX:
        raise InvalidArgument(f"{INVALID}`input` has {len(raw)} items, expected at most {ITEMS_MAX}", param="input")
    return [_decode_item(one, f"input[{number}]") for number, one in enumerate(raw)]


def _decode_item(raw: msgspec.Raw, where: str) -> InputItem:
    try:
        kind = _kind.decode(raw)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidArgument(f"{MALFORMED}{where} is not a valid item", param=where) from None
    name = kind.type or ("item_reference" if kind.role is None else "message")
    decoder = _ITEMS.get(name)
    if decoder is None:
        refuse(f"{where}.type", f"`{name[:80]}` is not supported by this release: expected one of {', '.join(_ITEMS)}")
    item: InputItem = decoder.decode(raw, where)
    return item


# ---- the request ----------------------------------------------------------------------------------------------------


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


class ShownTool(msgspec.Struct, tag_field="type", tag="function"):
    """A function as it is repeated in the response: with every field of the API, whether given or not."""

    name: str
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool = True
    """The API's default, which the released frontend repeats too."""


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


class ShownReasoning(msgspec.Struct):
    """The reasoning options as they are repeated in the response: both fields, whether given or not."""

    effort: str | None = None
    summary: str | None = None


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


# ---- responses ------------------------------------------------------------------------------------------------------


class CachedTokens(msgspec.Struct):
    """Prompt tokens that were read from the cache."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class ReasoningTokens(msgspec.Struct):
    """Output tokens of the reasoning."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Token counts of a whole response."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseFailure(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why a response ended early."""

    reason: Literal["max_output_tokens", "content_filter"]


class Response(msgspec.Struct, kw_only=True):
    """A response, whole or partial. Every field is present, as in upstream's responses."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    background: bool = False
    billing: None = None
    conversation: None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    model: str
    output: list[OutputItem] = msgspec.field(default_factory=list)
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt: None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    reasoning: ShownReasoning | None = None
    safety_identifier: str | None = None
    service_tier: str = "auto"
    store: bool = False
    temperature: float = 1.0
    text: TextOptions = msgspec.field(default_factory=lambda: TextOptions(format=TextFormat()))
    tool_choice: ToolChoice = "auto"
    tools: list[ShownTool] = msgspec.field(default_factory=list)
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: Literal["auto", "disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


class Compaction(msgspec.Struct, kw_only=True):
    """The response of `POST /v1/responses/compact`: the items that replace the conversation."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[StoredItem]
    usage: ResponseUsage


class StoredResponse(msgspec.Struct):
    """A response as it is stored: the response object and the request's own input items."""

    response: Response
    input: list[StoredItem]
    owner: str | None = None
    """The owner of the API key of the request; None on a server without keys."""


class TokenCount(msgspec.Struct):
    """The response of `POST /v1/responses/input_tokens`."""

    input_tokens: int
    object: str = "response.input_tokens"


class ItemPage(msgspec.Struct):
    """The response of `GET /v1/responses/{id}/input_items`."""

    data: list[StoredItem]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class ResponseDeleted(msgspec.Struct):
    """The response of `DELETE /v1/responses/{id}`."""

    id: str
    object: str = "response"
    deleted: bool = True


P = TypeVar("P", bound=ResponsesPromptFields)


def with_items(decode: Callable[[bytes], P], body: bytes) -> tuple[P, list[InputItem]]:
    """Return a request and its items. Raise `InvalidArgument`."""
    request = decode(body)
    if request.input is None:
        raise InvalidArgument(f"{MALFORMED}missing field `input`", param="input")
    return request, decode_items(request.input)
