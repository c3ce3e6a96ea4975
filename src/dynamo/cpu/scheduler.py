"""Scheduler: which sequences the next step computes, and how many tokens of each. Pure.

Continuous batching: sequences join and leave between any two steps. Those that generate come first, one token each; what
is left of the token budget goes to prompts, in chunks. When blocks run out, the youngest sequence gives all of its up
and is computed again later: nothing it said is lost, and much of it may still be in the cache.

Between prefill and decode workers a sequence's blocks change hands. At the one the blocks of a finished sequence are
*lent*: nobody here uses them, but they are not free until whoever fetches them has done so. At the other a sequence
whose prompt was computed elsewhere holds its blocks while it is *fetching*, and runs when they are there.
"""

from collections import Counter, deque
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from dynamo.cpu.adapter import Adapter
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
        self,
        pool: BlockPool,
        *,
        sequences_max: int,
        batched_tokens_max: int,
        tiers: Tiers | None = None,
        adapters_max: int | None = None,
    ) -> None:
        """`adapters_max`: how many adapters may run at the same time."""
        assert batched_tokens_max >= sequences_max, "every running sequence needs a token of the budget"
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.fetching: list[Sequence] = []
        self.lent: Counter[int] = Counter()
        """Blocks that others fetch, and for how many of them."""
        self.preemptions = 0
        self._tiers = tiers
        self._begun: list[Sequence] = []
        self._is_stuck = False
        """Nobody who waits can start until something is freed."""
        self._is_loading = False
        """Somebody waits for blocks that are on their way from the tiers."""
        self._sequences_max = sequences_max
        self._batched_tokens_max = batched_tokens_max
        self._adapters_max = adapters_max

    @property
    def has_work(self) -> bool:
        return bool(self.running) or (bool(self.waiting) and not self._is_stuck)

    @property
    def is_starved(self) -> bool:
        """True when blocks are lent that those who wait need in order to start."""
        return self._is_stuck and bool(self.waiting and self.lent) and not (self.running or self.fetching)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self._is_stuck = False

    def finish(self, sequence: Sequence) -> None:
        """Forgets a sequence, wherever it is; harmless for one that is gone already."""
        if sequence.is_finished:
            return
        sequence.is_finished = True
        if self._tiers is not None:
            self._tiers.forget(sequence)
        self._is_stuck = False
        if sequence in self.running:
            self.running.remove(sequence)
            self.pool.release(sequence.drop())
        elif sequence not in self.fetching:  # Into its blocks somebody writes: they are free when that is over.
            self.waiting.remove(sequence)

    def lend(self, sequence: Sequence, first: int = 0) -> list[int]:
        """Forgets a sequence that runs, but not its blocks from the first on: they are held until `take_back`."""
        blocks = self.lend_part(sequence, first, len(sequence.blocks))
        self.finish(sequence)
        return blocks

    def lend_part(self, sequence: Sequence, first: int, end: int) -> list[int]:
        """The same of some of its blocks, while it runs on."""
        blocks = sequence.blocks[first:end]
        self.pool.share(blocks)
        self.lent.update(blocks)
        return blocks

    def take_back(self, blocks: Items[int]) -> None:
        """Lent blocks are needed by nobody else any more."""
        self.lent.subtract(blocks)
        for block in blocks:
            assert self.lent[block] >= 0, "a block was taken back twice"
            if not self.lent[block]:
                del self.lent[block]
        self.pool.release(blocks)
        self._is_stuck = False

    def take_begun(self) -> list[Sequence]:
        """The sequences whose blocks are to be fetched since the last call."""
        begun, self._begun = self._begun, []
        return begun

    def end_fetch(self, sequence: Sequence, *, is_whole: bool) -> None:
        """A sequence's blocks are there, or cannot be had: then it computes its prompt like any other, before others."""
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
            self._is_loading = False
            self._admit(chunks, budget)
        self._is_stuck = not chunks and not self._begun and not self._is_loading
        return list(chunks.values())

    def advance(self, chunks: list[Chunk]) -> None:
        """The step was computed."""
        for chunk in chunks:
            chunk.sequence.computed += chunk.count
            self._store(chunk.sequence)

    def validate(self) -> None:
        """Asserts what must hold between any two calls."""
        self.pool.validate()
        holders = [*self.running, *self.fetching]
        held = {block for sequence in holders for block in sequence.blocks} | self.lent.keys()
        assert len(held) == self.pool.used, "a block is held by nobody who runs"
        assert len(holders) <= self._sequences_max, "too many sequences run"
        for sequence in self.running:
            sequence.validate()
            assert sequence.pending > 0, "a running sequence has nothing to compute"
        for sequence in self.waiting:
            assert not sequence.blocks, "a waiting sequence holds blocks"
        for sequence in self.fetching:
            assert sequence.is_remote, "a sequence fetches what nobody computed for it"
            assert sequence.blocks_missing(sequence.prompt_tokens) == 0, "a fetching sequence lacks room for its prompt"
        everyone = [*self.waiting, *self.running, *(one for one in self.fetching if not one.is_finished)]
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
        is_held_back = False
        for sequence in [sequence for sequence in self.waiting if sequence.is_ready]:
            if len(self.running) + len(self.fetching) >= self._sequences_max:
                return
            if sequence.adapter is not None and self._adapters_max is not None:
                is_held_back = is_held_back or not self._has_slot(sequence.adapter, self._adapters_max)
                if is_held_back:
                    continue  # Nor may others with adapters overtake it: those that run would never end.
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
        """Whether one more adapter may run, or this one does already."""
        used = {id(one.adapter) for one in (*self.running, *self.fetching) if one.adapter is not None}
        return id(adapter) in used or len(used) < adapters_max

    def _start(self, sequence: Sequence, budget: int) -> int:
        """Holds blocks for a waiting sequence and returns how many tokens it computes first; 0 if it must wait on.

        It starts only if all it has to compute fits, and a block more for each that runs: to start and be preempted
        at once would help nobody.
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

    def _fetch(self, sequence: Sequence) -> bool:
        """Holds blocks for a whole prompt that lies elsewhere; False if it must wait on."""
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
        self._begun.append(sequence)
        return True

    def _reuse(self, sequence: Sequence) -> list[int] | None:
        """The blocks of its beginning that are in the cache, now held; None where the rest would find no room."""
        cached = self.pool.acquire(sequence.reusable_hashes()) if self.pool.is_caching else []
        sequence.hold(cached, is_cached=True)
        others = len(self.running) + len(self.fetching)
        if sequence.blocks_missing(len(sequence.tokens)) + others > self.pool.free:
            self.pool.release(sequence.drop())
            return None
        return cached

    def _store(self, sequence: Sequence) -> None:
        """Makes what is complete findable."""
        if not self.pool.is_caching:
            return
        parent_hash, contents = sequence.newly_complete()
        self.pool.store(parent_hash, contents)
        if self._tiers is not None and contents:
            self._tiers.save(sequence, parent_hash, contents)


def _is_prefilling(sequence: Sequence) -> bool:
    return sequence.pending > 1
