"""Generation: the state of one running request: its choices, their stop rules and their output so far."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

from dynamo.cpu.guided import Guide
from dynamo.cpu.sampler import Draw, History, Sampled, Sampling, Scored
from dynamo.cpu.sequence import TokenSequence
from dynamo.kvbm.transfer.base import Deadline, Descriptor
from dynamo.kvbm.transfer.sessions import TransferSession
from dynamo.protocols.engine import CompletionUsage, EngineOutput, PromptTokensDetails, TopLogprob
from dynamo.runtime.request_plane.base import Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """Conditions that end a choice. Stop strings are handled by the frontend, which has the text."""

    max_tokens: int
    min_tokens: int = 0
    end_ids: frozenset[int] = frozenset()
    """End-of-sequence and other tokens that are hidden from the output."""
    stop_ids: frozenset[int] = frozenset()
    """Stop tokens given by the caller."""

    def reason(self, token: int, generated: int) -> str | None:
        """Return the finish reason if this token, at the given 1-based position, ends it; None if generation continues."""
        if generated >= self.min_tokens:
            if token in self.end_ids:
                return "eos"
            if token in self.stop_ids:
                return "stop"
        return "length" if generated >= self.max_tokens else None

    def forbidden(self, generated: int) -> Items[int]:
        """Return the tokens that must not come next because they would end the output before its minimum length."""
        return () if generated + 1 >= self.min_tokens else sorted(self.end_ids | self.stop_ids)


@dataclass(eq=False, slots=True)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens computed so far."""

    count: int
    """Number of alternatives for each token."""
    scores: list[Scored] = field(default_factory=list)
    """Scores of the second prompt token and those after it."""

    def engine_data(self) -> dict[str, Any]:
        """Return them in vLLM's form: null for the first token, then the token itself and the likeliest ones."""
        return {"prompt_logprobs": [None, *(_prompt_entry(one) for one in self.scores)]}


@dataclass(eq=False, slots=True)
class GeneratedChoice:
    """One choice of a request."""

    index: int
    sequence: TokenSequence
    sampling: Sampling
    rules: StopRules
    history: History | None = None
    guide: Guide | None = None
    """Grammar constraint of the output, if any."""
    logprobs_sum: float = 0.0
    prompt_logprobs: PromptLogprobs | None = None
    """Log-probabilities to send with the first output; None if not requested or already sent."""

    @property
    def generated(self) -> int:
        return len(self.sequence.tokens) - self.sequence.prompt_tokens

    @property
    def is_plain(self) -> bool:
        """Return whether the next token is always the one with the highest logit."""
        return self.guide is None and self.sampling.is_plain and self.generated + 1 >= self.rules.min_tokens

    def draw(self) -> Draw | None:
        """Return the sampler's input for the next token; None if the grammar allows no further token."""
        forbidden = self.rules.forbidden(self.generated)
        listed = self.sampling.allowed
        if self.guide is None:
            if listed is not None and listed.sum() == listed[list(forbidden)].sum():
                forbidden = ()  # Only end tokens are allowed: end early rather than violate the grammar.
            return Draw(self.sampling, len(self.sequence.tokens), self.history, forbidden, listed)
        allowed = self.guide.allowed(self.rules.end_ids, forbidden, listed)
        if allowed is None:
            return None
        return Draw(self.sampling, len(self.sequence.tokens), self.history, allowed=allowed)

    def end(self) -> EngineOutput:
        """Return the output that ends a complete text without another token."""
        return EngineOutput([], self.index, finish_reason="stop")

    def with_prompt_logprobs(self, token: int, output: EngineOutput | None) -> EngineOutput | None:
        """Add the prompt's log-probabilities to the first output, which contains `token`."""
        if self.prompt_logprobs is None:
            return output
        output = output or EngineOutput([token], self.index)
        output.engine_data = self.prompt_logprobs.engine_data()
        self.prompt_logprobs = None
        return output

    def emit(self, sampled: Sampled) -> EngineOutput | None:
        """Append the next token. Return an output if it carries more than the token: log-probabilities or the end."""
        self.sequence.tokens.append(sampled.token)
        if self.history is not None:
            self.history.add(sampled.token)
        reason = self.rules.reason(sampled.token, self.generated)
        if self.guide is not None and reason != "eos":
            self.guide.take(sampled.token)
            if self.guide.is_complete:
                reason = "stop"
        if reason is None and sampled.logprob is None and self.index == 0:
            return None
        output = EngineOutput([sampled.token], self.index, finish_reason=reason)
        if reason == "stop" and sampled.token in self.rules.stop_ids:
            output.stop_reason = sampled.token
        if sampled.logprob is not None:
            self.logprobs_sum += sampled.logprob
            output.log_probs = [sampled.logprob]
            output.cum_log_probs = self.logprobs_sum
            output.top_logprobs = [_top_logprobs(sampled)]
        return output


@dataclass(eq=False, slots=True)
class Fetch:
    """KV blocks of one request that a prefill worker has computed or is computing."""

    descriptor: Descriptor | None
    """Location of the blocks; None while the prefill worker is still computing."""
    deadline: Deadline
    first: Sampled | None = None
    """First output token, if known."""
    cached_tokens: int | None = None
    """Prompt tokens that the prefill worker found in its cache."""
    sequence: TokenSequence | None = None
    """Sequence that receives the blocks, once it is scheduled."""
    is_abandoned: bool = False
    meeting: TransferSession | None = None
    """Session in which the prefill worker announces completed blocks."""
    understand: "Callable[[dict[str, Any], int], None] | None" = None
    """Decode the params at the end of a session, given the blocks announced before. Raises `TransferError`."""


@dataclass(eq=False, slots=True)
class ActiveGeneration:
    """One request. Owned by the engine's thread, except `is_open`, which belongs to the loop."""

    reply: Reply
    choices: list[GeneratedChoice]
    is_prefill: bool = False
    """True on a prefill worker: the blocks are kept for the decode worker that continues."""
    meeting: TransferSession | None = None
    """Session in which a decode worker waits for the blocks while they are computed."""
    exported: int = 0
    """Number of blocks announced in the session."""
    fetch: Fetch | None = None
    """Blocks of the prompt at a prefill worker."""
    is_open: bool = True
    """False after the reply ended or the client disconnected."""
    unfinished: int = field(init=False)

    def __post_init__(self) -> None:
        self.unfinished = len(self.choices)

    def usage(self) -> CompletionUsage:
        """Return the token counts of the request so far."""
        first = self.choices[0].sequence
        generated = sum(choice.generated for choice in self.choices)
        details = PromptTokensDetails(cached_tokens=first.cached_tokens or 0)
        return CompletionUsage(first.prompt_tokens, generated, first.prompt_tokens + generated, details)


def _prompt_entry(scored: Scored) -> dict[str, dict[str, float | int]]:
    entry: dict[str, dict[str, float | int]] = {str(scored.token): {"logprob": scored.logprob, "rank": scored.rank}}
    for rank, (token, logprob) in enumerate(scored.alternatives, start=1):
        entry.setdefault(str(token), {"logprob": logprob, "rank": rank})
    return entry


def _top_logprobs(sampled: Sampled) -> list[TopLogprob]:
    return [
        TopLogprob(rank, token, logprob=logprob) for rank, (token, logprob) in enumerate(sampled.alternatives, start=1)
    ]
