from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo.cpu.blocks import BlockContent, KvBlockPool
from dynamo.protocols.kv_events import Cleared, Removed, Stored
from dynamo.tokens.hashing import next_sequence_hash


def chain(*tokens_hashes: int) -> list[int]:
    hashes: list[int] = []
    for tokens_hash in tokens_hashes:
        hashes.append(next_sequence_hash(hashes[-1] if hashes else None, tokens_hash))
    return hashes


def stored(pool: KvBlockPool, *tokens_hashes: int) -> list[int]:
    """Blocks with this content, held."""
    blocks = pool.allocate(len(tokens_hashes))
    assert blocks is not None
    contents = [
        BlockContent(block, hash_, tokens_hash)
        for block, hash_, tokens_hash in zip(blocks, chain(*tokens_hashes), tokens_hashes, strict=True)
    ]
    pool.store(None, contents)
    return blocks


def test_block_pool_finds_a_stored_prefix() -> None:
    pool = KvBlockPool(8)
    blocks = stored(pool, 1, 2, 3)
    assert pool.acquire(chain(1, 2, 9)) == blocks[:2]
    assert pool.acquire(chain(4)) == []
    pool.validate()


def test_block_pool_reuses_a_released_block_until_evicted() -> None:
    pool = KvBlockPool(4)
    blocks = stored(pool, 1, 2)
    pool.release(blocks)
    assert (pool.free, pool.used) == (4, 0)
    assert pool.acquire(chain(1, 2)) == blocks
    pool.release(blocks)
    assert pool.allocate(4) is not None
    assert pool.acquire(chain(1)) == []
    pool.validate()


def test_block_pool_keeps_a_shared_block_until_all_release_it() -> None:
    pool = KvBlockPool(2)
    blocks = stored(pool, 1)
    assert pool.acquire(chain(1)) == blocks
    pool.release(blocks)
    assert pool.allocate(2) is None
    pool.release(blocks)
    assert pool.allocate(2) is not None


def test_block_pool_evicts_the_end_of_a_sequence_first() -> None:
    pool = KvBlockPool(20)
    pool.release(stored(pool, *range(20)))
    assert pool.allocate(3) is not None
    assert len(pool.acquire(chain(*range(20)))) == 17


def test_block_pool_of_a_large_cache_evicts_in_batches() -> None:
    pool = KvBlockPool(640)
    pool.release(stored(pool, *range(640)))
    blocks = pool.allocate(1)
    assert blocks is not None
    assert len(pool.acquire(chain(*range(640)))) == 632
    assert pool.allocate(1, after=blocks[0]) == [blocks[0] + 1]


def test_block_pool_evicts_the_least_recently_used_first() -> None:
    pool = KvBlockPool(20)
    old, new = stored(pool, *range(10)), stored(pool, *range(100, 110))
    pool.release(old)
    pool.release(new)
    pool.release(pool.acquire(chain(*range(10))))
    assert pool.allocate(5) is not None
    assert len(pool.acquire(chain(*range(10)))) == 10
    assert len(pool.acquire(chain(*range(100, 110)))) == 5


def test_block_pool_allocates_contiguous_blocks_where_possible() -> None:
    pool = KvBlockPool(32)
    first = pool.allocate(5)
    second = pool.allocate(5)
    assert first is not None
    assert second is not None
    assert all(b == a + 1 for blocks in (first, second) for a, b in pairwise(blocks))
    assert pool.allocate(1, after=first[-1]) == [first[-1] + 1]
    assert pool.allocate(1, after=second[-1]) == [second[-1] + 1]
    assert pool.allocate(20) is not None
    pool.validate()


def test_block_pool_allocates_all_blocks_or_none() -> None:
    pool = KvBlockPool(3)
    assert pool.allocate(4) is None
    assert pool.free == 3


def test_block_pool_emits_events_in_order() -> None:
    pool = KvBlockPool(2)
    pool.release(stored(pool, 1, 2))
    again = pool.allocate(2)
    assert again is not None
    pool.clear()
    events = pool.take_events()
    assert [type(event) for event in events] == [Stored, Removed, Cleared]
    reported, removed = events[0], events[1]
    assert isinstance(reported, Stored)
    assert isinstance(removed, Removed)
    assert reported.parent_hash is None
    assert [(block.block_hash, block.tokens_hash) for block in reported.blocks] == list(
        zip(chain(1, 2), (1, 2), strict=True)
    )
    assert sorted(removed.block_hashes) == sorted(chain(1, 2))
    assert pool.take_events() == []


def test_block_pool_does_not_emit_stored_content_twice() -> None:
    pool = KvBlockPool(8)
    stored(pool, 1, 2)
    pool.take_events()
    stored(pool, 1, 2, 3)
    (event,) = pool.take_events()
    assert isinstance(event, Stored)
    assert event.parent_hash == chain(1, 2)[-1]
    assert [block.tokens_hash for block in event.blocks] == [3]
    pool.validate()


def test_block_pool_skips_content_whose_parent_was_evicted() -> None:
    pool = KvBlockPool(8)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.store(chain(1)[0], [BlockContent(blocks[0], chain(1, 2)[1], 2)])
    assert pool.take_events() == []
    pool.release(blocks)
    assert pool.free == 8
    pool.validate()


def test_block_pool_clear_keeps_blocks_in_use() -> None:
    pool = KvBlockPool(8)
    blocks = stored(pool, 1, 2)
    pool.release(stored(pool, 5))
    pool.clear()
    assert pool.acquire(chain(1)) == pool.acquire(chain(5)) == []
    assert pool.used == 2
    pool.release(blocks)
    assert pool.free == 8
    pool.validate()


def test_block_pool_without_caching_stores_and_emits_nothing() -> None:
    pool = KvBlockPool(4, is_caching=False)
    pool.release(stored(pool, 1))
    assert pool.acquire(chain(1)) == []
    assert pool.take_events() == []


def test_block_pool_double_release_is_an_error() -> None:
    pool = KvBlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


class Pool(RuleBasedStateMachine):
    """No block is lost or allocated twice, and the events equal the cached blocks, for any order of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = KvBlockPool(24)
        self.held: list[list[int]] = []
        self.reported: set[int] = set()

    @rule(count=st.integers(1, 9), follows=st.booleans())
    def allocate(self, count: int, follows: bool) -> None:
        free = self.pool.free
        after = self.held[-1][-1] if follows and self.held else None
        blocks = self.pool.allocate(count, after)
        assert (blocks is None) == (count > free)
        if blocks is not None:
            assert len(set(blocks)) == count
            assert not set(blocks) & {block for held in self.held for block in held}
            self.held.append(blocks)

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def store(self, tokens: list[int]) -> None:
        if self.pool.free >= len(tokens):
            self.held.append(stored(self.pool, *tokens))

    @rule(tokens=st.lists(st.integers(0, 2), max_size=6))
    def acquire(self, tokens: list[int]) -> None:
        hashes = chain(*tokens)
        blocks = self.pool.acquire(hashes)
        self.apply_events()
        known = [hash_ in self.reported for hash_ in hashes]
        assert len(blocks) == (known.index(False) if False in known else len(known))
        if blocks:
            self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule()
    def clear(self) -> None:
        self.pool.clear()

    def apply_events(self) -> None:
        for event in self.pool.take_events():
            if isinstance(event, Stored):
                assert event.parent_hash is None or event.parent_hash in self.reported
                fresh = {block.block_hash for block in event.blocks}
                assert not fresh & self.reported
                self.reported |= fresh
            elif isinstance(event, Removed):
                assert set(event.block_hashes) <= self.reported
                self.reported -= set(event.block_hashes)
            else:
                self.reported.clear()

    @invariant()
    def is_whole(self) -> None:
        self.apply_events()
        self.pool.validate()
        assert self.pool.used == len({block for held in self.held for block in held})


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
