"""Convert: requests into SGLang's format, and SGLang's outputs into this project's. Pure.

Requests are mappings: the arguments of `Engine.async_generate`, which include those of its `SamplingParams`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from dynamo.backend.request_fields import (
    check_prompt,
    common_sampling,
    ends_of,
    hidden_ends_of,
    json_text,
    own_options,
    rank_of,
    token_biases,
)
from dynamo.core.errors import DynamoException, EngineShutdown, InvalidArgument, Unknown
from dynamo.protocols.engine import (
    CompletionUsage,
    EngineOutput,
    GuidedDecoding,
    PreprocessedRequest,
    PromptTokensDetails,
    TopLogprob,
)

NEITHER = ("allowed_token_ids", "bad_words")
"""Options of other engines that SGLang does not support."""
BAD_REQUEST, SERVER_ERROR = 400, 500


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangLimits:
    """Limits of the engine."""

    context_length: int
    ranks: int = 1
    first_rank: int = 0
    has_grammars: bool = True
    """Whether it was started with its tokenizer, for which grammars are compiled."""
    has_priorities: bool = False
    """Whether the scheduler supports priorities; SGLang rejects them otherwise."""
    is_low_first: bool = False
    """Whether low priorities are scheduled first."""


def to_arguments(request: PreprocessedRequest, limits: SglangLimits) -> dict[str, Any]:
    """Return the arguments of `Engine.async_generate`. Raise `InvalidArgument` that names the field."""
    check_prompt(request, limits.context_length)
    routing, output = request.routing, request.output_options
    arguments: dict[str, Any] = {
        "input_ids": request.token_ids,
        "sampling_params": sampling_of(request, limits),
        "stream": True,
    }
    if output.logprobs is not None or output.prompt_logprobs is not None:
        arguments["return_logprob"] = True
        arguments["top_logprobs_num"] = max(output.logprobs or 0, output.prompt_logprobs or 0)
        arguments["logprob_start_len"] = -1 if output.prompt_logprobs is None else 0
    if request.require_reasoning is True:
        arguments["require_reasoning"] = True
    if routing is None:
        return arguments
    if routing.cache_salt:
        arguments["cache_salt"] = routing.cache_salt
    if routing.lora_name:
        arguments["lora_path"] = routing.lora_name
    if routing.priority is not None and limits.has_priorities:
        arguments["priority"] = -routing.priority if limits.is_low_first else routing.priority
    rank = rank_of(routing.dp_rank, limits.ranks, limits.first_rank)
    if rank is not None:
        arguments["routed_dp_rank"] = rank
    return arguments


def sampling_of(request: PreprocessedRequest, limits: SglangLimits) -> dict[str, Any]:
    """Return the arguments of `SamplingParams`. The frontend handles text: stop strings are not passed."""
    options, stop = request.sampling_options, request.stop_conditions
    if options.use_beam_search:
        raise InvalidArgument("use_beam_search is not supported by SGLang", param="use_beam_search")
    if stop.max_thinking_tokens is not None:
        raise InvalidArgument("max_thinking_tokens is not supported by SGLang", param="max_thinking_tokens")
    own = own_options(request)
    for name in NEITHER:
        if own.get(name) is not None:
            raise InvalidArgument(f"{name} is not supported by SGLang", param=name)
    max_tokens = limits.context_length - len(request.token_ids)
    given = {
        **common_sampling(options),
        "sampling_seed": options.seed,
        "min_new_tokens": stop.min_tokens,
        "ignore_eos": stop.ignore_eos,
    }
    sampling: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    sampling["max_new_tokens"] = max_tokens if stop.max_tokens is None else min(stop.max_tokens, max_tokens)
    if "min_new_tokens" in sampling:
        sampling["min_new_tokens"] = min(sampling["min_new_tokens"], sampling["max_new_tokens"])
    if (biases := own.get("logit_bias")) is not None:
        sampling["logit_bias"] = {str(token): bias for token, bias in token_biases(biases).items()}
    if ends := ends_of(request):
        sampling["stop_token_ids"] = ends
    sampling["skip_special_tokens"] = False
    return sampling | guided_of(options.guided_decoding, has_grammars=limits.has_grammars)


def guided_of(guided: GuidedDecoding | None, *, has_grammars: bool) -> dict[str, Any]:
    """Return the output constraint as fields of `SamplingParams`. Raise `InvalidArgument`."""
    if guided is None:
        return {}
    if guided.whitespace_pattern is not None:
        raise InvalidArgument(
            "whitespace_pattern is not supported per request: set SGLang's --constrained-json-whitespace-pattern",
            param="guided_whitespace_pattern",
        )
    regex = guided.regex
    if guided.choice:
        regex = "(" + "|".join(re.escape(one) for one in guided.choice) + ")"
    given = {
        "json_schema": json_text(guided.json),
        "regex": regex,
        "ebnf": guided.grammar,
        "structural_tag": json_text(guided.structural_tag),
    }
    found = {name: value for name, value in given.items() if value is not None}
    if found and not has_grammars:
        raise InvalidArgument(
            "grammars require the engine's tokenizer, but this worker was started with --skip-tokenizer-init",
            param="response_format",
        )
    return found


class SglangOutput:
    """Output state of one request: the tokens sent so far, and the pieces still to be sent."""

    __slots__ = ("_cached_tokens", "_hidden", "_logprobs", "_prompt_logprobs", "_prompt_tokens", "_sent", "unfinished")

    def __init__(self, request: PreprocessedRequest) -> None:
        self._prompt_tokens = len(request.token_ids)
        self._hidden = hidden_ends_of(request)
        self._logprobs = request.output_options.logprobs
        self._prompt_logprobs: list[Any] | None = None if request.output_options.prompt_logprobs is None else []
        self._cached_tokens = 0
        self._sent = 0
        self.unfinished = request.sampling_options.n or 1

    def take(self, chunk: Mapping[str, Any]) -> EngineOutput:
        """Return the new output in a chunk. Raise an error if SGLang aborted the request."""
        meta = chunk["meta_info"]
        reason = meta.get("finish_reason")
        if reason is not None and reason["type"] == "abort":
            raise given_up(reason)
        if meta.get("cached_tokens"):
            self._cached_tokens = meta["cached_tokens"]
        tokens = list(chunk["output_ids"])
        self._sent += len(tokens)
        piece = EngineOutput(tokens, chunk.get("index", 0))
        if self._logprobs is not None:
            self._put_logprobs(piece, meta)
        if self._prompt_logprobs == [] and meta.get("input_token_logprobs"):
            tops = meta.get("input_top_logprobs") or [None] * len(meta["input_token_logprobs"])
            pairs = zip(meta["input_token_logprobs"], tops, strict=False)
            self._prompt_logprobs = [prompt_likelihoods(own, top) for own, top in pairs]
        if reason is not None:
            self._end(piece, reason)
        return piece

    def usage(self) -> CompletionUsage:
        """The token counts so far."""
        details = PromptTokensDetails(cached_tokens=self._cached_tokens)
        return CompletionUsage(self._prompt_tokens, self._sent, self._prompt_tokens + self._sent, details)

    def _put_logprobs(self, piece: EngineOutput, meta: Mapping[str, Any]) -> None:
        rows = meta.get("output_token_logprobs") or []
        if not rows:
            return
        tops = meta.get("output_top_logprobs") or [None] * len(rows)
        piece.log_probs = [row[0] for row in rows]
        piece.top_logprobs = [alternatives(row, top, self._logprobs or 0) for row, top in zip(rows, tops, strict=False)]

    def _end(self, piece: EngineOutput, reason: Mapping[str, Any]) -> None:
        """Complete the last piece of a choice."""
        self.unfinished -= 1
        matched = reason.get("matched")
        piece.finish_reason = "length" if reason["type"] == "length" else "stop"
        if piece.finish_reason == "stop" and matched in self._hidden:
            piece.finish_reason = "eos"
        elif piece.finish_reason == "stop":
            piece.stop_reason = matched
        if self.unfinished <= 0:
            piece.completion_usage = self.usage()
        if self._prompt_logprobs:
            piece.engine_data = {"prompt_logprobs": self._prompt_logprobs}


def given_up(reason: Mapping[str, Any]) -> DynamoException:
    """Return the error of an unfinished response: its cause, and whether another worker may complete it."""
    status, message = reason.get("status_code"), str(reason.get("message") or "the engine dropped the request")
    if status is not None and BAD_REQUEST <= status < SERVER_ERROR:
        return InvalidArgument(message)
    if status == SERVER_ERROR:
        return Unknown(message)
    return EngineShutdown(message)


def alternatives(row: Sequence[Any], tops: Sequence[Sequence[Any]] | None, count: int) -> list[TopLogprob]:
    """Return the top tokens of a position in descending order; the token itself if no alternatives were requested."""
    if not count or not tops:
        return [TopLogprob(1, row[1], logprob=row[0])]
    return [TopLogprob(rank, top[1], logprob=top[0]) for rank, top in enumerate(tops[:count], 1)]


def prompt_likelihoods(own: Sequence[Any], tops: Sequence[Sequence[Any]] | None) -> dict[str, dict[str, Any]] | None:
    """Return the alternatives of a prompt token; None for the first token."""
    if own[0] is None:
        return None
    found = {str(top[1]): {"logprob": top[0], "rank": rank} for rank, top in enumerate(tops or (), 1)}
    found.setdefault(str(own[1]), {"logprob": own[0], "rank": None})
    return found


def refuse_media_options(request: PreprocessedRequest) -> None:
    """Raise `InvalidArgument` for media options that SGLang supports for a whole server only."""
    for name in ("mm_processor_kwargs", "media_io_kwargs"):
        if getattr(request, name) not in (UNSET, None, {}):
            raise InvalidArgument(f"{name} of a request is not supported by SGLang's engine", param=name)


def has_media(request: PreprocessedRequest) -> bool:
    """Return whether the prompt contains media."""
    return request.multi_modal_data is not UNSET and bool(request.multi_modal_data)
