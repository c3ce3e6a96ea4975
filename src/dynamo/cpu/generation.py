"""Generation: one request while it is answered: its choices, when each ends, and what was said so far."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

from dynamo.cpu.guided import Guide
from dynamo.cpu.sampler import Draw, History, Sampled, Sampling, Scored
from dynamo.cpu.sequence import Sequence
from dynamo.kvbm.transfer.base import Deadline, Descriptor
from dynamo.kvbm.transfer.rooms import Meeting
from dynamo.protocols.engine import CompletionUsage, EngineOutput, PromptTokensDetails, TopLogprob
from dynamo.runtime.request_plane.base import Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """When a choice ends by itself. Stop strings are not known here: the frontend reads text."""

    max_tokens: int
    min_tokens: int = 0
    end_ids: frozenset[int] = frozenset()
    """End of sequence and other tokens that no reader sees."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens the caller named."""

    def reason(self, token: int, said: int) -> str | None:
        """Why the answer ends with this token, the `said`-th one; None if it goes on."""
        if said >= self.min_tokens:
            if token in self.end_ids:
                return "eos"
            if token in self.stop_ids:
                return "stop"
        return "length" if said >= self.max_tokens else None

    def forbidden(self, said: int) -> Items[int]:
        """Tokens that may not come next, because they would end the answer too early."""
        return () if said + 1 >= self.min_tokens else sorted(self.end_ids | self.stop_ids)


@dataclass(eq=False, slots=True)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens, as far as they are computed."""

    count: int
    """Alternatives for each token."""
    scores: list[Scored] = field(default_factory=list)
    """Of the second token and those after it."""

    def engine_data(self) -> dict[str, Any]:
        """Return them in vLLM's form: null for the first token, then the token itself and the likeliest ones."""
        return {"prompt_logprobs": [None, *(_prompt_entry(one) for one in self.scores)]}


@dataclass(eq=False, slots=True)
class Choice:
    """One of a request's answers."""

    index: int
    sequence: Sequence
    sampling: Sampling
    rules: StopRules
    history: History | None = None
    guide: Guide | None = None
    """What the text must look like."""
    logprobs_sum: float = 0.0
    prompt_logprobs: PromptLogprobs | None = None
    """Sent with the first output; None where they are not asked for or were sent."""

    @property
    def said(self) -> int:
        return len(self.sequence.tokens) - self.sequence.prompt_tokens

    @property
    def is_plain(self) -> bool:
        """True when the likeliest token is the next one, whatever it is."""
        return self.guide is None and self.sampling.is_plain and self.said + 1 >= self.rules.min_tokens

    def draw(self) -> Draw | None:
        """What the sampler must know to choose the next token; None where the grammar leaves none to choose."""
        forbidden = self.rules.forbidden(self.said)
        listed = self.sampling.allowed
        if self.guide is None:
            if listed is not None and listed.sum() == listed[list(forbidden)].sum():
                forbidden = ()  # Only the end may be said at all: it comes early rather than something else.
            return Draw(self.sampling, len(self.sequence.tokens), self.history, forbidden, listed)
        allowed = self.guide.allowed(self.rules.end_ids, forbidden, listed)
        if allowed is None:
            return None
        return Draw(self.sampling, len(self.sequence.tokens), self.history, allowed=allowed)

    def end(self) -> EngineOutput:
        """The text is complete without another token."""
        return EngineOutput([], self.index, finish_reason="stop")

    def with_prompt_logprobs(self, token: int, output: EngineOutput | None) -> EngineOutput | None:
        """Add the prompt's log-probabilities to the first output, which says `token`."""
        if self.prompt_logprobs is None:
            return output
        output = output or EngineOutput([token], self.index)
        output.engine_data = self.prompt_logprobs.engine_data()
        self.prompt_logprobs = None
        return output

    def say(self, sampled: Sampled) -> EngineOutput | None:
        """Takes the next token. Returns an output where it says more than the token: its likelihood, or the end."""
        self.sequence.tokens.append(sampled.token)
        if self.history is not None:
            self.history.add(sampled.token)
        reason = self.rules.reason(sampled.token, self.said)
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
    """What a prefill worker left for one request, or computes for it now."""

    descriptor: Descriptor | None
    """Where the blocks are; None where that is told by and by."""
    deadline: Deadline
    first: Sampled | None = None
    """The token that follows the prompt, where it is known."""
    cached_tokens: int | None = None
    """How much of the prompt that worker had in its cache."""
    sequence: Sequence | None = None
    """Whose blocks are fetched, once they are."""
    is_abandoned: bool = False
    meeting: Meeting | None = None
    """Where that is told."""
    understand: "Callable[[dict[str, Any], int], None] | None" = None
    """Takes what is said at the end of a meeting, after so many blocks. Raises `TransferError`."""


@dataclass(eq=False, slots=True)
class Generation:
    """One request. The engine's thread owns it, but for `is_open`, which belongs to the loop."""

    reply: Reply
    choices: list[Choice]
    is_prefill: bool = False
    """Another worker goes on from its first token: its blocks are kept for that one."""
    meeting: Meeting | None = None
    """Where a decode worker waits for its blocks while they are computed."""
    lent: int = 0
    """How many it was told of."""
    fetch: Fetch | None = None
    """Where another worker keeps the blocks of its prompt."""
    is_open: bool = True
    """False once its reply was ended, or its caller left."""
    unfinished: int = field(init=False)

    def __post_init__(self) -> None:
        self.unfinished = len(self.choices)

    def usage(self) -> CompletionUsage:
        """The counts of the whole request, so far."""
        first = self.choices[0].sequence
        said = sum(choice.said for choice in self.choices)
        details = PromptTokensDetails(cached_tokens=first.cached_tokens or 0)
        return CompletionUsage(first.prompt_tokens, said, first.prompt_tokens + said, details)


def _prompt_entry(scored: Scored) -> dict[str, dict[str, float | int]]:
    entry: dict[str, dict[str, float | int]] = {str(scored.token): {"logprob": scored.logprob, "rank": scored.rank}}
    for rank, (token, logprob) in enumerate(scored.alternatives, start=1):
        entry.setdefault(str(token), {"logprob": logprob, "rank": rank})
    return entry


def _top_logprobs(sampled: Sampled) -> list[TopLogprob]:
    return [
        TopLogprob(rank, token, logprob=logprob) for rank, (token, logprob) in enumerate(sampled.alternatives, start=1)
    ]
