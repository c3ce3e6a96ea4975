"""Conversion: turn an upstream request into a generation of this engine, or raise an error that names the field."""

import math
import os
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.cpu.adapter import Adapter
from dynamo.cpu.checkpoint import read_json
from dynamo.cpu.generation import ActiveGeneration, GeneratedChoice, PromptLogprobs, StopRules
from dynamo.cpu.sampler import History, Sampling
from dynamo.cpu.sequence import TokenSequence
from dynamo.protocols.engine import PreprocessedRequest, SamplingOptions, resumed_of
from dynamo.protocols.native import VLLM_EXTRA, VllmSampling
from dynamo.routing.kv_peers import HINT
from dynamo.runtime.request_plane.base import Reply
from dynamo.tokens.hashing import U64, seed_of

OWN_OPTIONS = frozenset(
    ("logit_bias", "allowed_token_ids", "detokenize", "output_kind", "spaces_between_special_tokens", "flat_logprobs")
)
"""Options without a protocol field that are supported, or that only affect text or in-process results."""
NATIVE_PARAMETERS = (
    frozenset(VllmSampling.__struct_fields__) | OWN_OPTIONS | {"skip_clone", "skip_reading_prefix_cache"}
)
"""Parameters of `/inference/v1/generate` that the frontend or this engine reads, or that only concern text."""
LOGPROBS_MAX = 100  # With more, the response would consist mostly of alternatives.


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Default sampling parameters of the model (generation_config.json)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
    """Token ids that end the output if the request does not list any."""

    @classmethod
    def read(cls, path: str) -> "Defaults":
        """Read the defaults from a model directory; the file is optional. Raise `ConfigError` if it is invalid."""
        file = os.path.join(path, "generation_config.json")
        if not os.path.exists(file):
            return cls()
        given = read_json(file)
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        try:
            values = {name: float(given[name]) for name in names if given.get(name) is not None}
        except (TypeError, ValueError):
            raise ConfigError(f"{file}: one of {', '.join(names)} is not a number") from None
        top_k = int(values.pop("top_k", 0))
        eos = given.get("eos_token_id")
        listed = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(isinstance(token, int) for token in listed):
            raise ConfigError(f"{file}: eos_token_id must be a token id or a list of them")
        return cls(top_k=top_k, eos_token_ids=tuple(listed), **values)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuLimits:
    """Limits of this engine."""

    vocab_size: int
    context_length: int
    block_tokens: int
    choices_max: int


def to_generation(
    request: PreprocessedRequest, reply: Reply, limits: CpuLimits, defaults: Defaults, adapter: Adapter | None = None
) -> ActiveGeneration:
    """Convert a request. Raise `InvalidArgument` for a request that this engine cannot serve."""
    _check_prompt(request.token_ids, limits)
    _refuse_unsupported(request)
    rules = _rules(request, limits, defaults)
    choices = request.sampling_options.n or 1
    if not 1 <= choices <= limits.choices_max:
        raise InvalidArgument(f"n is {choices}; the engine runs 1 to {limits.choices_max} choices", param="n")
    routing = request.routing
    hash_seed = seed_of(adapter.name if adapter else None, routing.cache_salt if routing else None)
    seed = request.sampling_options.seed
    seed = secrets.randbits(64) if seed is None else seed & U64
    generation = ActiveGeneration(reply, [])
    leader: TokenSequence | None = None
    for index in range(choices):
        sequence = TokenSequence(
            request.token_ids, limits.block_tokens, hash_seed=hash_seed, leader=leader, adapter=adapter
        )
        sequence.priority = min(100, max(0, (routing.priority or 0) if routing else 0))
        sequence.peer = _peer(request)
        sampling = _sampling(request, limits, defaults, seed, index)
        history = None
        if sampling.has_penalties:
            history = History.of(request.token_ids, limits.vocab_size, resumed_of(request).output_tokens)
        generation.choices.append(GeneratedChoice(index, sequence, sampling, rules, history))
        leader = leader or sequence
    generation.unfinished = choices
    scored = _alternatives("prompt_logprobs", request.output_options.prompt_logprobs)
    if scored is not None:
        first = generation.choices[0]
        first.prompt_logprobs = PromptLogprobs(scored)
        first.sequence.scored = 1
        first.sequence.peer = None  # Blocks computed by other workers have no logits.
    return generation


def _peer(request: PreprocessedRequest) -> tuple[str, int] | None:
    """Return the address and block count of a worker with more cached prefix, from the router's hint; None if invalid."""
    hint = request.extra_args.get(HINT) if isinstance(request.extra_args, dict) else None
    if not isinstance(hint, dict):
        return None
    address, blocks = hint.get("address"), hint.get("blocks")
    return (address, blocks) if isinstance(address, str) and isinstance(blocks, int) and blocks > 0 else None


def _check_prompt(tokens: list[int], limits: CpuLimits) -> None:
    if not tokens:
        raise InvalidArgument("the prompt is empty", param="prompt")
    if len(tokens) >= limits.context_length:
        raise InvalidArgument(
            f"the prompt has {len(tokens)} tokens; with at least one token of output it must fit into the model's "
            f"context of {limits.context_length}",
            param="prompt",
        )
    if not 0 <= min(tokens) <= max(tokens) < limits.vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < limits.vocab_size)
        raise InvalidArgument(
            f"the prompt has token {wrong}; the vocabulary ends at {limits.vocab_size - 1}", param="prompt"
        )


def _native(request: PreprocessedRequest) -> dict[str, Any] | None:
    """Return the body of a request of vLLM's native API, whose text no frontend reads; None for any other request."""
    extra = request.extra_args if isinstance(request.extra_args, dict) else {}
    body = extra.get(VLLM_EXTRA)
    return body if isinstance(body, dict) else None


def _own_options(request: PreprocessedRequest) -> dict[str, Any]:
    """Return the sampling options that the protocol has no field for."""
    extra = request.extra_args if isinstance(request.extra_args, dict) else {}
    options = extra.get("sampling_options")
    return options if isinstance(options, dict) else {}


def _is_set(value: Any) -> bool:
    """Return whether an option has a value other than its empty default."""
    return value is not None and value is not False and value not in ([], {}, "")


def _refuse_unsupported(request: PreprocessedRequest) -> None:
    _refuse_native(request)
    options, routing = request.sampling_options, request.routing
    refused = {
        "use_beam_search": bool(options.use_beam_search),
        "best_of": (options.best_of or 1) > (options.n or 1),
        "max_thinking_tokens": request.stop_conditions.max_thinking_tokens is not None,
        "dp_rank": bool(routing and routing.dp_rank),
    }
    refused |= {"length_penalty": options.length_penalty not in (None, 1.0)}
    refused |= {name: _is_set(value) for name, value in _own_options(request).items() if name not in OWN_OPTIONS}
    for name, is_requested in refused.items():
        if is_requested:
            raise InvalidArgument(f"{name} is not supported by the embedded engine", param=name)
    if request.multi_modal_data:
        kinds = ", ".join(request.multi_modal_data)
        raise InvalidArgument(
            f"{kinds} parts are not supported by the embedded engine: it reads text", param="messages"
        )


def _refuse_native(request: PreprocessedRequest) -> None:
    """Refuse parameters of a native request that only vLLM itself supports, instead of ignoring them."""
    native = _native(request)
    if native is None:
        return
    given = native.get("sampling_params") or {}
    if request.stop_conditions.stop:
        raise InvalidArgument(
            "sampling_params.stop is not supported by the embedded engine, which generates tokens without text; "
            "use stop_token_ids",
            param="sampling_params.stop",
        )
    for name, value in given.items():
        if name not in NATIVE_PARAMETERS and _is_set(value):
            raise InvalidArgument(
                f"sampling_params.{name[:80]} is not supported by the embedded engine",
                param=f"sampling_params.{name[:80]}",
            )
    for name in ("features", "kv_transfer_params"):
        if native.get(name):
            raise InvalidArgument(f"{name} is not supported by the embedded engine", param=name)


def _rules(request: PreprocessedRequest, limits: CpuLimits, defaults: Defaults) -> StopRules:
    stop = request.stop_conditions
    tokens_left = limits.context_length - len(request.token_ids)
    max_tokens = tokens_left if stop.max_tokens is None else min(stop.max_tokens, tokens_left)
    if max_tokens < 1:
        raise InvalidArgument(f"max_tokens is {stop.max_tokens}; expected 1 or more", param="max_tokens")
    min_tokens = stop.min_tokens or 0
    if min_tokens < 0:
        raise InvalidArgument(f"min_tokens is {min_tokens}; expected 0 or more", param="min_tokens")
    end_ids = set(stop.stop_token_ids_hidden or ())
    if not stop.ignore_eos:
        end_ids |= set(request.eos_token_ids if _native(request) is None else defaults.eos_token_ids)
    stop_ids = {*(stop.stop_token_ids or ()), *(stop.stop_token_ids_visible or ())}
    return StopRules(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        end_ids=frozenset(_within(end_ids, limits)),
        stop_ids=frozenset(_within(stop_ids, limits)),
    )


def _within(tokens: set[int], limits: CpuLimits) -> set[int]:
    """Return the tokens that are in the vocabulary; others are never generated."""
    return {token for token in tokens if 0 <= token < limits.vocab_size}


def _sampling(request: PreprocessedRequest, limits: CpuLimits, defaults: Defaults, seed: int, index: int) -> Sampling:
    options = request.sampling_options
    logprobs = _alternatives("logprobs", request.output_options.logprobs)
    return Sampling(
        seed=seed,
        index=index,
        temperature=_number(options, "temperature", defaults.temperature, low=0.0),
        top_p=_number(options, "top_p", defaults.top_p, low=0.0, high=1.0),
        top_k=max(0, defaults.top_k if options.top_k is None else options.top_k),
        min_p=_number(options, "min_p", defaults.min_p, low=0.0, high=1.0),
        repetition_penalty=_number(options, "repetition_penalty", defaults.repetition_penalty, low=1e-6),
        presence_penalty=_number(options, "presence_penalty", 0.0, low=-2.0),
        frequency_penalty=_number(options, "frequency_penalty", 0.0, low=-2.0),
        logit_bias=_logit_bias(request, limits),
        allowed=_allowed(request, limits),
        logprobs=logprobs,
    )


def _alternatives(name: str, count: int | None) -> int | None:
    """Return the number of alternatives requested. Raise `InvalidArgument` if it is out of range."""
    if count is not None and not 0 <= count <= LOGPROBS_MAX:
        raise InvalidArgument(f"{name} is {count}; expected 0 to {LOGPROBS_MAX}", param=name)
    return count


def _number(options: SamplingOptions, name: str, default: float, *, low: float, high: float = float("inf")) -> float:
    value = getattr(options, name)
    if value is None:
        return default
    if not low <= value <= high:
        raise InvalidArgument(f"{name} is {value}; expected {low:g} to {high:g}", param=name)
    return float(value)


def _allowed(request: PreprocessedRequest, limits: CpuLimits) -> npt.NDArray[np.bool_] | None:
    """Return a mask of the tokens in `allowed_token_ids`."""
    listed = _own_options(request).get("allowed_token_ids")
    if listed is None:
        return None
    name = "allowed_token_ids"
    if not isinstance(listed, list) or not all(isinstance(token, int) for token in listed):
        raise InvalidArgument(f"{name} must be a list of token ids", param=name)
    allowed = np.zeros(limits.vocab_size, np.bool_)
    allowed[[token for token in listed if 0 <= token < limits.vocab_size]] = True
    if not allowed.any():
        raise InvalidArgument(f"{name} lists no token of the vocabulary of {limits.vocab_size}", param=name)
    return allowed


def _logit_bias(request: PreprocessedRequest, limits: CpuLimits) -> tuple[tuple[int, float], ...]:
    given = _own_options(request).get("logit_bias") or {}
    try:
        bias = tuple((int(token), float(value)) for token, value in given.items())
    except (AttributeError, TypeError, ValueError):
        raise InvalidArgument("logit_bias must map token ids to numbers", param="logit_bias") from None
    for token, value in bias:
        if not math.isfinite(value):
            raise InvalidArgument(f"logit_bias of token {token} is {value}; expected a number", param="logit_bias")
        if not 0 <= token < limits.vocab_size:
            raise InvalidArgument(
                f"logit_bias names token {token}; the vocabulary ends at {limits.vocab_size - 1}", param="logit_bias"
            )
    return bias
