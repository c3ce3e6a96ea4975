"""Sequence: one request inside the simulated engine."""

import enum
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dynamo.tokens.hashing import SEED, block_hashes, next_sequence_hash

Owner = TypeVar("Owner")


class State(enum.Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    LOADING = "loading"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Sequence(Generic[Owner]):
    """A prompt, and as much of an answer as was asked for.

    While it decodes nothing of it changes from token to token: in decode step `n` it has generated `n - birth`
    tokens, and the next one is `ids[(n + phase) & mask]` of the token source.
    """

    owner: Owner
    """Whom the tokens are for; the simulation only carries it."""
    prompt: list[int] | range
    max_tokens: int
    arrived_ms: float
    offset: int
    """Where in the token source the answer begins."""
    hash_seed: int = SEED
    state: State = State.WAITING
    generated: int = 0
    """Tokens emitted so far, unless it is decoding."""
    computed: int = 0
    """Tokens whose keys and values are in the cache, while it is prefilling."""
    birth: int = 0
    phase: int = 0
    border: int = 0
    """The decode step in which it needs another block."""
    is_remote: bool = False
    """Another worker computes its prompt; it waits for the blocks and goes on with the first token."""
    stays: bool = False
    """Its blocks are held after its end, until they are let go."""
    ready_ms: float = 0.0
    """When what it loads is there."""
    cached_tokens: int = 0
    """How much of the prompt the cache held when it was first admitted."""
    tokens_hashes: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    """The sequence hashes of its complete blocks, as far as they were needed."""
    committed: int = 0
    """How many of `hashes` it holds in the pool."""
    private: int = 0
    """How many uncommitted blocks it holds."""
    first_token_ms: float = -1.0
    finished_ms: float = -1.0
    last_token: int = -1

    @property
    def length(self) -> int:
        """Tokens that must be computed before the next one can be emitted."""
        return len(self.prompt) + self.generated

    @property
    def owed(self) -> int:
        """Tokens of a sequence that was admitted which are to be computed here before its next token."""
        return 0 if self.is_remote else self.length - self.computed

    @property
    def ending(self) -> int:
        """The decode step that brings its last token."""
        return self.birth + self.max_tokens - 1

    def extend_hashes(self, tokens: list[int], block_tokens: int) -> None:
        """Appends the hashes of the next complete blocks, whose tokens these are."""
        previous = self.hashes[-1] if self.hashes else None
        for tokens_hash in block_hashes(tokens, block_tokens, self.hash_seed):
            previous = next_sequence_hash(previous, tokens_hash)
            self.tokens_hashes.append(tokens_hash)
            self.hashes.append(previous)
