"""OpenAI requests: the bodies of `/v1/chat/completions` and `/v1/completions`.

    decode_chat(body), decode_completion(body)   bytes -> a typed, validated request, or InvalidArgument

Three kinds of error, with upstream's texts: a body that is not JSON of the right shape ("Failed to deserialize …"),
a value out of range ("Validation: …"), and an unknown field ("Validation: Unsupported parameter(s): …"). A fourth kind
has no counterpart in upstream: a field that would change the response but is not supported is rejected by name, never
dropped silently. `openai_ranges` checks the values, `openai_answers` defines the responses.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn

import msgspec
from msgspec import Meta

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.nvext import I32, U32, AgentHints, NvExt, RequestRoutingConstraints
from dynamo.protocols.openai_ranges import check_chat, check_common, check_completion
from dynamo.protocols.strict import MALFORMED, MISSING_FIELD, NAME_CHARS_MAX, UNKNOWN_FIELD, StrictDecoder

I64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class StreamOptions(msgspec.Struct):
    """Options of a streamed response."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(msgspec.Struct):
    """The format of the output text."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: Any = None
    format: Any = None
    """Format of a structural tag; upstream's engines support it, its frontend does not."""
    structures: Any = None
    triggers: Any = None
    """Triggers of a structural tag in its older form."""


class FunctionCall(msgspec.Struct):
    """A function call of an assistant message; `arguments` is a JSON string, or from some clients an object."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct):
    """One entry of an assistant's `tool_calls`."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class MediaUrl(msgspec.Struct, omit_defaults=True):
    """The location of an image, a video or an audio clip; a `data:` URL contains it."""

    url: str
    detail: str | None = None
    uuid: str | None = None


class InputAudio(msgspec.Struct):
    """An audio clip inside the request, in base64."""

    data: str
    format: str


class ContentPart(msgspec.Struct, omit_defaults=True):
    """One part of a message whose content is a list; the field named by its type is set."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: MediaUrl | None = None
    video_url: MediaUrl | None = None
    audio_url: MediaUrl | None = None
    input_audio: InputAudio | None = None


class ChatMessage(msgspec.Struct):
    """One message of a conversation."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Any = None


class CommonRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that chat and text completions share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: U32 | None = None
    min_tokens: U32 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[U32] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    n: I32 | None = None
    seed: I64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: I32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[U32] | None = None
    detokenize: bool | None = None
    prompt_logprobs: U32 | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    response_format: ResponseFormat | None = None
    nvext: NvExt | None = None
    cache_salt: str | None = None
    return_tokens_as_token_ids: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    # Accepted without effect (`protocols.field_effects`); forwarded to workers that take text.
    user: str | None = None
    metadata: Any = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def stop_strings(self) -> list[str] | None:
        """Return `stop` as a list; None if there is none."""
        return ([self.stop] if isinstance(self.stop, str) else self.stop) or None


class ChatCompletionRequest(CommonRequest, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: U32 | None = None
    logprobs: bool | None = None
    top_logprobs: U32 | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_args: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    thinking: bool | dict[str, Any] | None = None
    thinking_token_budget: U32 | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    function_call: Any = None
    functions: Any = None
    audio: Any = None
    web_search_options: Any = None
    # Accepted without effect: a predicted output can speed up generation and never changes the result.
    prediction: Any = None


class CompletionRequest(CommonRequest, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: str | list[str | int | list[U32]] | None = None
    prompt_embeds: str | None = None
    logprobs: U32 | None = None
    best_of: U32 | None = None
    echo: bool | None = None
    no_stop_trim: bool | None = None
    suffix: str | None = None

    @property
    def is_echo_alone(self) -> bool:
        """Return whether the response is the prompt only."""
        return self.max_tokens == 0


STRICT: Mapping[str, type[msgspec.Struct]] = {
    "nvext": NvExt,
    "nvext.agent_hints": AgentHints,
    "nvext.routing_constraints": RequestRoutingConstraints,
}
"""The nested objects in which an unknown field is an error."""


def _fail(text: str, _: str) -> NoReturn:
    """Raise `InvalidArgument` for a body of the wrong shape, with the field named where msgspec names it."""
    what, _, where = text.partition(" - at ")
    param = where.partition("$")[2].rstrip("`").lstrip(".") or None
    strict = STRICT.get(param or "")
    if strict is not None and what.startswith(UNKNOWN_FIELD):
        field = what.removeprefix(UNKNOWN_FIELD)[: NAME_CHARS_MAX + 2]
        allowed = ", ".join(f"`{name}`" for name in strict.__struct_fields__)
        raise InvalidArgument(f"{MALFORMED}unknown field {field}, expected one of {allowed}", param=param)
    if param is None and what.startswith(MISSING_FIELD):
        param = what.removeprefix(MISSING_FIELD).strip("`")
    raise InvalidArgument(f"{MALFORMED}{text}", param=param)


_chat = StrictDecoder(ChatCompletionRequest, _fail)
_completion = StrictDecoder(CompletionRequest, _fail)


def decode_chat(body: bytes, *, ignore_unsupported: bool = False) -> ChatCompletionRequest:
    """Decode a chat request. Raise `InvalidArgument`, or `HttpError` 501 for fields that OpenAI has deprecated."""
    request = _chat.decode(body, ignore_unknown=ignore_unsupported)
    validate_chat(request)
    return request


def validate_chat(request: ChatCompletionRequest) -> None:
    """Check a chat request converted from another API like one from a client. Raise `InvalidArgument`."""
    check_common(request)
    check_chat(request)


def decode_completion(body: bytes, *, ignore_unsupported: bool = False) -> CompletionRequest:
    """Decode a text completion request. Raise `InvalidArgument`."""
    request = _completion.decode(body, ignore_unknown=ignore_unsupported)
    validate_completion(request)
    return request


def completion_of(fields: Mapping[str, Any]) -> CompletionRequest:
    """Return the text completion request with these fields; its values are not checked. Raise `InvalidArgument`."""
    try:
        return msgspec.convert(fields, CompletionRequest)
    except msgspec.ValidationError as error:
        _fail(str(error), "")


def validate_completion(request: CompletionRequest) -> None:
    """Check a text completion request made in this process like one from a client. Raise `InvalidArgument`."""
    check_common(request, may_be_empty=bool(request.echo))
    check_completion(request)
