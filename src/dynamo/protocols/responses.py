"""Responses of `/v1/responses` (OpenAI's Responses API), whole or partial, and what is stored of them."""

from typing import Any, Literal

import msgspec

from dynamo.protocols.response_items import OutputItem, StoredItem
from dynamo.protocols.response_requests import TextFormat, TextOptions, ToolChoice


class ShownTool(msgspec.Struct, tag_field="type", tag="function"):
    """A function as it is repeated in the response: with every field of the API, whether given or not."""

    name: str
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool = True
    """The API's default, which the released frontend repeats too."""


class ShownReasoning(msgspec.Struct):
    """The reasoning options as they are repeated in the response: both fields, whether given or not."""

    effort: str | None = None
    summary: str | None = None


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
