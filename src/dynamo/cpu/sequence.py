"""Sequence: the tokens of one choice of one request and the KV blocks of the computed tokens. Pure."""

from collections.abc import Sequence as Items

from dynamo.cpu.adapter import Adapter
from dynamo.cpu.blocks import BlockContent
from dynamo.tokens.hashing import SEED, block_hashes, next_sequence_hash


class TokenSequence:
    """Growing list of tokens, of which a prefix is computed."""

    def __init__(
        self,
        prompt: Items[int],
        block_tokens: int,
        *,
        hash_seed: int = SEED,
        leader: "TokenSequence | None" = None,
        adapter: Adapter | None = None,
    ) -> None:
        self.tokens = list(prompt)
        self.prompt_tokens = len(self.tokens)
        self.leader = leader
        """Sequence with the same prompt, whose blocks this one waits for."""
        self.adapter = adapter
        """LoRA adapter; None for the base model."""
        self.computed = 0
        self.cached_tokens: int | None = None
        """Prompt tokens found in the cache; None until the sequence first runs."""
        self.scored: int | None = None
        """Prompt tokens with known log-probability, counting the first one, which has none; None if not requested."""
        self.is_finished = False
        self.peer: tuple[str, int] | None = None
        """Address of a worker that has a prefix of the prompt, and the number of its blocks."""
        self.priority = 0
        """Retention priority of its blocks, from 0 to 100."""
        self.is_remote = False
        """Whether another worker computed the prompt, so that its blocks are fetched."""
        self.blocks: list[int] = []
        self.runs: list[tuple[int, int]] = []
        """Blocks as runs of slots."""
        self._block_tokens = block_tokens
        self._hash_seed = hash_seed
        self._origin = None if adapter is None else adapter.fingerprint
        """Seed of the block hashes: blocks of different weights never match, even under the same adapter name."""
        self._tokens_hashes: list[int] = []
        self._hashes: list[int] = []
        self._stored = 0

    @property
    def pending(self) -> int:
        """Return the number of known tokens that are not computed; one while generating."""
        return len(self.tokens) - self.computed

    @property
    def is_scoring(self) -> bool:
        """Return whether log-probabilities of the prompt are still to be computed."""
        return self.scored is not None and self.scored < self.prompt_tokens

    def rows_to_score(self, count: int) -> range:
        """Return the positions among the next `count` tokens whose logits score the token that follows them."""
        if self.scored is None or not self.is_scoring:
            return range(0)
        return range(max(self.computed, self.scored - 1), min(self.computed + count, self.prompt_tokens - 1))

    @property
    def is_ready(self) -> bool:
        """Return False while the leader still computes the shared prompt."""
        leader = self.leader
        return leader is None or leader.is_finished or leader.computed >= leader.prompt_tokens

    def blocks_missing(self, tokens: int) -> int:
        """Return the number of additional blocks needed to hold this many tokens."""
        return -(-tokens // self._block_tokens) - len(self.blocks)

    def reusable_hashes(self) -> list[int]:
        """Return the hashes of the blocks that may be taken from the cache: at least one token is left to compute.

        The logits of prompt tokens that are not scored yet are needed, so these tokens are computed in any case.
        """
        self._hash_complete_blocks()
        needed = (self.scored - 1) if self.scored is not None and self.is_scoring else len(self.tokens) - 1
        return self._hashes[: needed // self._block_tokens]

    def hold(self, blocks: Items[int], *, is_cached: bool = False) -> None:
        """Append blocks; cached ones are already computed."""
        size = self._block_tokens
        for block in blocks:
            if self.runs and self.runs[-1][1] == block * size:
                self.runs[-1] = (self.runs[-1][0], (block + 1) * size)
            else:
                self.runs.append((block * size, (block + 1) * size))
        self.blocks += blocks
        if is_cached:
            self._stored = len(self.blocks)
            self.computed = self._stored * size

    def fetched(self) -> None:
        """Mark the prompt's blocks as computed by another worker; one token is always left to compute."""
        self.is_remote = False
        self.computed = min(self.prompt_tokens, len(self.tokens) - 1)

    def drop(self) -> list[int]:
        """Discard all computed state and return the released blocks."""
        blocks = self.blocks
        self.blocks, self.runs, self.computed, self._stored = [], [], 0, 0
        return blocks

    def newly_complete(self) -> tuple[int | None, list[BlockContent]]:
        """Return the hash of the preceding block and the contents of the blocks completed since the last call."""
        first, end = self._stored, self.computed // self._block_tokens
        if first == end:
            return None, []
        self._hash_complete_blocks()
        contents = [
            BlockContent(self.blocks[at], self._hashes[at], self._tokens_hashes[at]) for at in range(first, end)
        ]
        self._stored = end
        return (self._hashes[first - 1] if first else None), contents

    def contents(self, blocks: Items[int], first: int) -> tuple[int | None, list[BlockContent]]:
        """Return the hash of the preceding block and the contents of these blocks, the first at index `first`."""
        self._hash_complete_blocks()
        contents = [
            BlockContent(block, self._hashes[at], self._tokens_hashes[at])
            for at, block in enumerate(blocks, start=first)
        ]
        return (self._hashes[first - 1] if first else None), contents

    def visible_runs(self, tokens: int) -> list[tuple[int, int]]:
        """Return the runs of the first `tokens` slots; these must reach into the last block."""
        start, stop = self.runs[-1]
        return [*self.runs[:-1], (start, stop - (len(self.blocks) * self._block_tokens - tokens))]

    def validate(self) -> None:
        """Assert the invariants between any two calls."""
        size = self._block_tokens
        assert 0 <= self.computed <= len(self.tokens), "more was computed than there is"
        assert self.computed <= len(self.blocks) * size, "computed tokens have no block"
        slots = [slot for start, stop in self.runs for slot in range(start, stop, size)]
        assert slots == [block * size for block in self.blocks], "the runs are not the blocks"

    def _hash_complete_blocks(self) -> None:
        hashed = len(self._tokens_hashes) * self._block_tokens
        for tokens_hash in block_hashes(self.tokens[hashed:], self._block_tokens, self._hash_seed):
            previous = self._hashes[-1] if self._hashes else self._origin
            self._tokens_hashes.append(tokens_hash)
            self._hashes.append(next_sequence_hash(previous, tokens_hash))
