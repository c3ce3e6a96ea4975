"""Blocks are shared by hash, kept while there is space, and reported."""

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
    assert list(pool.inactive) == [4, 3], "the last block becomes idle first"
    pool.validate()


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
    assert pool.inactive.take(3) == [3, 2, 5]
    assert pool.match([1, 4, 5]) == 2
    assert pool.inactive.take(2) == [4, 1]
    assert not pool.inactive


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
    assert pool.inactive.take(2) == [2, 1]
