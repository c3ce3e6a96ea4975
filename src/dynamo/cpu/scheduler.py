"""Scheduler: choose the sequences of the next step and the number of tokens of each. Pure.

Continuous batching: sequences join and leave between any two steps. Generating sequences come first, one token each; the
rest of the token budget goes to prompts, in chunks. When blocks run out, the youngest sequence releases all of its blocks
and is recomputed later: its output is kept, and many of its blocks may still be in the cache.

Blocks are transferred between prefill and decode workers. On the prefill worker, the blocks of a finished sequence are
*exported*: no local sequence uses them, but they are not free until the decode worker has fetched them. On the decode worker, a
sequence whose prompt was computed elsewhere holds its blocks while it is *fetching*, and runs once they have arrived.
"""

from collections import Counter, deque
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from dynamo.cpu.adapter import Adapter
from dynamo.cpu.blocks import BlockContent, KvBlockPool
from dynamo.cpu.sequence import TokenSequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `count` tokens of a sequence that are not computed yet."""

    sequence: TokenSequence
    count: int

    @property
    def is_last(self) -> bool:
        """Return whether nothing is pending afterwards, so that a token can be sampled."""
        return self.count == self.sequence.pending


class LowerTiers(Protocol):
    """Storage of blocks below the cache."""

    def is_ready(self, sequence: TokenSequence, pool: KvBlockPool) -> bool:
        """Return False while more of the prefix than the pool's part is being loaded for `take`."""

    def take(self, sequence: TokenSequence, cached: int) -> list[int]:
        """Acquire blocks that can be copied into the cache at once and continue the cached part of a prefix."""

    def load(self, slots: list[int], blocks: list[int]) -> None:
        """Queue copies into the cache that must be done before the next step."""

    def save(self, sequence: TokenSequence, parent_hash: int | None, contents: list[BlockContent]) -> None:
        """Save computed blocks."""

    def forget(self, sequence: TokenSequence) -> None:
        """Cancel a sequence's pending loads."""


class Scheduler:
    """Waiting and running sequences, in order of arrival."""

    def __init__(
        self,
        pool: KvBlockPool,
        *,
        sequences_max: int,
        batched_tokens_max: int,
        tiers: LowerTiers | None = None,
        adapters_max: int | None = None,
    ) -> None:
        """`adapters_max`: number of adapters that may run at the same time."""
        assert batched_tokens_max >= sequences_max, "every running sequence needs a token of the budget"
        self.pool = pool
        self.waiting: deque[TokenSequence] = deque()
        self.running: list[TokenSequence] = []
        self.fetching: list[TokenSequence] = []
        self.exported: Counter[int] = Counter()
        """Number of fetches of each exported block."""
        self.preemptions = 0
        self._tiers = tiers
        self._started: list[TokenSequence] = []
        self._is_stuck = False
        """True if no waiting sequence can start until something is freed."""
        self._is_loading = False
        """True if a waiting sequence depends on blocks that are being loaded from the tiers."""
        self._sequences_max = sequences_max
        self._batched_tokens_max = batched_tokens_max
        self._adapters_max = adapters_max

    @property
    def has_work(self) -> bool:
        return bool(self.running) or (bool(self.waiting) and not self._is_stuck)

    @property
    def is_starved(self) -> bool:
        """Return whether exported blocks prevent waiting sequences from starting."""
        return self._is_stuck and bool(self.waiting and self.exported) and not (self.running or self.fetching)

    def add(self, sequence: TokenSequence) -> None:
        self.waiting.append(sequence)
        self._is_stuck = False

    def finish(self, sequence: TokenSequence) -> None:
        """Remove a sequence in any state; no effect if it was already removed."""
        if sequence.is_finished:
            return
        sequence.is_finished = True
        if self._tiers is not None:
            self._tiers.forget(sequence)
        self._is_stuck = False
        if sequence in self.running:
            self.running.remove(sequence)
            self.pool.release(sequence.drop())
        elif sequence not in self.fetching:  # The transfer still writes to its blocks; they are freed at its end.
            self.waiting.remove(sequence)

    def export(self, sequence: TokenSequence, first: int = 0) -> list[int]:
        """Remove a running sequence but hold its blocks from `first` on until `release_export`; return them."""
        blocks = self.export_part(sequence, first, len(sequence.blocks))
        self.finish(sequence)
        return blocks

    def export_part(self, sequence: TokenSequence, first: int, end: int) -> list[int]:
        """Lend some blocks of a sequence that continues to run; return them."""
        blocks = sequence.blocks[first:end]
        self.pool.share(blocks)
        self.exported.update(blocks)
        return blocks

    def release_export(self, blocks: Items[int]) -> None:
        """Release exported blocks."""
        self.exported.subtract(blocks)
        for block in blocks:
            assert self.exported[block] >= 0, "a block was released twice"
            if not self.exported[block]:
                del self.exported[block]
        self.pool.release(blocks)
        self._is_stuck = False

    def take_started(self) -> list[TokenSequence]:
        """Return the sequences that started fetching since the last call."""
        begun, self._started = self._started, []
        return begun

    def end_fetch(self, sequence: TokenSequence, *, is_whole: bool) -> None:
        """Run a sequence whose blocks arrived; on failure, queue it first to compute its own prompt."""
        self.fetching.remove(sequence)
        self._is_stuck = False
        if sequence.is_finished:
            self.pool.release(sequence.drop())
            return
        if is_whole:
            sequence.fetched()
            self.running.append(sequence)
            self._store(sequence)
        else:
            sequence.is_remote = False
            self.pool.release(sequence.drop())
            self.waiting.appendleft(sequence)

    def plan(self) -> list[Chunk]:
        """Return the next step. Its blocks are held on return."""
        chunks: dict[TokenSequence, Chunk] = {}
        preemptions = self.preemptions
        budget = self._batched_tokens_max
        for sequence in sorted(self.running, key=_is_prefilling):
            count = min(sequence.pending, budget)
            if count > 0 and sequence in self.running and self._free_blocks(sequence, count, chunks):
                chunks[sequence] = Chunk(sequence, count)
                budget -= count
        if preemptions == self.preemptions:
            self._is_loading = False
            self._admit(chunks, budget)
        self._is_stuck = not chunks and not self._started and not self._is_loading
        return list(chunks.values())

    def advance(self, chunks: list[Chunk]) -> None:
        """Record that the step was computed."""
        for chunk in chunks:
            chunk.sequence.computed += chunk.count
            self._store(chunk.sequence)

    def validate(self) -> None:
        """Assert the invariants between any two calls."""
        self.pool.validate()
        holders = [*self.running, *self.fetching]
        held = {block for sequence in holders for block in sequence.blocks} | self.exported.keys()
        assert len(held) == self.pool.used, "a block is held by no running sequence"
        assert len(holders) <= self._sequences_max, "too many sequences run"
        for sequence in self.running:
            sequence.validate()
            assert sequence.pending > 0, "a running sequence has nothing to compute"
        for sequence in self.waiting:
            assert not sequence.blocks, "a waiting sequence holds blocks"
        for sequence in self.fetching:
            assert sequence.is_remote, "a fetching sequence has no remote prompt"
            assert sequence.blocks_missing(sequence.prompt_tokens) == 0, (
                "a fetching sequence has too few blocks for its prompt"
            )
        everyone = [*self.waiting, *self.running, *(one for one in self.fetching if not one.is_finished)]
        assert len(set(everyone)) == len(everyone), "a sequence is in two places"
        assert not any(sequence.is_finished for sequence in everyone), "a finished sequence was not removed"

    def _free_blocks(self, sequence: TokenSequence, count: int, chunks: dict[TokenSequence, Chunk]) -> bool:
        """Acquire blocks for the next `count` tokens; return False if the sequence itself was preempted."""
        missing = sequence.blocks_missing(sequence.computed + count)
        if missing <= 0:
            return True
        while True:
            blocks = self.pool.allocate(missing, after=sequence.blocks[-1] if sequence.blocks else None)
            if blocks is not None:
                sequence.hold(blocks)
                return True
            youngest = self.running[-1]
            self._preempt(youngest)
            chunks.pop(youngest, None)
            if youngest is sequence:
                return False

    def _preempt(self, sequence: TokenSequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self.pool.release(sequence.drop())
        self.waiting.appendleft(sequence)

    def _admit(self, chunks: dict[TokenSequence, Chunk], budget: int) -> None:
        """Start waiting sequences in order of arrival while slots, tokens and blocks are available."""
        is_held_back = False
        for sequence in [sequence for sequence in self.waiting if sequence.is_ready]:
            if len(self.running) + len(self.fetching) >= self._sequences_max:
                return
            if sequence.adapter is not None and self._adapters_max is not None:
                is_held_back = is_held_back or not self._has_slot(sequence.adapter, self._adapters_max)
                if is_held_back:
                    continue  # Others with adapters must not overtake it, or its adapter might never get a slot.
            if sequence.is_remote:
                if not self._fetch(sequence):
                    return
                continue
            if budget <= 0:
                return
            if self._tiers is not None and self.pool.is_caching and not self._tiers.is_ready(sequence, self.pool):
                self._is_loading = True
                continue
            count = self._start(sequence, budget)
            if count == 0:
                return
            chunks[sequence] = Chunk(sequence, count)
            budget -= count

    def _has_slot(self, adapter: Adapter, adapters_max: int) -> bool:
        """Return whether the adapter is running already or one more adapter may run."""
        used = {id(one.adapter) for one in (*self.running, *self.fetching) if one.adapter is not None}
        return id(adapter) in used or len(used) < adapters_max

    def _start(self, sequence: TokenSequence, budget: int) -> int:
        """Acquire blocks for a waiting sequence and return its first token count; return 0 if it must keep waiting.

        It starts only if all its tokens fit, plus one block for each running sequence, so that it is not preempted right
        after the start.
        """
        cached = self._reuse(sequence)
        if cached is None:
            return 0
        if self._tiers is not None:
            cached = self._load(sequence, cached, self._tiers)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
        count = min(sequence.pending, budget)
        blocks = self.pool.allocate(
            sequence.blocks_missing(sequence.computed + count), after=cached[-1] if cached else None
        )
        assert blocks is not None, "blocks were free a moment ago"
        sequence.hold(blocks)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return count

    def _load(self, sequence: TokenSequence, cached: list[int], tiers: LowerTiers) -> list[int]:
        """Extend the cached part of a prefix by the tiers' blocks. There must be space for the whole sequence."""
        slots = tiers.take(sequence, len(cached)) if self.pool.is_caching else []
        tiers.forget(sequence)
        if not slots:
            return cached
        blocks = self.pool.allocate(len(slots), after=cached[-1] if cached else None)
        assert blocks is not None, "blocks were free a moment ago"
        self.pool.store(*sequence.contents(blocks, len(cached)))
        sequence.hold(blocks, is_cached=True)
        tiers.load(slots, blocks)
        return [*cached, *blocks]

    def _fetch(self, sequence: TokenSequence) -> bool:
        """Acquire blocks for a prompt computed elsewhere; return False if it must keep waiting."""
        cached = self._reuse(sequence)
        if cached is None:
            return False
        blocks = self.pool.allocate(
            sequence.blocks_missing(sequence.prompt_tokens), after=cached[-1] if cached else None
        )
        assert blocks is not None, "blocks were free a moment ago"
        sequence.hold(blocks)
        self.waiting.remove(sequence)
        self.fetching.append(sequence)
        self._started.append(sequence)
        return True

    def _reuse(self, sequence: TokenSequence) -> list[int] | None:
        """Acquire the cached blocks of the prefix; return None if the rest would not fit."""
        cached = self.pool.acquire(sequence.reusable_hashes()) if self.pool.is_caching else []
        sequence.hold(cached, is_cached=True)
        others = len(self.running) + len(self.fetching)
        if sequence.blocks_missing(len(sequence.tokens)) + others > self.pool.free:
            self.pool.release(sequence.drop())
            return None
        return cached

    def _store(self, sequence: TokenSequence) -> None:
        """Index the completed blocks by their content."""
        if not self.pool.is_caching:
            return
        parent_hash, contents = sequence.newly_complete()
        self.pool.store(parent_hash, contents)
        if self._tiers is not None and contents:
            self._tiers.save(sequence, parent_hash, contents)


def _is_prefilling(sequence: TokenSequence) -> bool:
    return sequence.pending > 1
