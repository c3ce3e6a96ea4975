"""A slot has one state, a block is found only when it is complete, and none is lost."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo.kvbm.logical.blocks import BlockIdentity
from dynamo.kvbm.logical.eviction import LevelledLru, Lru
from dynamo.kvbm.logical.frequency import Sketch
from dynamo.kvbm.logical.pool import Pool


def pool(blocks: int = 4, **options: Any) -> Pool:
    return Pool(blocks, Lru(), **options)


def block(key: int, priority: int = 0) -> BlockIdentity:
    return BlockIdentity(key, key + 1000, key - 1 if key > 1 else None, priority)


def filled(machine: Pool, *keys: int, priority: int = 0) -> list[int]:
    slots = machine.allocate(len(keys))
    assert slots is not None
    for slot, key in zip(slots, keys, strict=True):
        machine.stage(slot, block(key, priority))
    return [machine.register(slot) for slot in slots]


def test_tier_pool_finds_a_registered_block() -> None:
    machine = pool()
    slots = machine.allocate(1)
    assert slots is not None
    assert machine.match([1]) == []
    machine.stage(slots[0], block(1))
    assert machine.match([1]) == []
    machine.register(slots[0])
    assert machine.match([1]) == slots
    machine.validate()


def test_tier_pool_prefix_ends_at_the_first_missing_block() -> None:
    machine = pool()
    slots = filled(machine, 1, 2, 4)
    assert machine.match([1, 2, 3, 4]) == slots[:2]
    assert machine.scan([1, 3, 4]) == {1: slots[0], 4: slots[2]}


def test_tier_pool_does_not_evict_referenced_blocks() -> None:
    machine = pool(2)
    slots = filled(machine, 1, 2)
    assert machine.allocate(1) is None
    machine.release(slots[:1])
    assert machine.allocate(2) is None
    assert machine.allocate(1) == slots[:1]
    assert 1 not in machine


def test_tier_pool_evicts_the_end_of_a_sequence_first() -> None:
    machine = pool(3)
    machine.release(filled(machine, 1, 2, 3))
    machine.allocate(1)
    assert [key in machine for key in (1, 2, 3)] == [True, True, False]


def test_tier_pool_keeps_valuable_blocks_longer() -> None:
    machine = pool(2)
    machine.release(filled(machine, 1, priority=50))
    machine.release(filled(machine, 2))
    machine.allocate(1)
    assert 1 in machine


def test_tier_pool_keeps_frequently_used_blocks_longer() -> None:
    sketch = Sketch(16)
    machine = Pool(2, LevelledLru(sketch.estimate))
    for _ in range(4):
        sketch.observe(1)
    machine.release(filled(machine, 1))
    machine.release(filled(machine, 2))
    machine.allocate(1)
    assert 1 in machine


def test_tier_pool_duplicate_returns_its_slot() -> None:
    machine = pool()
    first = filled(machine, 1)
    assert filled(machine, 1) == first
    assert machine.counts.duplicate_blocks == 1
    machine.release(first)
    machine.release(first)
    assert machine.available == 4
    machine.validate()


def test_tier_pool_without_retention_drops_released_blocks() -> None:
    machine = pool(is_keeping=False)
    slots = filled(machine, 1)
    assert machine.match([1]) == slots
    machine.release(slots)
    machine.release(slots)
    assert (1 in machine, machine.reset) == (False, 4)


def test_tier_pool_forgotten_block_stays_allocated_until_released() -> None:
    machine = pool()
    slots = filled(machine, 1)
    assert machine.forget(1)
    assert machine.match([1]) == []
    assert machine.held() == 1
    machine.release(slots)
    assert machine.reset == 4
    assert not machine.forget(1)


def test_tier_pool_refuses_a_double_release() -> None:
    machine = pool()
    slots = filled(machine, 1)
    machine.release(slots)
    with pytest.raises(AssertionError, match="twice"):
        machine.release(slots)


def test_tier_pool_finds_blocks_of_an_earlier_process() -> None:
    machine = pool()
    assert machine.restore({2: block(1), 0: block(2), 1: block(1)}) == [1]
    assert machine.match([1, 2]) == [2, 0]
    assert [change.identity.sequence_hash for change in machine.take_changes()] == [1, 2]
    machine.release([2, 0])
    machine.validate()
    assert machine.available == 4


class Machine(RuleBasedStateMachine):
    """Comparison with a model: the hash of each slot, and its reference count."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool(6)
        self.filling: list[int] = []
        self.staged: list[tuple[int, int]] = []
        self.held: list[tuple[int, int]] = []
        self.forgotten: list[int] = []

    @rule(count=st.integers(1, 3))
    def allocate(self, count: int) -> None:
        mine = {slot for slot, _ in (*self.staged, *self.held)} | {*self.filling, *self.forgotten}
        slots = self.pool.allocate(count)
        if slots is None:
            assert len(mine) + count > 6
        else:
            assert not mine & set(slots)
            self.filling += slots

    @precondition(lambda self: self.filling)
    @rule(key=st.integers(1, 9))
    def stage(self, key: int) -> None:
        slot = self.filling.pop()
        self.pool.stage(slot, block(key))
        self.staged.append((slot, key))

    @precondition(lambda self: self.staged)
    @rule()
    def register(self) -> None:
        slot, key = self.staged.pop()
        self.held.append((self.pool.register(slot), key))

    @rule(keys=st.lists(st.integers(1, 9), max_size=4))
    def match(self, keys: list[int]) -> None:
        slots = self.pool.match(keys)
        for slot, key in zip(slots, keys, strict=False):
            assert self.pool.identity(slot).sequence_hash == key
            self.held.append((slot, key))

    @precondition(lambda self: self.held)
    @rule(at=st.integers(0, 100))
    def release(self, at: int) -> None:
        slot, _ = self.held.pop(at % len(self.held))
        self.pool.release([slot])

    @precondition(lambda self: self.filling)
    @rule()
    def give_up(self) -> None:
        self.pool.release([self.filling.pop()])

    @rule(key=st.integers(1, 9))
    def forget(self, key: int) -> None:
        self.pool.forget(key)
        self.forgotten += [slot for slot, held in self.held if held == key]
        self.held = [one for one in self.held if one[1] != key]

    @precondition(lambda self: self.forgotten)
    @rule()
    def release_forgotten(self) -> None:
        self.pool.release([self.forgotten.pop()])

    @invariant()
    def nothing_is_lost(self) -> None:
        self.pool.validate()
        mine = {slot for slot, _ in (*self.staged, *self.held)} | {*self.filling, *self.forgotten}
        assert self.pool.held() == len(mine)
        for slot, key in self.held:
            assert self.pool.identity(slot).sequence_hash == key


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
