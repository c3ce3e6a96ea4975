"""The index equals a table of sets for any order of events, and keeps no unreachable entry."""

import gc
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dynamo.kv_router.index import KvIndex
from dynamo.kv_router.names import CommonNames, Names, PythonNames
from dynamo.kv_router.runs import DEVICE, TIERS, common, pack, slots_of, trailing_ones, unpack
from dynamo.protocols.kv_events import Stored

Path = tuple[int, ...]
HOST = 1
DISK = 2


class Table:
    """Reference index: each rank's keys, their prefixes, and their tiers."""

    def __init__(self) -> None:
        self.ranks: dict[tuple[int, int], dict[int, tuple[Path, set[int]]]] = {}

    def store(self, rank: tuple[int, int], parent: int | None, keys: list[int], hashes: list[int], tier: int) -> bool:
        named = self.ranks.setdefault(rank, {}) if parent is None else self.ranks.get(rank, {})
        if parent is not None and parent not in named:
            return False
        before = parent
        for key, tokens_hash in zip(keys, hashes, strict=True):
            path = (*(named[before][0] if before is not None else ()), tokens_hash)
            if key in named and named[key][0] != path:
                del named[key]
                if before is not None and before not in named:
                    return False
            tiers = named.pop(key, (path, set()))[1]
            for other in [other for other, (its, _) in named.items() if its == path]:
                tiers |= named.pop(other)[1]
            named[key] = (path, tiers | {tier})
            before = key
        return True

    def remove(self, rank: tuple[int, int], keys: list[int], tier: int) -> None:
        named = self.ranks.get(rank, {})
        for key in keys:
            if key in named and tier in named[key][1]:
                named[key][1].discard(tier)
                if not named[key][1]:
                    del named[key]

    def paths(self, rank: tuple[int, int], tier: int) -> set[Path]:
        return {path for path, tiers in self.ranks.get(rank, {}).values() if tier in tiers}

    def depth(self, rank: tuple[int, int], prompt: Path) -> int:
        return self.beyond(rank, prompt, 0, DEVICE)

    def beyond(self, rank: tuple[int, int], prompt: Path, depth: int, tier: int) -> int:
        held, found = self.paths(rank, tier), 0
        while depth + found < len(prompt) and prompt[: depth + found + 1] in held:
            found += 1
        return found


RANKS = [(1, 0), (1, 1), (2, 0), (3, 0)]
ranks = st.sampled_from(RANKS)
tiers = st.sampled_from([DEVICE, DEVICE, DEVICE, HOST, DISK])
words = st.lists(st.integers(0, 2), min_size=1, max_size=5)


class AgainstTable(RuleBasedStateMachine):
    """Every event in any order, with keys that mean the same to all ranks, or something else to some."""

    names: type[Names] = CommonNames

    @initialize(only_device=st.booleans(), own_keys=st.booleans())
    def begin(self, only_device: bool, own_keys: bool) -> None:
        self.index, self.table = KvIndex(names=self.names()), Table()
        self.only_device, self.own_keys = only_device, own_keys

    def key(self, rank: tuple[int, int], path: Path) -> int:
        """A key that follows from the prefix, and in half the runs from the rank as well."""
        return hash((rank if self.own_keys and rank != RANKS[0] else 0, path)) & (1 << 63) - 1

    @rule(rank=ranks, prefix=st.lists(st.integers(0, 2), max_size=4), more=words, tier=tiers)
    def store(self, rank: tuple[int, int], prefix: list[int], more: list[int], tier: int) -> None:
        tier = DEVICE if self.only_device else tier
        whole = (*prefix, *more)
        parent = self.key(rank, tuple(prefix)) if prefix else None
        keys = [self.key(rank, whole[: len(prefix) + n + 1]) for n in range(len(more))]
        known = self.table.store(rank, parent, keys, more, tier)
        assert self.index.store(*rank, parent, list(keys), pack(more), tier) == known

    @rule(
        rank=ranks,
        parent=st.none() | st.integers(0, 3),
        keys=st.lists(st.integers(0, 3), min_size=1, max_size=3),
        data=st.data(),
    )
    def store_under_reused_keys(
        self, rank: tuple[int, int], parent: int | None, keys: list[int], data: st.DataObject
    ) -> None:
        hashes = data.draw(st.lists(st.integers(0, 2), min_size=len(keys), max_size=len(keys)))
        known = self.table.store(rank, parent, keys, hashes, DEVICE)
        assert self.index.store(*rank, parent, list(keys), pack(hashes)) == known

    @rule(rank=ranks, prompt=words, start=st.integers(0, 4), tier=tiers, backwards=st.booleans())
    def remove(self, rank: tuple[int, int], prompt: list[int], start: int, tier: int, backwards: bool) -> None:
        keys = [self.key(rank, tuple(prompt[: n + 1])) for n in range(start, len(prompt))]
        keys = keys[::-1] if backwards else keys
        self.table.remove(rank, keys, tier)
        self.index.remove(*rank, keys, tier)

    @rule(rank=ranks, keys=st.lists(st.integers(0, 3), max_size=3))
    def remove_reused_keys(self, rank: tuple[int, int], keys: list[int]) -> None:
        self.table.remove(rank, keys, DEVICE)
        self.index.remove(*rank, keys)

    @rule(rank=ranks)
    def clear(self, rank: tuple[int, int]) -> None:
        self.table.ranks.pop(rank, None)
        self.index.clear(*rank)

    @rule(worker=st.integers(1, 3))
    def leave(self, worker: int) -> None:
        self.table.ranks = {rank: named for rank, named in self.table.ranks.items() if rank[0] != worker}
        self.index.remove_worker(worker)

    @rule(limit=st.integers(1, 4))
    def sweep(self, limit: int) -> None:
        self.index.sweep(limit)

    @rule()
    def reload(self) -> None:
        fresh = KvIndex(names=self.names())
        for worker, dp_rank, tier, event in self.index.dump():
            if isinstance(event, Stored):
                keys = [block.block_hash for block in event.blocks]
                blocks = pack([block.tokens_hash for block in event.blocks])
                assert fresh.store(worker, dp_rank, event.parent_hash, keys, blocks, tier)
            else:
                assert fresh.remove(worker, dp_rank, event.block_hashes, tier)
        self.index = fresh

    @rule(prompt=st.lists(st.integers(0, 2), max_size=8))
    def send_request(self, prompt: list[int]) -> None:
        overlap = self.index.find(pack(prompt))
        found = self.index.depth_by_rank(overlap)
        assert found == {rank: n for rank in RANKS if (n := self.table.depth(rank, tuple(prompt)))}
        if self.only_device:
            return
        for rank in self.index.ranks():
            slot = self.index.slot_of(*rank)
            depth = found.get(rank, 0)
            on_host = self.index.beyond(overlap, slot, depth, HOST)
            assert on_host == self.table.beyond(rank, tuple(prompt), depth, HOST)
            on_disk = self.index.beyond(overlap, slot, depth + on_host, DISK)
            assert on_disk == self.table.beyond(rank, tuple(prompt), depth + on_host, DISK)

    @invariant()
    def is_consistent(self) -> None:
        self.index.validate()
        for rank in RANKS:
            assert self.index.held(*rank) == len(self.table.ranks.get(rank, {}))

    def teardown(self) -> None:
        if not hasattr(self, "index"):
            return
        while self.index.sweep():
            pass
        live = {
            path[: n + 1]
            for rank in RANKS
            for tier in range(len(TIERS))
            for path in self.table.paths(rank, tier)
            for n in range(len(path))
        }
        assert self.index.size == len(live), "the size follows from what is held and what leads to it"
        for rank in RANKS:
            self.index.clear(*rank)
        while self.index.sweep(1):
            pass
        assert self.index.size == 0
        self.index.validate()


AgainstTable.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestAgainstTable = AgainstTable.TestCase


class WithoutCompiler(AgainstTable):
    """The same tests without the compiled module."""

    names = PythonNames


WithoutCompiler.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestWithoutCompiler = WithoutCompiler.TestCase


def test_index_that_is_dropped_leaves_no_memory() -> None:
    freed: list[int] = []

    class Key(int):
        """Key that reports when it is freed."""

        def __del__(self) -> None:
            freed.append(int(self))

    index = KvIndex()
    index.store(1, 0, None, [Key(7), Key(8)], pack([1, 2]))
    index.store(1, 0, 7, [Key(9)], pack([3]))
    index.store(1, 0, None, [Key(10)], pack([4]))
    assert not freed
    del index
    gc.collect()
    assert sorted(freed) == [7, 8, 9, 10]


def test_kv_index_evicts_the_least_recently_used_blocks_when_full_and_refuses_their_children() -> None:
    index = KvIndex(blocks_max=8)
    for number in range(3):
        index.store(1, 0, None, [number * 10 + n for n in range(4)], pack([number * 10 + n for n in range(4)]))
        index.find(pack([0, 1]))
    assert index.size == 8
    assert index.counts.evicted == 4
    assert index.depth_by_rank(index.find(pack([0, 1, 2, 3]))) == {(1, 0): 4}
    assert index.depth_by_rank(index.find(pack([10, 11]))) == {}
    index.validate()
    assert not index.store(1, 0, 13, [14], pack([14])), "what was forgotten is no parent any more"


@pytest.mark.parametrize("seed", range(20))
def test_kv_index_never_exceeds_its_bound(seed: int) -> None:
    rng, index = random.Random(seed), KvIndex(blocks_max=60)
    for _ in range(300):
        worker, start, length = rng.randrange(3), rng.randrange(6), rng.randrange(1, 12)
        prompt = [start, *(rng.randrange(2) for _ in range(length))]
        keys = [hash(tuple(prompt[: n + 1])) for n in range(len(prompt))]
        index.store(worker, 0, None, keys, pack(prompt), rng.choice([0, 0, 1]))
        if rng.random() < 0.2:
            index.remove(worker, 0, keys[::-1][: rng.randrange(1, 4)])
        assert index.size <= 60
        index.validate()


def test_kv_index_omits_a_removed_worker_and_reuses_its_slot_after_the_sweep() -> None:
    index = KvIndex()
    for worker in (1, 2):
        index.store(worker, 0, None, [7, 8, 9], pack([7, 8, 9]))
    index.remove_worker(1)
    assert index.depth_by_rank(index.find(pack([7, 8]))) == {(2, 0): 2}
    index.store(3, 0, None, [7], pack([7]))
    assert index.depth_by_rank(index.find(pack([7, 8]))) == {(2, 0): 2, (3, 0): 1}
    index.validate()


def test_kv_index_spreads_many_keys_over_several_tables() -> None:
    index = KvIndex()
    before = None
    for start in range(0, 300_000, 1000):
        keys = list(range(start, start + 1000))
        assert index.store(1, 0, before, keys, pack(keys))
        before = keys[-1]
    assert index.held(1) == 300_000
    assert index.find(pack(list(range(300_000)))).depths == [(300_000, 1)]
    assert index.remove(1, 0, list(range(299_999, 100_000, -1)))
    assert index.size == index.held(1) == 100_001


def test_index_helpers_compute_common_blocks_and_slots() -> None:
    assert common(pack([1, 2, 3]), pack([9, 1, 2, 4]), 8) == 2
    assert common(pack([1, 2, 3]), pack([1, 2, 3, 4]), 0) == 3
    assert [trailing_ones(bits) for bits in (0, 1, 0b1011, 0b0111)] == [0, 1, 2, 3]
    assert unpack(pack([1, 2**64 - 1])) == (1, 2**64 - 1)
    assert list(slots_of(0b1010001)) == [0, 4, 6]
