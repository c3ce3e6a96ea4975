"""Native generation: the engines' own token-in, token-out requests of `/inference/v1/generate` and `/generate`.

The rest of the request is forwarded whole: vLLM's as `extra_args.vllm_tito`, SGLang's as `extra_args.sglang_tito`.
"""

from typing import Any

import msgspec

from dynamo.core.codec import json_decode
from dynamo.core.errors import InvalidArgument
from dynamo.protocols.engine import (
    CompletionUsage,
    GuidedDecoding,
    OutputOptions,
    PreprocessedRequest,
    Routing,
    SamplingOptions,
    StopConditions,
)
from dynamo.protocols.long_lists import decode_in_parts
from dynamo.protocols.strict import MALFORMED, fail

VLLM_CAPABILITY = "vllm_inference_v1_generate"
SGLANG_CAPABILITY = "sglang_generate"
"""Card capability of a worker that serves `/generate`."""


VLLM_EXTRA, SGLANG_EXTRA = "vllm_tito", "sglang_tito"
"""Keys of `extra_args` that carry the client's whole request, without its tokens."""


class VllmStructuredOutputs(msgspec.Struct):
    """vLLM's `structured_outputs`: the fields that other engines support too."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: Any = None
    whitespace_pattern: str | None = None


class VllmSampling(msgspec.Struct):
    """The subset of vLLM's sampling parameters that the router and other engines use."""

    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: VllmStructuredOutputs | None = None


class VllmStreamOptions(msgspec.Struct):
    """Options of a streamed response."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class VllmRequest(msgspec.Struct):
    """The body of `/inference/v1/generate`, limited to the fields that are read here."""

    token_ids: list[int]
    sampling_params: VllmSampling
    model: str | None = None
    request_id: str | None = None
    stream: bool = False
    stream_options: VllmStreamOptions | None = None
    priority: int = 0
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


class SglangSampling(msgspec.Struct):
    """The subset of SGLang's sampling parameters that the router and other engines use."""

    n: int | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None


class SglangRequest(msgspec.Struct):
    """The body of `/generate`, limited to the fields that are read here."""

    input_ids: list[int]
    sampling_params: SglangSampling | None = None
    model: str | None = None
    rid: str | None = None
    stream: bool = False
    priority: int | None = None
    cache_salt: str | None = None
    return_logprob: bool = False


class NativeLogprob(msgspec.Struct, kw_only=True):
    """The log-probability of one token or of one alternative."""

    token: str
    logprob: float
    bytes: list[int]


class NativeLogprobs(NativeLogprob, kw_only=True):
    """The log-probability of a token and those of its alternatives."""

    top_logprobs: list[NativeLogprob]


class VllmLogprobs(msgspec.Struct):
    """The log-probabilities of a choice."""

    content: list[NativeLogprobs]


class VllmChoice(msgspec.Struct, kw_only=True):
    """One continuation."""

    index: int
    token_ids: list[int]
    logprobs: VllmLogprobs | None = None
    finish_reason: str | None = None
    routed_experts: Any = None
    sampling_mask: Any = None


class VllmResponse(msgspec.Struct, kw_only=True):
    """The response of `/inference/v1/generate`."""

    request_id: str
    choices: list[VllmChoice]
    prompt_logprobs: Any = None
    kv_transfer_params: Any = None


class VllmStreamChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New tokens of one continuation."""

    index: int
    token_ids: list[int]
    logprobs: VllmLogprobs | None = None
    finish_reason: str | None = None
    routed_experts: Any = None


class VllmStreamResponse(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One event of a streamed response of `/inference/v1/generate`."""

    request_id: str
    choices: list[VllmStreamChoice]
    usage: CompletionUsage | None = None


def decode_vllm(body: bytes) -> tuple[VllmRequest, dict[str, Any]]:
    """Return the typed request and all fields of the body. Raise `InvalidArgument`."""
    fields = decoded(body)
    request: VllmRequest = _converted(fields, VllmRequest)
    if not request.token_ids:
        raise InvalidArgument("token_ids must contain at least one token ID.", param="token_ids")
    _check_ids(request.token_ids, "token_ids")
    if request.stream_options is not None and not request.stream:
        raise InvalidArgument("stream_options is only allowed when stream is true.", param="stream_options")
    limit = request.sampling_params.max_tokens
    if limit is not None and limit < 1:
        raise InvalidArgument("sampling_params.max_tokens must be greater than 0.", param="sampling_params.max_tokens")
    return request, fields


def decode_sglang(body: bytes) -> tuple[SglangRequest, dict[str, Any]]:
    """Return the typed request and all fields of the body. Raise `InvalidArgument`."""
    fields = decoded(body)
    request: SglangRequest = _converted(fields, SglangRequest)
    if not request.input_ids:
        raise InvalidArgument("input_ids must contain at least one token ID.", param="input_ids")
    _check_ids(request.input_ids, "input_ids")
    return request, fields


def decoded(body: bytes) -> dict[str, Any]:
    """Decode a JSON object. Raise `InvalidArgument`."""
    found = decode_in_parts(body, _decoded_at_once)
    return _decoded_at_once(body) if found is None else found


def _decoded_at_once(body: bytes) -> dict[str, Any]:
    try:
        fields = json_decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{MALFORMED}{error}") from None
    except RecursionError:
        raise InvalidArgument(f"{MALFORMED}it is nested too deeply") from None
    if not isinstance(fields, dict):
        raise InvalidArgument(f"{MALFORMED}expected an object")
    return fields


def _converted(fields: dict[str, Any], kind: Any) -> Any:
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        fail(str(error), "")


def _check_ids(ids: list[int], param: str) -> None:
    if not 0 <= min(ids) <= max(ids) < 1 << 32:
        raise InvalidArgument(f"{MALFORMED}{param}: expected token ids", param=param)


def vllm_worker_request(request: VllmRequest, fields: dict[str, Any], request_id: str) -> PreprocessedRequest:
    """Return the worker's request for a vLLM request."""
    params = request.sampling_params
    carried = {name: value for name, value in fields.items() if name != "token_ids"}
    carried |= {"request_id": request.request_id or request_id, "stream": False, "priority": request.priority}
    extra: dict[str, Any] = {VLLM_EXTRA: carried}
    sampling: dict[str, Any] = {}
    if params.logit_bias:
        sampling["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
    if params.allowed_token_ids is not None:
        sampling["allowed_token_ids"] = params.allowed_token_ids
    if sampling:
        extra["sampling_options"] = sampling
    if request.kv_transfer_params is not None:
        extra["kv_transfer_params"] = request.kv_transfer_params
    return PreprocessedRequest(
        model=request.model or "",
        token_ids=request.token_ids,
        stop_conditions=StopConditions(
            max_tokens=params.max_tokens,
            stop=[params.stop] if isinstance(params.stop, str) else params.stop,
            stop_token_ids=params.stop_token_ids,
            min_tokens=params.min_tokens,
            ignore_eos=params.ignore_eos,
        ),
        sampling_options=SamplingOptions(
            n=params.n or 1,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=params.seed,
            include_stop_str_in_output=params.include_stop_str_in_output,
            guided_decoding=_guided(params.structured_outputs),
        ),
        output_options=OutputOptions(
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            skip_special_tokens=params.skip_special_tokens,
        ),
        routing=_routing(params.max_tokens, request.cache_salt, -request.priority),
        extra_args=extra,
    )


def _guided(constraint: VllmStructuredOutputs | None) -> GuidedDecoding | None:
    """Return the constraint in the form that all engines read."""
    if constraint is None:
        return None
    return GuidedDecoding(
        json=constraint.json,
        regex=constraint.regex,
        choice=constraint.choice,
        grammar=constraint.grammar,
        structural_tag=constraint.structural_tag,
        whitespace_pattern=constraint.whitespace_pattern,
    )


def sglang_worker_request(request: SglangRequest, fields: dict[str, Any], request_id: str) -> PreprocessedRequest:
    """Return the worker's request for an SGLang request."""
    params = request.sampling_params or SglangSampling()
    carried = {name: value for name, value in fields.items() if name != "input_ids"}
    carried |= {
        "sampling_params": fields.get("sampling_params"),
        "rid": request.rid or request_id,
        "stream": True,
    }
    return PreprocessedRequest(
        model=request.model or "",
        token_ids=request.input_ids,
        stop_conditions=StopConditions(
            max_tokens=params.max_new_tokens,
            stop=[params.stop] if isinstance(params.stop, str) else params.stop,
            stop_token_ids=params.stop_token_ids,
            min_tokens=params.min_new_tokens,
            ignore_eos=params.ignore_eos,
        ),
        sampling_options=SamplingOptions(
            n=params.n or 1,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
        ),
        output_options=OutputOptions(
            logprobs=0 if request.return_logprob else None,
            skip_special_tokens=params.skip_special_tokens,
            return_tokens_as_token_ids=True,
        ),
        routing=_routing(params.max_new_tokens, request.cache_salt, request.priority or 0),
        extra_args={SGLANG_EXTRA: carried},
    )


def _routing(max_tokens: int | None, cache_salt: str | None, priority: int) -> Routing:
    return Routing(
        expected_output_tokens=max_tokens,
        cache_salt=cache_salt,
        priority_jump=float(max(priority, 0)),
        priority=priority,
    )
