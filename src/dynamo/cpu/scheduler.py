"""Scheduler: which sequences the next step computes, and how many tokens of each. Pure.

Continuous batching: sequences join and leave between any two steps. Those that generate come first, one token each; what
is left of the token budget goes to prompts, in chunks. When blocks run out, the youngest sequence gives all of its up
and is computed again later: nothing it said is lost, and much of it may still be in the cache.
"""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from dynamo.cpu.blocks import BlockPool, Content
from dynamo.cpu.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `count` tokens of a sequence that are not computed yet."""

    sequence: Sequence
    count: int

    @property
    def is_last(self) -> bool:
        """True when nothing is pending afterwards, so that a token can be sampled."""
        return self.count == self.sequence.pending


class Tiers(Protocol):
    """Where blocks are kept beside the cache."""

    def is_ready(self, sequence: Sequence, pool: BlockPool) -> bool:
        """False while more of its prefix than the pool's part is on its way to where `take` finds it."""

    def take(self, sequence: Sequence, cached: int) -> list[int]:
        """Holds what can be copied into the cache at once, behind the cache's part of a prefix."""

    def load(self, slots: list[int], blocks: list[int]) -> None:
        """To be copied before the next step is computed."""

    def save(self, sequence: Sequence, parent_hash: int | None, contents: list[Content]) -> None:
        """These blocks were computed."""

    def forget(self, sequence: Sequence) -> None:
        """It waits for nothing any more."""


class Scheduler:
    """Waiting and running sequences, in the order in which they came."""

    def __init__(
        self, pool: BlockPool, *, sequences_max: int, batched_tokens_max: int, tiers: Tiers | None = None
    ) -> None:
        assert batched_tokens_max >= sequences_max, "every running sequence needs a token of the budget"
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._tiers = tiers
        self._sequences_max = sequences_max
        self._batched_tokens_max = batched_tokens_max

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Forgets a sequence, wherever it is; harmless for one that is gone already."""
        if sequence.is_finished:
            return
        sequence.is_finished = True
        if self._tiers is not None:
            self._tiers.forget(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
            self.pool.release(sequence.drop())
        else:
            self.waiting.remove(sequence)

    def plan(self) -> list[Chunk]:
        """The next step. Blocks for it are held when this returns."""
        chunks: dict[Sequence, Chunk] = {}
        preemptions = self.preemptions
        budget = self._batched_tokens_max
        for sequence in sorted(self.running, key=_is_prefilling):
            count = min(sequence.pending, budget)
            if count > 0 and sequence in self.running and self._make_room(sequence, count, chunks):
                chunks[sequence] = Chunk(sequence, count)
                budget -= count
        if preemptions == self.preemptions:
            self._admit(chunks, budget)
        return list(chunks.values())

    def advance(self, chunks: list[Chunk]) -> None:
        """The step was computed."""
        for chunk in chunks:
            chunk.sequence.computed += chunk.count
            if self.pool.is_caching:
                parent_hash, contents = chunk.sequence.newly_complete()
                self.pool.store(parent_hash, contents)
                if self._tiers is not None and contents:
                    self._tiers.save(chunk.sequence, parent_hash, contents)

    def validate(self) -> None:
        """Asserts what must hold between any two calls."""
        self.pool.validate()
        held = {block for sequence in self.running for block in sequence.blocks}
        assert len(held) == self.pool.used, "a block is held by nobody who runs"
        assert len(self.running) <= self._sequences_max, "too many sequences run"
        for sequence in self.running:
            sequence.validate()
            assert sequence.pending > 0, "a running sequence has nothing to compute"
        for sequence in self.waiting:
            assert not sequence.blocks, "a waiting sequence holds blocks"
        everyone = [*self.waiting, *self.running]
        assert len(set(everyone)) == len(everyone), "a sequence is in two places"
        assert not any(sequence.is_finished for sequence in everyone), "a finished sequence was not forgotten"

    def _make_room(self, sequence: Sequence, count: int, chunks: dict[Sequence, Chunk]) -> bool:
        """Blocks for the next `count` tokens; False if the sequence itself had to give way."""
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

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self.pool.release(sequence.drop())
        self.waiting.appendleft(sequence)

    def _admit(self, chunks: dict[Sequence, Chunk], budget: int) -> None:
        """Lets sequences in, first come first served, as long as slots, tokens and blocks last."""
        for sequence in [sequence for sequence in self.waiting if sequence.is_ready]:
            if budget <= 0 or len(self.running) >= self._sequences_max:
                return
            if self._tiers is not None and self.pool.is_caching and not self._tiers.is_ready(sequence, self.pool):
                continue
            count = self._start(sequence, budget)
            if count == 0:
                return
            chunks[sequence] = Chunk(sequence, count)
            budget -= count

    def _start(self, sequence: Sequence, budget: int) -> int:
        """Holds blocks for a waiting sequence and returns how many tokens it computes first; 0 if it must wait on.

        It starts only if all it has to compute fits, and a block more for each that runs: to start and be preempted
        at once would help nobody.
        """
        cached = self.pool.acquire(sequence.reusable_hashes()) if self.pool.is_caching else []
        sequence.hold(cached, is_cached=True)
        if sequence.blocks_missing(len(sequence.tokens)) + len(self.running) > self.pool.free:
            self.pool.release(sequence.drop())
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

    def _load(self, sequence: Sequence, cached: list[int], tiers: Tiers) -> list[int]:
        """Adds to the cache's part of a prefix what the tiers have of it. There is room for all of the sequence."""
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


def _is_prefilling(sequence: Sequence) -> bool:
    return sequence.pending > 1
