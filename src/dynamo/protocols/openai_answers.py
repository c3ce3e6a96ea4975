"""Answers: what `/v1/chat/completions`, `/v1/completions` and `/v1/models` say, whole and in chunks (serving-plane.md §1.5)."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from dynamo.protocols.engine import CompletionUsage


class FunctionCalled(msgspec.Struct):
    """The function of a tool call in an answer; `arguments` is a JSON string."""

    name: str
    arguments: str


class ResponseToolCall(msgspec.Struct):
    """A tool call in an answer. `index` is there in streams only."""

    id: str
    function: FunctionCalled
    type: str = "function"
    index: int | UnsetType = UNSET


class TopTokenLogprob(msgspec.Struct):
    """An alternative for a token of a chat answer."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(msgspec.Struct):
    """A token of a chat answer and its alternatives."""

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
    """An assistant's whole answer; `content` is null where there is no text."""

    content: str | None
    refusal: None = None
    role: str = "assistant"
    tool_calls: list[ResponseToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """The same, where `--reasoning-field-name` says so."""


class ChatChoice(msgspec.Struct):
    """A choice of a whole chat answer."""

    index: int
    message: ResponseMessage
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class ChatCompletion(msgspec.Struct):
    """A whole chat answer."""

    id: str
    choices: list[ChatChoice]
    created: int
    model: str
    object: str = "chat.completion"
    service_tier: str | UnsetType = UNSET
    """Told where the request names one."""
    usage: CompletionUsage | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET
    """As vLLM has it; only where the request asks for it."""
    nvext: dict[str, Any] | UnsetType = UNSET


class Delta(msgspec.Struct):
    """What a chunk adds to the answer."""

    content: str | UnsetType | None = UNSET
    role: str | UnsetType = UNSET
    tool_calls: list[ResponseToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    """A choice of a chat chunk."""

    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class ChatCompletionChunk(msgspec.Struct):
    """A piece of a chat answer."""

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
    """As vLLM has it; only where the request asks for it."""


class TextCompletion(msgspec.Struct):
    """A text completion, whole or a chunk: `usage` is null in a chunk unless it was asked for."""

    id: str
    choices: list[TextChoice]
    created: int
    model: str
    system_fingerprint: None = None
    object: str = "text_completion"
    usage: CompletionUsage | None = None
    nvext: dict[str, Any] | UnsetType = UNSET


class ModelObject(msgspec.Struct):
    """A model that is served. `context_window` is 0 where no worker published its context length."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = "nvidia"
    context_window: int = 0
    max_output_tokens: int | UnsetType = UNSET


class ModelList(msgspec.Struct):
    """The answer of `GET /v1/models`."""

    data: list[ModelObject]
    object: str = "list"
