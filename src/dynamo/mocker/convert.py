"""Convert: requests into simulation inputs, and finished sequences into final outputs."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo.core.codec import UNREADABLE
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.mocker.config import MockerConfig
from dynamo.mocker.simulation.sequence import SimulatedSequence
from dynamo.mocker.utils.kv_cache import kv_bytes, text_model
from dynamo.model_card.card import ModelFiles, architectural_context_length, read_bytes, read_json
from dynamo.protocols.engine import CompletionUsage, EngineOutput, PreprocessedRequest, PromptTokensDetails
from dynamo.text.multimodal.routing_hashes import tokens_of
from dynamo.text.tokenizer.tiktoken_model import is_tiktoken, tokenizer_json
from dynamo.tokens.hashing import SEED, seed_of

REPLAY_ANNOTATION = "output_replay_id:"
CONTEXT_LENGTH = 131_072  # Default if neither flag nor model configuration sets one.
KV_BYTES_PER_TOKEN = 131_072  # Default: keys and values of 32 layers, 8 heads of 128 values, two bytes each.


class _AddedToken(msgspec.Struct):
    id: int


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[Any]


class _Tokenizer(msgspec.Struct):
    model: _Vocabulary
    added_tokens: list[_AddedToken] = []


TOKEN_ID_MAX = (1 << 32) - 1
"""Largest token id in a prompt. Ids beyond the vocabulary are accepted as by the released mocker, which does not look them up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Properties of a model that the mocker needs although it does not run the model."""

    path: str
    name: str
    answer_vocab_size: int
    """Exclusive upper bound of generated token ids: the ids for which the tokenizer has a text."""
    eos_token_ids: frozenset[int]
    context_length: int
    kv_bytes_per_token: int = KV_BYTES_PER_TOKEN
    """Bytes of the keys and values of one token."""

    @classmethod
    def read(cls, path: str, config: MockerConfig) -> "ModelFacts":
        """Read a model's directory. Raise `ConfigError` with the missing or invalid file."""
        files = ModelFiles.from_dir(path)
        model = read_json(files.config)
        generation = read_json(files.generation_config) if files.generation_config else {}
        known = tokenizer_size(files)
        vocab_size = _stated(model, "vocab_size") or known
        eos = _ids(generation.get("eos_token_id")) or _ids(_stated(model, "eos_token_id"))
        capacity = config.num_gpu_blocks * config.block_tokens
        length = config.max_model_len or architectural_context_length(model) or CONTEXT_LENGTH
        return cls(
            path=path,
            name=config.model_name or default_name(config.model_path or path),
            answer_vocab_size=min(vocab_size, known),
            eos_token_ids=eos,
            context_length=min(length, capacity),
            kv_bytes_per_token=config.kv_bytes_per_token
            or kv_bytes(text_model(model) or {}, config.kv_cache_dtype)
            or KV_BYTES_PER_TOKEN,
        )


@dataclass(slots=True)
class SimulationInput:
    """A request in the form that the simulation takes."""

    prompt: list[int]
    max_tokens: int
    hash_seed: int
    dp_rank: int | None
    script: dict[int, int] | None = None
    """Tokens that replace random ones, by position in the answer."""


def read_request(request: PreprocessedRequest, facts: ModelFacts, data_parallel_size: int) -> SimulationInput:
    """Validate and convert a request. Raise `InvalidArgument` for requests that the mocker cannot serve."""
    prompt, max_tokens = request.token_ids, request.stop_conditions.max_tokens
    if not prompt:
        raise InvalidArgument("Invalid request: the prompt has no tokens")
    if max(prompt) > TOKEN_ID_MAX or min(prompt) < 0:
        wrong = next(token for token in prompt if not 0 <= token <= TOKEN_ID_MAX)
        raise InvalidArgument(f"Invalid request: prompt token id {wrong}: must be from 0 to {TOKEN_ID_MAX}")
    prompt = tokens_of(request)
    if max_tokens is None:
        raise InvalidArgument("`max_output_tokens` (or `max_tokens`) is required by the mocker worker")
    if max_tokens < 1:
        raise InvalidArgument(f"Invalid request: max_tokens is {max_tokens}, expected 1 or more")
    if len(prompt) >= facts.context_length:
        raise InvalidArgument(
            f"Invalid request: the prompt has {len(prompt)} tokens and no answer fits into the "
            f"context length of {facts.context_length}"
        )
    if (request.sampling_options.n or 1) > 1:
        raise InvalidArgument(f"Invalid request: n is {request.sampling_options.n}; the mocker answers one choice")
    if request.output_options.prompt_logprobs is not None:
        raise InvalidArgument(
            "prompt_logprobs (which echo with logprobs needs) is not supported by the mocker: it has no model",
            param="prompt_logprobs",
        )
    routing, rank, seed = request.routing, None, SEED
    if routing is not None:
        rank = routing.dp_rank
        seed = seed_of(routing.lora_name, routing.cache_salt)
    if rank is not None and not 0 <= rank < data_parallel_size:
        raise InvalidArgument(f"Invalid request: dp_rank {rank}, this worker has {data_parallel_size}")
    return SimulationInput(prompt, min(max_tokens, facts.context_length - len(prompt)), seed, rank)


def replay_id(request: PreprocessedRequest) -> str | None:
    """Return the id of the recorded answer that a request's annotation names."""
    found = [one for one in request.annotations if one.startswith(REPLAY_ANNOTATION)]
    return found[0].removeprefix(REPLAY_ANNOTATION) if found else None


def usage_of(sequence: SimulatedSequence[Any]) -> CompletionUsage:
    """Return the token usage of a finished sequence."""
    prompt_tokens = len(sequence.prompt)
    return CompletionUsage(
        prompt_tokens=prompt_tokens,
        completion_tokens=sequence.max_tokens,
        total_tokens=prompt_tokens + sequence.max_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sequence.cached_tokens),
    )


def last_output(sequence: SimulatedSequence[Any]) -> EngineOutput:
    """Return the output of the last token, with the usage."""
    return EngineOutput([sequence.last_token], 0, finish_reason="length", completion_usage=usage_of(sequence))


def default_name(model_path: str) -> str:
    """Return the default served model name: a hub id unchanged, or the last part of a directory path."""
    return os.path.basename(os.path.abspath(model_path)) if os.path.isdir(model_path) else model_path


def tokenizer_size(files: ModelFiles) -> int:
    """Return one more than the highest id of a model's tokenizer. Raise `ConfigError` with the path."""
    path = files.tokenizer
    data = tokenizer_json(files) if is_tiktoken(path) else read_bytes(path)
    try:
        tokenizer = msgspec.json.decode(data, type=_Tokenizer)
    except UNREADABLE as error:
        raise ConfigError(f"{path}: not a tokenizer ({error})") from None
    vocab = tokenizer.model.vocab
    highest = max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab) - 1
    highest = max([highest, *(token.id for token in tokenizer.added_tokens)])
    if highest < 0:
        raise ConfigError(f"{path}: no tokens found")
    return highest + 1


def _stated(model: Mapping[str, Any], key: str) -> Any:
    """Return a value of a config.json, or of its nested text model."""
    text = model.get("text_config")
    return model.get(key) or (text.get(key) if isinstance(text, dict) else None)


def _ids(value: Any) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(token for token in values if isinstance(token, int))
