"""Anthropic: the requests and responses of `/v1/messages` and `/v1/messages/count_tokens`.

    decode_messages(body), decode_message_count(body)   bytes -> a typed request, or InvalidArgument

Content blocks are distinguished by their `type`; an unsupported type is rejected by name.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from dynamo.protocols.nvext import NvExt
from dynamo.protocols.strict import StrictDecoder

# ---- content blocks -------------------------------------------------------------------------------------------------


class CacheControl(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A cache breakpoint hint. Has no effect: the KV cache detects shared prefixes automatically."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: Any = None


class ContentBlock(msgspec.Struct, tag_field="type", forbid_unknown_fields=True, omit_defaults=True):
    """One part of a message's content."""


class TextBlock(ContentBlock, tag="text"):
    """Text."""

    text: str
    cache_control: CacheControl | None = None
    citations: Any = None


class Base64Source(msgspec.Struct, tag_field="type", tag="base64", forbid_unknown_fields=True):
    """An inline image."""

    media_type: str
    data: str


class UrlSource(msgspec.Struct, tag_field="type", tag="url", forbid_unknown_fields=True):
    """An image at a URL."""

    url: str


class ImageBlock(ContentBlock, tag="image"):
    """An image."""

    source: Base64Source | UrlSource
    cache_control: CacheControl | None = None


class TextSource(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """An inline plain-text document."""

    data: str
    media_type: str = "text/plain"


class DocumentBlock(ContentBlock, tag="document"):
    """A plain-text document; other formats cannot be part of a text prompt."""

    source: TextSource
    title: str | None = None
    context: str | None = None
    citations: Any = None
    cache_control: CacheControl | None = None


class ThinkingBlock(ContentBlock, tag="thinking"):
    """The model's reasoning."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(ContentBlock, tag="redacted_thinking"):
    """Encrypted reasoning that only its provider can read."""

    data: str


class ToolUseBlock(ContentBlock, tag="tool_use"):
    """A tool call of the model."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Any = None
    toolset_name: str | None = None


ResultPart = TextBlock | ImageBlock | DocumentBlock


class ToolResultBlock(ContentBlock, tag="tool_result"):
    """The result of a tool call."""

    tool_use_id: str
    content: str | list[ResultPart] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: str | None = None


InputBlock = (
    TextBlock | ImageBlock | DocumentBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
)


class InputMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


# ---- the request ----------------------------------------------------------------------------------------------------


class CustomTool(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A tool that the client executes. Tools of other types would be executed on Anthropic's servers."""

    name: str
    type: str | None = None
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    input_examples: list[dict[str, Any]] | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None


class AutoChoice(msgspec.Struct, tag_field="type", tag="auto", forbid_unknown_fields=True):
    """The model decides whether to call a tool."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(msgspec.Struct, tag_field="type", tag="any", forbid_unknown_fields=True):
    """The model must call a tool."""

    disable_parallel_tool_use: bool | None = None


class NamedChoice(msgspec.Struct, tag_field="type", tag="tool", forbid_unknown_fields=True):
    """The model must call this tool."""

    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(msgspec.Struct, tag_field="type", tag="none", forbid_unknown_fields=True):
    """The model must not call a tool."""


Display = Literal["summarized", "omitted"]


class ThinkingEnabled(msgspec.Struct, tag_field="type", tag="enabled", forbid_unknown_fields=True):
    """Reasoning is enabled, with a token budget."""

    budget_tokens: int
    display: Display | None = None


class ThinkingAdaptive(msgspec.Struct, tag_field="type", tag="adaptive", forbid_unknown_fields=True):
    """The model decides the amount of reasoning."""

    display: Display | None = None


class ThinkingDisabled(msgspec.Struct, tag_field="type", tag="disabled", forbid_unknown_fields=True):
    """Reasoning is disabled."""


class JsonOutput(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """A JSON object that matches this schema."""

    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Effort and format of the output."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutput | None = None


class Metadata(msgspec.Struct, forbid_unknown_fields=True):
    """The end user of the request."""

    user_id: str | None = None


class AnthropicPromptFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that define the prompt, shared by message and token count requests."""

    model: str
    messages: list[InputMessage]
    system: str | list[TextBlock] | None = None
    tools: list[CustomTool] | None = None
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoChoice | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutput | None = None
    # Rejected if set to a value with an effect.
    context_management: Any = None
    mcp_servers: Any = None
    # Accepted without an effect on the output.
    cache_control: CacheControl | None = None
    speed: Literal["standard", "fast"] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesRequest(AnthropicPromptFields, kw_only=True):
    """The body of `POST /v1/messages`."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    nvext: NvExt | None = None
    # Rejected if set to a value with an effect.
    container: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    # Accepted without an effect on the output.
    service_tier: str | None = None


class MessageCountRequest(AnthropicPromptFields, kw_only=True):
    """The body of `POST /v1/messages/count_tokens`."""


_messages = StrictDecoder(MessagesRequest)
_count = StrictDecoder(MessageCountRequest)


def decode_messages(body: bytes, *, ignore_unknown: bool = False) -> MessagesRequest:
    """Decode a message request. Raise `InvalidArgument`."""
    return _messages.decode(body, ignore_unknown=ignore_unknown)


def decode_message_count(body: bytes, *, ignore_unknown: bool = False) -> MessageCountRequest:
    """Decode a token count request. Raise `InvalidArgument`."""
    return _count.decode(body, ignore_unknown=ignore_unknown)


# ---- responses ------------------------------------------------------------------------------------------------------

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]


class ThinkingTokens(msgspec.Struct):
    """Output tokens of the reasoning."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """Token counts of a whole message. Cached prompt tokens are not counted as input tokens."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens_details: ThinkingTokens | UnsetType = UNSET


class AnswerText(msgspec.Struct, tag_field="type", tag="text"):
    """Text of a response."""

    text: str


class AnswerThinking(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning of a response; clients send it back only if it has a signature."""

    thinking: str
    signature: str


class AnswerToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A tool call of a response."""

    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = AnswerText | AnswerThinking | AnswerToolUse


class AnthropicMessage(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """A whole response, or the start of a streamed one."""

    id: str
    role: Literal["assistant"] = "assistant"
    content: list[AnswerBlock] = msgspec.field(default_factory=list)
    model: str
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageTokens(msgspec.Struct):
    """The response of `POST /v1/messages/count_tokens`."""

    input_tokens: int


class ModelInfo(msgspec.Struct, tag_field="type", tag="model"):
    """A served model, for clients that send the `anthropic-version` header."""

    id: str
    display_name: str
    max_input_tokens: int | None = None
    max_tokens: int | None = None
    created_at: str = "1970-01-01T00:00:00Z"
    """The value that Anthropic uses for an unknown date."""
    lifecycle: Literal["active"] = "active"


class ModelPage(msgspec.Struct):
    """The list of served models."""

    data: list[ModelInfo]
    first_id: str | None = None
    last_id: str | None = None
    has_more: Literal[False] = False


class ErrorDetails(msgspec.Struct):
    """Type and text of an error."""

    type: str
    message: str


class ErrorMessage(msgspec.Struct, tag_field="type", tag="error"):
    """An error, as a response body or as an event of a stream."""

    error: ErrorDetails
