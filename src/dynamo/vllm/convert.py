"""Convert: requests into vLLM's format, and vLLM's outputs into this project's. Pure.

Arguments of vLLM's classes are represented as mappings, so that this module does not need vLLM.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import UNSET

from dynamo.backend.request_fields import (
    check_prompt,
    common_sampling,
    ends_of,
    hidden_ends_of,
    json_text,
    media_of,
    own_options,
    rank_of,
    thinking_budget,
    token_biases,
)
from dynamo.core.errors import InvalidArgument
from dynamo.protocols.engine import (
    CompletionUsage,
    EngineOutput,
    GuidedDecoding,
    PreprocessedRequest,
    PromptTokensDetails,
    TopLogprob,
)

EXTRAS = ("logit_bias", "allowed_token_ids", "bad_words")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmLimits:
    """Limits of the engine, and the model's default sampling options."""

    context_length: int
    ranks: int = 1
    first_rank: int = 0
    has_priorities: bool = False
    """Whether the scheduler supports priorities; vLLM rejects them otherwise."""
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmArguments:
    """A request in vLLM's format."""

    prompt: Mapping[str, Any]
    """The prompt as tokens; media and embeddings are added when they are decoded."""
    sampling: Mapping[str, Any]
    """Arguments of `SamplingParams` without `structured_outputs`."""
    guided: Mapping[str, Any] | None
    """Arguments of `StructuredOutputsParams`."""
    media: Mapping[str, Sequence[str]]
    """URLs by kind, in the order of the prompt."""
    media_io: Mapping[str, Mapping[str, Any]]
    """Decoding options by vLLM's name of the media kind."""
    lora_name: str | None
    priority: int
    rank: int | None
    """Rank of this worker, counted from 0; None: vLLM balances."""


def to_vllm(request: PreprocessedRequest, limits: VllmLimits) -> VllmArguments:
    """Return the request in vLLM's format. Raise `InvalidArgument` that names the field."""
    tokens = request.token_ids
    if request.prompt_embeds:
        if request.multi_modal_data:
            raise InvalidArgument("prompt_embeds and media are mutually exclusive", param="prompt_embeds")
    else:
        check_prompt(request, limits.context_length)
    if request.sampling_options.use_beam_search:
        raise InvalidArgument("use_beam_search is not supported by vLLM's engine", param="use_beam_search")
    routing = request.routing
    media = media_of(request)
    prompt: dict[str, Any] = {"prompt_token_ids": tokens} if media else {"type": "token", "prompt_token_ids": tokens}
    if request.prompt_embeds:
        prompt = {}
    if routing is not None and routing.cache_salt:
        prompt["cache_salt"] = routing.cache_salt
    if media and request.mm_processor_kwargs not in (UNSET, None):
        prompt["mm_processor_kwargs"] = request.mm_processor_kwargs
    return VllmArguments(
        prompt=prompt,
        sampling=sampling_of(request, limits),
        guided=guided_of(request.sampling_options.guided_decoding),
        media=media,
        media_io=media_io_of(request) if media else {},
        lora_name=routing.lora_name if routing is not None else None,
        priority=-(routing.priority or 0) if routing is not None and limits.has_priorities else 0,
        rank=rank_of(routing.dp_rank if routing is not None else None, limits.ranks, limits.first_rank),
    )


def media_io_of(request: PreprocessedRequest) -> dict[str, dict[str, Any]]:
    """Return `media_io_kwargs`. Raise `InvalidArgument` for anything but an object of objects."""
    given = request.media_io_kwargs
    if given in (UNSET, None):
        return {}
    if not isinstance(given, dict) or not all(isinstance(one, dict) for one in given.values()):
        raise InvalidArgument(
            'media_io_kwargs must be an object of objects, such as {"video": {"num_frames": 40}}',
            param="media_io_kwargs",
        )
    return given


def check_embeds(arguments: VllmArguments, length: int, limits: VllmLimits) -> VllmArguments:
    """Return the request for a prompt of `length` embeddings. Raise `InvalidArgument` if no output token fits."""
    max_tokens = limits.context_length - length
    if not length or max_tokens < 1:
        raise InvalidArgument(
            f"prompt_embeds has {length} positions; expected 1 to {limits.context_length - 1}, so that at least one token "
            "of output fits into the model's context",
            param="prompt_embeds",
        )
    sampling = {**arguments.sampling, "max_tokens": min(arguments.sampling["max_tokens"], max_tokens)}
    if "min_tokens" in sampling:
        sampling["min_tokens"] = min(sampling["min_tokens"], sampling["max_tokens"])
    return replace(arguments, sampling=sampling)


def sampling_of(request: PreprocessedRequest, limits: VllmLimits) -> dict[str, Any]:
    """Return the arguments of `SamplingParams`. The frontend handles text: nothing is detokenized here."""
    options, stop, output = request.sampling_options, request.stop_conditions, request.output_options
    max_tokens = limits.context_length - len(request.token_ids)
    requested_max = stop.max_tokens if stop.max_tokens is not None else limits.defaults.get("max_tokens")
    given = {
        **common_sampling(options),
        "seed": options.seed,
        "min_tokens": stop.min_tokens,
        "ignore_eos": stop.ignore_eos,
        "logprobs": output.logprobs,
        "prompt_logprobs": output.prompt_logprobs,
        "thinking_token_budget": thinking_budget(request),
    }
    own = own_options(request)
    given |= {name: own.get(name) for name in EXTRAS}
    sampling = {name: value for name, value in limits.defaults.items() if name != "max_tokens"}
    sampling |= {name: value for name, value in given.items() if value is not None}
    sampling["max_tokens"] = max_tokens if requested_max is None else min(requested_max, max_tokens)
    if "min_tokens" in sampling:
        sampling["min_tokens"] = min(sampling["min_tokens"], sampling["max_tokens"])
    if "logit_bias" in sampling:
        sampling["logit_bias"] = token_biases(sampling["logit_bias"])
    if ends := ends_of(request):
        sampling["stop_token_ids"] = ends
    sampling["detokenize"] = "bad_words" in sampling
    return sampling


def guided_of(guided: GuidedDecoding | None) -> dict[str, Any] | None:
    """Return the arguments of `StructuredOutputsParams`."""
    if guided is None:
        return None
    given: dict[str, Any] = {
        "json": guided.json,
        "regex": guided.regex,
        "choice": guided.choice,
        "grammar": guided.grammar,
        "structural_tag": json_text(guided.structural_tag),
        "whitespace_pattern": guided.whitespace_pattern,
    }
    return {name: value for name, value in given.items() if value is not None} or None


FINISH_REASONS = {"stop": "stop", "length": "length", "repetition": "stop"}
"""vLLM's finish reasons of complete responses."""


class VllmOutput:
    """Output state of one request: the tokens sent so far, and the pieces still to be sent."""

    __slots__ = ("_cached_tokens", "_hidden", "_logprobs", "_prompt_logprobs", "_prompt_tokens", "_sent", "unfinished")

    def __init__(self, request: PreprocessedRequest, prompt_tokens: int | None = None) -> None:
        """Set `prompt_tokens`, the length of a prompt that is not given as tokens."""
        self._prompt_tokens = len(request.token_ids) if prompt_tokens is None else prompt_tokens
        self._hidden = hidden_ends_of(request)
        self._logprobs = request.output_options.logprobs
        self._prompt_logprobs: list[Any] | None = None
        self._cached_tokens = 0
        self._sent = 0
        self.unfinished = request.sampling_options.n or 1

    def take(self, output: Any) -> list[EngineOutput]:
        """Return the pieces of a vLLM `RequestOutput`."""
        if output.num_cached_tokens:
            self._cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None and self._prompt_logprobs is None:
            self._prompt_logprobs = _prompt_logprobs(output.prompt_logprobs)
        return [self._piece(one) for one in output.outputs if one.token_ids or one.finish_reason is not None]

    def _piece(self, one: Any) -> EngineOutput:
        self._sent += len(one.token_ids)
        piece = EngineOutput(list(one.token_ids), one.index)
        if self._logprobs is not None and one.logprobs:
            rows = [_row(entry, token) for entry, token in zip(one.logprobs, one.token_ids, strict=False)]
            piece.log_probs = [own for own, _ in rows]
            piece.top_logprobs = [[top for top in tops if top.rank <= max(1, self._logprobs or 0)] for _, tops in rows]
            piece.cum_log_probs = one.cumulative_logprob
        if one.finish_reason is not None:
            self._end(piece, one)
        return piece

    def _end(self, piece: EngineOutput, one: Any) -> None:
        """Complete the last piece of a choice."""
        self.unfinished -= 1
        piece.finish_reason = FINISH_REASONS.get(one.finish_reason, one.finish_reason)
        if one.finish_reason == "stop" and (one.stop_reason is None or one.stop_reason in self._hidden):
            piece.finish_reason = "eos" if piece.token_ids and piece.token_ids[-1] in self._hidden else "stop"
        else:
            piece.stop_reason = one.stop_reason
        if self.unfinished <= 0:
            piece.completion_usage = self.usage()
        if self._prompt_logprobs is not None:
            piece.engine_data = {"prompt_logprobs": self._prompt_logprobs}

    def usage(self) -> CompletionUsage:
        """The token counts so far."""
        details = PromptTokensDetails(cached_tokens=self._cached_tokens)
        return CompletionUsage(self._prompt_tokens, self._sent, self._prompt_tokens + self._sent, details)


def _row(entry: Mapping[int, Any], token: int) -> tuple[float, list[TopLogprob]]:
    """Return the log-probability of a token, and its alternatives in descending order."""
    tops = [TopLogprob(one.rank or 0, token_id, logprob=one.logprob) for token_id, one in entry.items()]
    tops.sort(key=lambda top: top.rank)
    return entry[token].logprob, tops


def _prompt_logprobs(entries: Sequence[Mapping[int, Any] | None]) -> list[Any]:
    """Return prompt log-probabilities in vLLM's server format: null for the first token, then the alternatives."""
    return [None if entry is None else _likelihoods(entry) for entry in entries]


def _likelihoods(entry: Mapping[int, Any]) -> dict[str, dict[str, Any]]:
    return {str(token): {"logprob": one.logprob, "rank": one.rank} for token, one in entry.items()}
