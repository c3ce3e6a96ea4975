"""Convert: requests into TensorRT-LLM's format, and its outputs into this project's. Pure.

Arguments of TensorRT-LLM's classes are represented as mappings, so that this module does not need it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo.backend.request_fields import (
    check_prompt,
    common_sampling,
    ends_of,
    hidden_ends_of,
    json_text,
    own_options,
    rank_of,
)
from dynamo.core.errors import DynamoException, EngineShutdown, InvalidArgument, ResponseTimeout
from dynamo.protocols.engine import (
    CompletionUsage,
    EngineOutput,
    GuidedDecoding,
    PreprocessedRequest,
    PromptTokensDetails,
    TopLogprob,
)

NO_END = -1
"""End token id of a request without an end token."""
NEITHER = ("logit_bias", "allowed_token_ids", "bad_words")
"""Options of other engines that TensorRT-LLM does not support, or requires as a tensor over the whole vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmLimits:
    """Limits of the engine."""

    context_length: int
    ranks: int = 1
    has_grammars: bool = False
    """Whether it was started with a guided decoding backend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmArguments:
    """A request in TensorRT-LLM's format."""

    tokens: Sequence[int]
    sampling: Mapping[str, Any]
    """Arguments of `SamplingParams` without `guided_decoding`."""
    guided: Mapping[str, Any] | None
    """Arguments of `GuidedDecodingParams`."""
    lora_name: str | None
    cache_salt: str | None
    rank: int | None
    """The rank that must serve the request; None: any rank."""


def to_trtllm(request: PreprocessedRequest, limits: TrtllmLimits) -> TrtllmArguments:
    """Return the request in TensorRT-LLM's format. Raise `InvalidArgument` that names the field."""
    check_prompt(request, limits.context_length)
    if request.multi_modal_data:
        raise InvalidArgument("media are not supported by TensorRT-LLM workers", param="messages")
    routing = request.routing
    return TrtllmArguments(
        tokens=request.token_ids,
        sampling=sampling_of(request, limits),
        guided=guided_of(request.sampling_options.guided_decoding, has_grammars=limits.has_grammars),
        lora_name=routing.lora_name if routing is not None else None,
        cache_salt=(routing.cache_salt or None) if routing is not None else None,
        rank=rank_of(routing.dp_rank if routing is not None else None, limits.ranks, 0),
    )


def sampling_of(request: PreprocessedRequest, limits: TrtllmLimits) -> dict[str, Any]:
    """Return the arguments of `SamplingParams`. The frontend handles text: nothing is detokenized here."""
    options, stop, output = request.sampling_options, request.stop_conditions, request.output_options
    if stop.max_thinking_tokens is not None:
        raise InvalidArgument("max_thinking_tokens is not supported by TensorRT-LLM", param="max_thinking_tokens")
    own = own_options(request)
    for name in NEITHER:
        if own.get(name) is not None:
            raise InvalidArgument(f"{name} is not supported by TensorRT-LLM", param=name)
    max_tokens = limits.context_length - len(request.token_ids)
    given = {
        **common_sampling(options),
        "best_of": options.best_of,
        "top_k": None if options.top_k == -1 else options.top_k,
        "seed": options.seed,
        "use_beam_search": options.use_beam_search,
        "length_penalty": options.length_penalty,
        "min_tokens": stop.min_tokens,
        "ignore_eos": stop.ignore_eos,
        "logprobs": None if output.logprobs is None else max(1, output.logprobs),
        "prompt_logprobs": output.prompt_logprobs,
    }
    sampling: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    sampling["max_tokens"] = max_tokens if stop.max_tokens is None else min(stop.max_tokens, max_tokens)
    if "min_tokens" in sampling:
        sampling["min_tokens"] = min(sampling["min_tokens"], sampling["max_tokens"])
    ends = ends_of(request)
    sampling["end_id"] = NO_END
    if ends:
        sampling["stop_token_ids"] = ends
        sampling["include_stop_str_in_output"] = True  # The frontend removes those that must not be shown.
        if not stop.ignore_eos and request.eos_token_ids:
            sampling["end_id"] = request.eos_token_ids[0]
    sampling["detokenize"] = False
    return sampling


def guided_of(guided: GuidedDecoding | None, *, has_grammars: bool) -> dict[str, Any] | None:
    """Return the arguments of `GuidedDecodingParams`. Raise `InvalidArgument`."""
    if guided is None:
        return None
    if guided.whitespace_pattern is not None:
        raise InvalidArgument(
            "guided_whitespace_pattern is not supported by TensorRT-LLM's engine", param="guided_whitespace_pattern"
        )
    regex = guided.regex
    if guided.choice:
        regex = "(" + "|".join(re.escape(one) for one in guided.choice) + ")"
    given = {
        "json": guided.json,
        "regex": regex,
        "grammar": guided.grammar,
        "structural_tag": json_text(guided.structural_tag),
    }
    found = {name: value for name, value in given.items() if value is not None}
    if found and not has_grammars:
        raise InvalidArgument("this worker was started without --guided-decoding-backend", param="response_format")
    return found or None


class TrtllmOutput:
    """Output state of one request: the tokens sent so far, and the pieces still to be sent.

    Outputs of TensorRT-LLM contain all tokens of a choice; new tokens are found by counting.
    """

    __slots__ = ("_cached_tokens", "_ended", "_hidden", "_logprobs", "_prompt_tokens", "_sent", "unfinished")

    def __init__(self, request: PreprocessedRequest) -> None:
        self._prompt_tokens = len(request.token_ids)
        self._hidden = hidden_ends_of(request)
        self._logprobs = request.output_options.logprobs
        self._cached_tokens = 0
        self._sent: dict[int, int] = {}
        """Number of tokens sent, by choice."""
        self._ended: set[int] = set()
        self.unfinished = request.sampling_options.n or 1

    def take(self, output: Any) -> list[EngineOutput]:
        """Return the pieces of a `RequestOutput`. Raise an error if TensorRT-LLM aborted the request."""
        self._cached_tokens = getattr(output, "cached_tokens", None) or self._cached_tokens  # Set by newer releases.
        pieces = []
        for one in output.outputs:
            sent = self._sent.get(one.index, 0)
            if one.index in self._ended or (len(one.token_ids) <= sent and one.finish_reason is None):
                continue
            pieces.append(self._piece(one, sent))
        return pieces

    def usage(self) -> CompletionUsage:
        """The token counts so far."""
        sent = sum(self._sent.values())
        details = PromptTokensDetails(cached_tokens=self._cached_tokens)
        return CompletionUsage(self._prompt_tokens, sent, self._prompt_tokens + sent, details)

    def _piece(self, one: Any, sent: int) -> EngineOutput:
        if one.finish_reason in ("cancelled", "timeout"):
            raise given_up(one.finish_reason)
        tokens = list(one.token_ids[sent:])
        self._sent[one.index] = sent + len(tokens)
        piece = EngineOutput(tokens, one.index)
        if self._logprobs is not None and one.logprobs:
            rows = [row_of(step, token) for step, token in zip(one.logprobs[sent:], tokens, strict=False)]
            piece.log_probs = [own for own, _ in rows]
            piece.top_logprobs = [[top for top in tops if top.rank <= max(1, self._logprobs or 0)] for _, tops in rows]
            piece.cum_log_probs = one.cumulative_logprob
        if one.finish_reason is not None:
            self._end(piece, one)
        return piece

    def _end(self, piece: EngineOutput, one: Any) -> None:
        """Complete the last piece of a choice."""
        self._ended.add(one.index)
        self.unfinished -= 1
        last = one.token_ids[-1] if one.token_ids else None
        piece.finish_reason = one.finish_reason
        if one.finish_reason == "stop" and last in self._hidden:
            piece.finish_reason = "eos"
        elif one.finish_reason == "stop":
            piece.stop_reason = one.stop_reason
        if self.unfinished <= 0:
            piece.completion_usage = self.usage()
        if one.prompt_logprobs:
            piece.engine_data = {"prompt_logprobs": [prompt_likelihoods(step) for step in one.prompt_logprobs]}


def given_up(reason: str) -> DynamoException:
    """Return the error of an unfinished response."""
    if reason == "timeout":
        return ResponseTimeout("the engine's time limit for the request was exceeded")
    return EngineShutdown("the engine dropped the request")


def row_of(step: Any, token: int) -> tuple[float, list[TopLogprob]]:
    """Return the log-probability of a token, and its alternatives in descending order."""
    if not isinstance(step, Mapping):
        return float(step), [TopLogprob(1, token, logprob=float(step))]
    tops = [TopLogprob(one.rank or 0, token_id, logprob=one.logprob) for token_id, one in step.items()]
    tops.sort(key=lambda top: top.rank)
    return step[token].logprob, tops


def prompt_likelihoods(step: Any) -> dict[str, dict[str, Any]] | None:
    """Return the alternatives of a prompt token; None for the first token."""
    if not isinstance(step, Mapping):
        return None
    return {str(token): {"logprob": one.logprob, "rank": one.rank} for token, one in step.items()}
