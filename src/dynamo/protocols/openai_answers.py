"""Responses of `/v1/chat/completions`, `/v1/completions` and `/v1/models`, whole and in chunks."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from dynamo.protocols.engine import CompletionUsage


class ResponseFunctionCall(msgspec.Struct):
    """The function of a tool call in a response; `arguments` is a JSON string."""

    name: str
    arguments: str


class ResponseToolCall(msgspec.Struct):
    """A tool call in a response. `index` is set in streams only."""

    id: str
    function: ResponseFunctionCall
    type: str = "function"
    index: int | UnsetType = UNSET


class TopTokenLogprob(msgspec.Struct):
    """An alternative for a token of a chat response."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(msgspec.Struct):
    """A token of a chat response and its alternatives."""

    token: str
    logprob: float
    token_id: int | UnsetType = UNSET
    bytes: list[int] | None = None
    top_logprobs: list[TopTokenLogprob] = msgspec.field(default_factory=list)


class ChatLogprobs(msgspec.Struct):
    """The log-probabilities of a chat choice."""

    content: list[TokenLogprob]
    refusal: None = None


class ResponseMessage(msgspec.Struct):
    """The assistant's whole message; `content` is null if there is no text."""

    content: str | None
    refusal: None = None
    role: str = "assistant"
    tool_calls: list[ResponseToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """The reasoning text, if `--reasoning-field-name` selects this field."""


class ChatChoice(msgspec.Struct):
    """A choice of a whole chat response."""

    index: int
    message: ResponseMessage
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class ChatCompletion(msgspec.Struct):
    """A whole chat response."""

    id: str
    choices: list[ChatChoice]
    created: int
    model: str
    object: str = "chat.completion"
    service_tier: str | UnsetType = UNSET
    """The service tier; present if the request names one."""
    usage: CompletionUsage | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET
    """Log-probabilities of the prompt in vLLM's format; present if the request selects them."""
    nvext: dict[str, Any] | UnsetType = UNSET


class ChoiceDelta(msgspec.Struct):
    """The part of the message that a chunk adds."""

    content: str | UnsetType | None = UNSET
    role: str | UnsetType = UNSET
    tool_calls: list[ResponseToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    """A choice of a chat chunk."""

    index: int
    delta: ChoiceDelta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class ChatCompletionChunk(msgspec.Struct):
    """A chunk of a chat response."""

    id: str
    choices: list[ChunkChoice]
    created: int
    model: str
    object: str = "chat.completion.chunk"
    service_tier: str | UnsetType = UNSET
    usage: CompletionUsage | UnsetType | None = UNSET
    nvext: dict[str, Any] | UnsetType = UNSET


class TextLogprobs(msgspec.Struct):
    """The log-probabilities of a text choice."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)
    text_offset: list[int] = msgspec.field(default_factory=list)


class TextChoice(msgspec.Struct):
    """A choice of a text completion, whole or a chunk."""

    text: str
    index: int
    finish_reason: str | None = None
    logprobs: TextLogprobs | None = None
    prompt_logprobs: list[Any] | UnsetType = UNSET
    """Log-probabilities of the prompt in vLLM's format; present if the request selects them."""


class TextCompletion(msgspec.Struct):
    """A text completion, whole or a chunk: `usage` is null in a chunk unless the request selects it."""

    id: str
    choices: list[TextChoice]
    created: int
    model: str
    system_fingerprint: None = None
    object: str = "text_completion"
    usage: CompletionUsage | None = None
    nvext: dict[str, Any] | UnsetType = UNSET


class ModelObject(msgspec.Struct):
    """A served model. `context_window` is 0 if no worker published its context length."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = "nvidia"
    context_window: int = 0
    max_output_tokens: int | UnsetType = UNSET


class ModelList(msgspec.Struct):
    """The response of `GET /v1/models`."""

    data: list[ModelObject]
    object: str = "list"
