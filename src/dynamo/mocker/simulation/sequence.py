"""SimulatedSequence: one request in the simulated engine."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dynamo.tokens.hashing import SEED, next_sequence_hash, packed_block_hashes, packed_sequence_hashes, unpacked_hashes

Owner = TypeVar("Owner")


class SequenceState(enum.Enum):
    """The scheduling state of a sequence."""

    WAITING = "waiting"
    LOADING = "loading"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    DONE = "done"


@dataclass(slots=True, eq=False)
class SimulatedSequence(Generic[Owner]):
    """A prompt and the maximum length of its answer.

    Decoding changes no field from token to token: in decode step `n` the sequence has generated `n - birth` tokens, and
    the next one is `ids[(n + phase) & mask]` of the token source.
    """

    owner: Owner
    """The caller's object that receives the tokens; the simulation does not use it."""
    prompt: list[int] | range
    max_tokens: int
    arrived_ms: float
    offset: int
    """Index in the token source at which the answer begins."""
    hash_seed: int = SEED
    state: SequenceState = SequenceState.WAITING
    generated: int = 0
    """Tokens emitted so far; not updated while decoding."""
    paused_ms: float = -1.0
    """Time of the last token before the last preemption; negative: never preempted."""
    computed: int = 0
    """Tokens with cached keys and values during prefill."""
    birth: int = 0
    phase: int = 0
    border: int = 0
    """The decode step in which the sequence needs another block."""
    is_remote: bool = False
    """Whether another worker computes the prompt; the sequence waits for its blocks."""
    stays: bool = False
    """Whether the blocks are held after the end of the sequence, until `let_go`."""
    ready_ms: float = 0.0
    """Time at which the blocks that are being copied arrive."""
    transfer_ms: float | None = None
    """Duration of the transfer of a remote prompt, which begins when its blocks are reserved; None: `ready_ms` is set otherwise."""
    cached_tokens: int = 0
    """Prompt tokens that were cached at the first admission."""
    packed: bytes = b""
    """Token hashes of the complete blocks computed so far, as `tokens.hashing.packed_block_hashes`."""
    hashes: list[int] = field(default_factory=list)
    """Sequence hashes of the complete blocks computed so far."""
    committed: int = 0
    """Number of `hashes` that the sequence holds in the pool."""
    private: int = 0
    """Number of uncommitted blocks that the sequence holds."""
    prompted_at: float = 0.0
    """Decode step before which the prompt was computed, where eviction depends on it."""
    first_token_ms: float = -1.0
    finished_ms: float = -1.0
    last_token: int = -1
    script: Mapping[int, int] | None = None
    """Tokens that are emitted in place of those of the token source, by position in the answer."""

    @property
    def length(self) -> int:
        """Return the number of tokens to compute before the next token can be emitted."""
        return len(self.prompt) + self.generated

    @property
    def owed(self) -> int:
        """Return the tokens of an admitted sequence that this rank still has to compute before its next token."""
        return 0 if self.is_remote else self.length - self.computed

    @property
    def ending(self) -> int:
        """Return the decode step that generates the last token."""
        return self.birth + self.max_tokens - 1

    def extend_hashes(self, tokens: list[int], block_tokens: int) -> None:
        """Append the hashes of the next complete blocks, which consist of `tokens`."""
        self.extend_packed(packed_block_hashes(tokens, block_tokens, self.hash_seed))

    def extend_packed(self, packed: bytes) -> None:
        """Append the hashes of the next complete blocks, given their token hashes."""
        self.packed += packed
        if not self.hashes:
            self.hashes += unpacked_hashes(packed_sequence_hashes(packed))
            return
        previous = self.hashes[-1]
        for tokens_hash in unpacked_hashes(packed):
            previous = next_sequence_hash(previous, tokens_hash)
            self.hashes.append(previous)
