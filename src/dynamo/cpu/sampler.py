"""Sampler: choose the next token from the logits. Pure: randomness depends only on the seed and the position."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

_NEVER = np.float32(-np.inf)
GREEDY_BELOW = 1e-5  # Lower temperatures overflow float32; the limit is the likeliest token.


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of one choice; the defaults sample from the model's own distribution."""

    seed: int = 0
    index: int = 0
    """Index of the choice: choices of one request draw differently from the same seed."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed: npt.NDArray[np.bool_] | None = field(default=None, compare=False)
    """Mask of the tokens in the caller's `allowed_token_ids`; None for all."""
    logprobs: int | None = None
    """Number of alternatives to report for each token."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def is_plain(self) -> bool:
        """Return whether sampling is greedy without any modification or report."""
        is_adjusted = self.logprobs is not None or self.logit_bias or self.has_penalties or self.allowed is not None
        return self.is_greedy and not is_adjusted

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(slots=True)
class History:
    """Token counts of a sequence; kept only for choices with penalties."""

    counts: npt.NDArray[np.int32]
    """Occurrences in the output."""
    is_seen: npt.NDArray[np.bool_]
    """Whether the token occurs in the prompt or the output."""

    @classmethod
    def of(cls, prompt: Sequence[int], vocab_size: int, output_tokens: int = 0) -> "History":
        """Return the history of a prompt whose last `output_tokens` tokens count as output."""
        is_seen = np.zeros(vocab_size, np.bool_)
        is_seen[list(prompt)] = True
        counts = np.zeros(vocab_size, np.int32)
        for token in prompt[len(prompt) - output_tokens :] if output_tokens > 0 else ():
            counts[token] += 1
        return cls(counts, is_seen)

    def add(self, token: int) -> None:
        self.counts[token] += 1
        self.is_seen[token] = True


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sampled token with its requested log-probabilities."""

    token: int
    logprob: float | None = None
    alternatives: list[tuple[int, float]] = field(default_factory=list)
    """Pairs of token and log-probability, the likeliest first."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probability of one prompt token, given the tokens before it."""

    token: int
    logprob: float
    rank: int
    """Rank among all tokens of the vocabulary; 1 is the likeliest."""
    alternatives: list[tuple[int, float]]
    """Token and log-probability of the likeliest tokens, the likeliest first."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Input of the sampler for one sequence."""

    sampling: Sampling
    position: int
    """Position of the token to be sampled, counted from the start of the prompt."""
    history: History | None = None
    forbidden: Sequence[int] = ()
    """Tokens that must not be sampled at this position."""
    allowed: npt.NDArray[np.bool_] | None = None
    """Mask of allowed tokens, at least one; None for all."""


def greedy(logits: F32) -> list[int]:
    """Return the likeliest token of each row."""
    tokens: list[int] = logits.argmax(axis=-1).tolist()
    return tokens


def sample(logits: F32, draw: Draw) -> Sampled:
    """Sample from one row of logits. Raise `FloatingPointError` if they are not finite."""
    sampling = draw.sampling
    if not np.isfinite(logits.max()):
        raise FloatingPointError("the model's logits are not finite")
    adjusted = _adjusted(logits, draw)
    if sampling.is_greedy:
        token = int(adjusted.argmax())
    else:
        weights = _weights(adjusted, sampling)
        token = _pick(weights, uniform(sampling.seed, sampling.index, draw.position))
    if sampling.logprobs is None:
        return Sampled(token)
    logprobs = log_softmax(logits)
    return Sampled(token, float(logprobs[token]), _likeliest(logprobs, sampling.logprobs))


def score(logits: F32, tokens: Sequence[int], count: int) -> list[Scored]:
    """Return the score of each token given its row of logits, with the `count` likeliest tokens of that row.

    Raises `FloatingPointError` if the logits are not finite.
    """
    found: list[Scored] = []
    for row, token in zip(logits, tokens, strict=True):
        if not np.isfinite(row.max()):
            raise FloatingPointError("the model's logits are not finite")
        logprobs = log_softmax(row)
        own = float(logprobs[token])
        rank = 1 + int((logprobs > own).sum())
        found.append(Scored(token, own, rank, _likeliest(logprobs, count)))
    return found


def uniform(seed: int, index: int, position: int) -> float:
    """Return a number in [0, 1) that depends only on the arguments, so that a seed is reproducible under any load."""
    return (xxh3_64_intdigest(struct.pack("<QQQ", seed, index, position)) >> 11) * 2.0**-53


def log_softmax(logits: F32) -> F64:
    """Return log-probabilities of the model's own distribution, before any sampling parameter is applied."""
    shifted = logits.astype(np.float64) - float(logits.max())
    result: F64 = shifted - np.log(np.exp(shifted).sum())
    return result


def _adjusted(logits: F32, draw: Draw) -> F32:
    sampling = draw.sampling
    if not (sampling.logit_bias or draw.forbidden or draw.history):
        return logits if draw.allowed is None else np.where(draw.allowed, logits, _NEVER)
    adjusted = logits.copy()
    for token, bias in sampling.logit_bias:
        adjusted[token] += bias
    if draw.history is not None:
        _penalize(adjusted, sampling, draw.history)
    if draw.forbidden:
        adjusted[list(draw.forbidden)] = -np.inf
    if draw.allowed is not None:
        adjusted[~draw.allowed] = -np.inf
    return adjusted


def _penalize(logits: F32, sampling: Sampling, history: History) -> None:
    if sampling.repetition_penalty != 1.0:
        factor = np.float32(sampling.repetition_penalty)
        seen = logits[history.is_seen]
        logits[history.is_seen] = np.where(seen > 0, seen / factor, seen * factor)
    if sampling.frequency_penalty:
        logits -= np.float32(sampling.frequency_penalty) * history.counts
    if sampling.presence_penalty:
        logits -= np.float32(sampling.presence_penalty) * (history.counts > 0)


def _weights(logits: F32, sampling: Sampling) -> F32:
    """Return the truncated distribution, not normalised; the likeliest token has weight 1."""
    weights: F32 = np.exp((logits - logits.max()) / np.float32(sampling.temperature))
    if sampling.min_p > 0:
        weights[weights < sampling.min_p] = 0
    if 0 < sampling.top_k < len(weights):
        weights[weights < np.partition(weights, -sampling.top_k)[-sampling.top_k]] = 0
    if sampling.top_p < 1:
        weights[weights < _nucleus_floor(weights, sampling.top_p)] = 0
    return weights


def _nucleus_floor(weights: F32, top_p: float) -> float:
    """Return the smallest weight in the smallest set of tokens whose total reaches `top_p`."""
    total = float(weights.sum(dtype=np.float64))
    # Tokens below this make up less than 1 - top_p even together; the nucleus is among the others.
    candidates = weights[weights >= (1 - top_p) * total / len(weights)]
    candidates[::-1].sort()
    sums = candidates.cumsum(dtype=np.float64)
    last = int(np.searchsorted(sums, top_p * total))
    return float(candidates[min(last, len(candidates) - 1)])


def _pick(weights: F32, fraction: float) -> int:
    sums = weights.cumsum(dtype=np.float64)
    token = int(np.searchsorted(sums, fraction * sums[-1], side="right"))
    return token if token < len(weights) else int(np.flatnonzero(weights)[-1])


def _likeliest(logprobs: F64, count: int) -> list[tuple[int, float]]:
    count = min(count, len(logprobs))
    if count == 0:
        return []
    candidates = np.argpartition(logprobs, -count)[-count:]
    ordered = candidates[np.lexsort((candidates, -logprobs[candidates]))]
    return [(int(token), float(logprobs[token])) for token in ordered]
