"""Blocks are shared by hash, kept while there is room, and reported."""

from dynamo.mocker.simulation.blocks import SimulatedBlockPool
from dynamo.protocols.kv_events import Removed, Stored, StoredBlock


def filled(pool: SimulatedBlockPool, hashes: list[int]) -> None:
    assert pool.take(len(hashes))
    pool.commit(None, hashes, [block_hash * 10 for block_hash in hashes])


def test_a_taken_block_is_used_and_a_released_one_free_again() -> None:
    pool = SimulatedBlockPool(4)
    assert pool.take(3)
    assert (pool.used, pool.free) == (3, 1)
    pool.release([], 3)
    assert (pool.used, pool.free) == (0, 4)
    pool.validate()


def test_nothing_is_taken_when_there_is_not_enough() -> None:
    pool = SimulatedBlockPool(4)
    assert not pool.take(5)
    assert pool.used == 0


def test_pool_reports_stored_blocks_once_with_their_parent() -> None:
    pool = SimulatedBlockPool(4)
    filled(pool, [1, 2])
    assert pool.events() == [Stored(None, None, [StoredBlock(1, 10), StoredBlock(2, 20)])]
    assert pool.take(2)
    pool.commit(None, [1, 2], [10, 20])
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


def test_a_released_block_stays_readable() -> None:
    pool = SimulatedBlockPool(4)
    filled(pool, [1, 2])
    pool.release([1, 2], 0)
    assert pool.used == 0
    assert pool.match([1, 2, 3]) == 2
    assert pool.price([1, 2]) == 2
    pool.acquire([1, 2])
    assert pool.active == {1: 1, 2: 1}
    pool.validate()


def test_the_last_block_of_a_prefix_is_evicted_before_its_parents() -> None:
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


def test_evictions_in_a_row_are_one_event() -> None:
    pool = SimulatedBlockPool(2)
    filled(pool, [1, 2])
    pool.release([1, 2], 0)
    pool.events()
    assert pool.take(1)
    assert pool.take(1)
    assert pool.events() == [Removed([2, 1])]


def test_a_block_that_lay_idle_is_taken_up_by_who_computed_it_again() -> None:
    pool = SimulatedBlockPool(4)
    filled(pool, [1])
    pool.release([1], 0)
    pool.events()
    filled(pool, [1])
    assert pool.events() == []
    assert pool.active == {1: 1}
    assert not pool.inactive
    pool.validate()
