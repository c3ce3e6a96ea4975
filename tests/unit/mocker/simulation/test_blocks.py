"""Blocks are shared by hash, kept while there is space, and reported."""

import itertools
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dynamo.mocker.simulation import eviction
from dynamo.mocker.simulation.blocks import SimulatedBlockPool
from dynamo.protocols.kv_events import Removed, Stored, StoredBlock
from dynamo.tokens.hashing import packed_hashes


def filled(pool: SimulatedBlockPool, hashes: list[int]) -> None:
    assert pool.take(len(hashes))
    pool.commit(None, hashes, packed_hashes([block_hash * 10 for block_hash in hashes]))


def test_block_pool_counts_allocated_and_released_blocks() -> None:
    pool = SimulatedBlockPool(4)
    assert pool.take(3)
    assert (pool.used, pool.free) == (3, 1)
    pool.release([], 3)
    assert (pool.used, pool.free) == (0, 4)
    pool.validate()


def test_block_pool_allocates_all_blocks_or_none() -> None:
    pool = SimulatedBlockPool(4)
    assert not pool.take(5)
    assert pool.used == 0


def test_pool_reports_stored_blocks_once_with_their_parent() -> None:
    pool = SimulatedBlockPool(4)
    filled(pool, [1, 2])
    assert pool.events() == [Stored(None, None, [StoredBlock(1, 10), StoredBlock(2, 20)])]
    assert pool.take(2)
    pool.commit(None, [1, 2], packed_hashes([10, 20]))
    assert pool.events() == []
    assert pool.active == {1: 2, 2: 2}
    assert pool.used == 2
    pool.validate()


def test_pool_reports_only_the_new_blocks_of_a_prefix() -> None:
    pool = SimulatedBlockPool(8)
    filled(pool, [1, 2])
    pool.events()
    filled(pool, [1, 2, 3, 4])
    assert pool.events() == [Stored(2, None, [StoredBlock(3, 30), StoredBlock(4, 40)])]


def test_released_block_remains_available_for_prefix_matches() -> None:
    pool = SimulatedBlockPool(4)
    filled(pool, [1, 2])
    pool.release([1, 2], 0)
    assert pool.used == 0
    assert pool.match([1, 2, 3]) == 2
    assert pool.price([1, 2]) == 2
    pool.acquire([1, 2])
    assert pool.active == {1: 1, 2: 1}
    pool.validate()


def test_block_pool_evicts_the_last_block_of_a_prefix_first() -> None:
    pool = SimulatedBlockPool(4)
    filled(pool, [1, 2, 3])
    pool.release([1, 2, 3], 0)
    pool.events()
    assert pool.take(2)
    assert pool.events() == [Removed([3])]
    assert pool.take(1)
    assert pool.events() == [Removed([2])]
    assert pool.match([1, 2, 3]) == 1
    pool.validate()


def test_consecutive_evictions_are_one_event() -> None:
    pool = SimulatedBlockPool(2)
    filled(pool, [1, 2])
    pool.release([1, 2], 0)
    pool.events()
    assert pool.take(1)
    assert pool.take(1)
    assert pool.events() == [Removed([2, 1])]


def test_inactive_block_is_reused_when_its_content_is_computed_again() -> None:
    pool = SimulatedBlockPool(4)
    filled(pool, [1])
    pool.release([1], 0)
    pool.events()
    filled(pool, [1])
    assert pool.events() == []
    assert pool.active == {1: 1}
    assert not pool.inactive
    pool.validate()


def test_blocks_shared_by_two_sequences_stay_active_when_one_is_released() -> None:
    pool = SimulatedBlockPool(8)
    filled(pool, [1, 2])
    filled(pool, [1, 2, 3, 4])
    pool.release([1, 2, 3, 4], 0)
    assert pool.active == {1: 1, 2: 1}
    assert pool.inactive == {3, 4}
    pool.validate()
    pool.events()
    assert pool.take(6)
    assert pool.events() == [Removed([4, 3])], "the last block becomes idle first"


def test_blocks_are_evicted_in_the_order_of_their_last_uses_and_parents_after_the_blocks_that_continue_them() -> None:
    pool = SimulatedBlockPool(6)
    uses = pool.evict_by_use()
    first, second = [1, 2, 3], [1, 4, 5]
    for hashes in (first, second):
        held = pool.match(hashes)
        pool.acquire(hashes[:held])
        assert pool.take(3 - held)
        pool.commit(hashes[held - 1] if held else None, hashes[held:], packed_hashes(hashes[held:]))
    uses.use(second, 5.0)  # Ends first, and was used last.
    pool.release(second, 0)
    uses.use(first, 3.0)
    pool.release(first, 0)
    pool.validate()
    pool.events()
    assert pool.take(4)
    assert pool.events() == [Removed([3, 2, 5])]
    assert pool.match([1, 4, 5]) == 2
    assert pool.take(2)
    assert pool.events() == [Removed([4, 1])]
    assert not pool.readable


def test_used_block_that_becomes_idle_again_is_evicted_by_its_new_use() -> None:
    pool = SimulatedBlockPool(2)
    uses = pool.evict_by_use()
    for number in (1, 2):
        assert pool.take(1)
        pool.commit(None, [number], packed_hashes([number]))
        uses.use([number], number)
        pool.release([number], 0)
    pool.acquire([1])
    uses.use([1], 3.0)
    pool.release([1], 0)
    pool.events()
    assert pool.take(2)
    assert pool.events() == [Removed([2, 1])]


def test_blocks_of_unknown_tokens_are_not_reported() -> None:
    pool = SimulatedBlockPool(4)
    assert pool.take(4)
    pool.commit(None, [1, 2, -1], packed_hashes([10, 20]))
    pool.commit(-1, [-2], b"")
    assert pool.events() == [Stored(None, None, [StoredBlock(1, 10), StoredBlock(2, 20)])]
    assert pool.used == 4
    pool.release([1, 2, -1, -2], 0)
    assert pool.take(1)
    assert pool.events() == []
    assert pool.take(2)
    assert pool.events() == [Removed([2])]
    pool.validate()


class PoolMachine(RuleBasedStateMachine):
    """Prompts of a small tree are computed, grow and end; the cache is compared with a list in the order of idleness."""

    @initialize(capacity=st.integers(4, 12), stale_max=st.sampled_from([0, 3, 4096]))
    def build(self, capacity: int, stale_max: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(eviction, "STALE_MAX", stale_max)
        self.pool = SimulatedBlockPool(capacity)
        self.holding: list[list[int]] = []
        self.idle: list[int] = []
        """Longest idle first."""
        self.reported: set[int] = set()

    @rule(path=st.lists(st.integers(1, 2), min_size=1, max_size=5))
    def admit(self, path: list[int]) -> None:
        hashes = [int("".join(map(str, path[: at + 1]))) for at in range(len(path))]
        readable = {*self.idle, *itertools.chain(*self.holding)}
        known = next((at for at, one in enumerate(hashes) if one not in readable), len(hashes))
        assert self.pool.match(hashes) == known
        price = sum(one in self.idle for one in hashes[:known])
        assert self.pool.price(hashes[:known]) == price
        if price + len(hashes) - known > self.pool.free:
            return
        self.pool.acquire(hashes[:known])
        self.idle = [one for one in self.idle if one not in hashes[:known]]
        assert self.pool.take(len(hashes) - known)
        self.evict()
        if known < len(hashes):
            packed = packed_hashes(hashes[known:])
            self.pool.commit(hashes[known - 1] if known else None, hashes[known:], packed)
        self.holding.append(hashes)

    @precondition(lambda self: self.holding)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        hashes = self.holding.pop(data.draw(st.integers(0, len(self.holding) - 1)))
        self.pool.release(hashes, 0)
        self.idle += [one for one in reversed(hashes) if one not in itertools.chain(*self.holding)]

    @rule(count=st.integers(1, 5))
    def take(self, count: int) -> None:
        assert self.pool.take(count) == (count <= self.pool.capacity - len({*itertools.chain(*self.holding)}))
        self.evict()
        self.pool.release([], self.pool.private)

    def evict(self) -> None:
        """Compare the evicted blocks with the blocks that are idle longest."""
        for event in self.pool.events():
            if isinstance(event, Removed):
                gone = len(event.block_hashes)
                assert event.block_hashes == self.idle[:gone]
                del self.idle[:gone]
                self.reported -= set(event.block_hashes)
            elif isinstance(event, Stored):
                self.reported.update(block.block_hash for block in event.blocks)

    @invariant()
    def balances(self) -> None:
        self.evict()
        self.pool.validate()
        assert self.pool.inactive == set(self.idle)
        assert self.pool.active == Counter(itertools.chain(*self.holding))
        assert self.reported == self.pool.active.keys() | self.pool.inactive

    def teardown(self) -> None:
        self.patch.undo()


TestPool = PoolMachine.TestCase
