"""No block is read before it is complete, and each hash has one content, for any order of events."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo.kvbm.logical.blocks import BlockIdentity, Tier
from dynamo.kvbm.logical.book import Book, TierCopy
from dynamo.kvbm.logical.eviction import Lru
from dynamo.kvbm.logical.frequency import RepeatFilter, Sketch
from dynamo.kvbm.logical.policies import Policy, Rule
from dynamo.kvbm.logical.pool import Pool


def book(
    host: int = 8, disk: int = 8, *, objects: int = 0, queue_max: int = 4, repeats: bool = False, priority_min: int = 0
) -> Book:
    sketch = Sketch(64)
    lower = {Tier.DISK: Pool(disk, Lru())} if disk else {}
    if objects:
        lower[Tier.OBJECT] = Pool(objects, Lru())
    policy = Policy((Rule.PRESENCE,), sketch, repeats=RepeatFilter() if repeats else None)
    return Book(
        Pool(host, Lru()),
        lower,
        to_host=Policy((Rule.PRESENCE,), sketch),
        to_lower=dict.fromkeys(lower, policy),
        sketch=sketch,
        queue_max=queue_max,
        priority_min=priority_min,
    )


def block(key: int, priority: int = 0) -> BlockIdentity:
    return BlockIdentity(key, key + 1000, key - 1 if key > 1 else None, priority)


def offload(machine: Book, *keys: int) -> list[int]:
    """Those that the host took."""
    chosen = machine.worthy([block(key) for key in keys], 0.0)
    slots = machine.admit(len(chosen))
    for slot, identity in zip(slots, chosen, strict=False):
        machine.admitted(slot, identity, 0.0)
    machine.validate()
    return [identity.sequence_hash for identity, _ in zip(chosen, slots, strict=False)]


def to_disk(machine: Book) -> list[int]:
    copies = machine.take_offloads(Tier.DISK, 100)
    for copy in copies:
        machine.offloaded(copy, is_whole=True)
    return [copy.identity.sequence_hash for copy in copies]


def test_kv_book_offloads_a_block_once() -> None:
    machine = book()
    assert offload(machine, 1, 2) == [1, 2]
    assert offload(machine, 1, 2, 3) == [3]


def test_kv_book_does_not_offload_children_of_low_value_blocks() -> None:
    machine = book(priority_min=10)
    blocks = [block(1, 50), block(2, 9), block(3, 50)]
    assert machine.worthy(blocks, 0.0) == blocks[:1]


def test_kv_book_moves_blocks_to_disk_and_back() -> None:
    machine = book(host=2)
    offload(machine, 1, 2)
    assert to_disk(machine) == [1, 2]
    offload(machine, 3, 4)
    assert to_disk(machine) == [3, 4]
    assert [copy.identity.sequence_hash for copy in machine.take_onboards([block(1), block(2)]).copies] == [1, 2]


def test_kv_book_onboarding_holds_both_ends_until_done() -> None:
    machine = book(host=2, disk=4)
    offload(machine, 1)
    assert to_disk(machine) == [1]
    offload(machine, 2, 3)
    to_disk(machine)
    assert 1 not in machine.host
    assert machine.reach([1])
    found = machine.take_onboards([block(1)])
    (copy,) = found.copies
    assert machine.find([1], 0.0) == []
    slot = machine.onboarded(copy, is_whole=True)
    assert slot is not None
    assert machine.find([1], 0.0) == [slot]
    machine.host.release([slot, slot])
    machine.validate()


def test_kv_book_forgets_a_corrupt_block() -> None:
    machine = book(host=2)
    offload(machine, 1)
    to_disk(machine)
    offload(machine, 2, 3)
    to_disk(machine)
    (copy,) = machine.take_onboards([block(1)]).copies
    assert machine.onboarded(copy, is_whole=False, is_corrupt=True) is None
    assert 1 not in machine.lower[Tier.DISK]
    assert machine.counts.corrupt == 1


def test_kv_book_rejects_blocks_beyond_its_queue() -> None:
    machine = book(queue_max=2)
    offload(machine, 1, 2, 3, 4)
    assert machine.waiting(Tier.DISK) == 2
    assert machine.counts.dropped == 2


def test_kv_book_writes_only_reused_blocks_to_disk() -> None:
    machine = book(repeats=True)
    offload(machine, 1, 2)
    assert to_disk(machine) == []
    machine.host.release(machine.find([1], 1.0))
    assert to_disk(machine) == [1]


def test_kv_book_skips_a_paused_tier() -> None:
    machine = book()
    machine.paused.add(Tier.DISK)
    offload(machine, 1)
    assert machine.waiting(Tier.DISK) == 0


def test_kv_book_may_contain_unknown_objects() -> None:
    machine = book(disk=0, objects=4)
    assert machine.reach([1])
    found = machine.take_onboards([block(1), block(2)])
    first, second = found.copies
    assert (first.lower, second.lower) == (None, None)
    slot = machine.onboarded(first, is_whole=True)
    assert slot is not None
    machine.onboarded(second, is_whole=False)
    assert 1 in machine.lower[Tier.OBJECT]
    assert 2 not in machine.lower[Tier.OBJECT]
    machine.host.release([slot])
    machine.validate()


def test_kv_book_clear_cancels_copies_in_flight() -> None:
    machine = book()
    offload(machine, 1)
    (copy,) = machine.take_offloads(Tier.DISK, 1)
    machine.clear()
    machine.offloaded(copy, is_whole=True)
    machine.validate()
    assert 1 not in machine.lower[Tier.DISK]
    assert machine.host.held() == 0


class Machine(RuleBasedStateMachine):
    """The bytes are played by numbers, and copies end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.book = book(host=5, disk=4, objects=3, queue_max=3)
        self.host: dict[int, int] = {}
        self.lower: dict[tuple[Tier, int], int] = {}
        self.store: set[int] = set()
        self.filling: list[tuple[int, BlockIdentity]] = []
        self.out: list[TierCopy] = []
        self.back: list[TierCopy] = []
        self.held: list[int] = []

    @rule(first=st.integers(1, 8), count=st.integers(1, 3))
    def offload(self, first: int, count: int) -> None:
        chosen = self.book.worthy([block(key) for key in range(first, first + count)], 0.0)
        slots = self.book.admit(len(chosen))
        for slot, identity in zip(slots, chosen, strict=False):
            self.host[slot] = -1  # Half written.
            self.filling.append((slot, identity))

    @precondition(lambda self: self.filling)
    @rule(at=st.integers(0, 100))
    def admitted(self, at: int) -> None:
        slot, identity = self.filling.pop(at % len(self.filling))
        self.host[slot] = identity.sequence_hash
        self.book.admitted(slot, identity, 0.0)

    @rule(first=st.integers(1, 8), count=st.integers(1, 4))
    def find(self, first: int, count: int) -> None:
        slots = self.book.find(range(first, first + count), 0.0)
        assert [self.host[slot] for slot in slots] == list(range(first, first + len(slots)))
        self.held += slots

    @precondition(lambda self: self.held)
    @rule(at=st.integers(0, 100))
    def release(self, at: int) -> None:
        self.book.host.release([self.held.pop(at % len(self.held))])

    @rule(tier=st.sampled_from([Tier.DISK, Tier.OBJECT]), limit=st.integers(1, 3))
    def begin_offloads(self, tier: Tier, limit: int) -> None:
        for copy in self.book.take_offloads(tier, limit):
            assert copy.lower is not None
            self.lower[(tier, copy.lower)] = -1
            self.out.append(copy)

    @precondition(lambda self: self.out)
    @rule(at=st.integers(0, 100), is_whole=st.booleans())
    def end_offload(self, at: int, is_whole: bool) -> None:
        copy = self.out.pop(at % len(self.out))
        key = self.host[copy.host]
        assert key == copy.identity.sequence_hash, "a block was given away while it was copied"
        if is_whole and copy.lower is not None:
            self.lower[(copy.tier, copy.lower)] = key
            if copy.tier is Tier.OBJECT:
                self.store.add(key)
        self.book.offloaded(copy, is_whole=is_whole)

    @rule(first=st.integers(1, 8), count=st.integers(1, 4))
    def begin_onboards(self, first: int, count: int) -> None:
        found = self.book.take_onboards([block(key) for key in range(first, first + count)])
        for copy in found.copies:
            self.host[copy.host] = -1
        self.back += found.copies
        self.held += found.held

    @precondition(lambda self: self.back)
    @rule(at=st.integers(0, 100), outcome=st.sampled_from(["whole", "corrupt", "cancelled"]))
    def end_onboard(self, at: int, outcome: str) -> None:
        copy = self.back.pop(at % len(self.back))
        key = copy.identity.sequence_hash
        if copy.lower is not None and copy.tier is Tier.DISK:
            assert self.lower[(copy.tier, copy.lower)] == key, "a block was given away while it was read"
        if outcome == "cancelled":
            self.book.cancelled(copy)
            return
        is_whole = outcome == "whole" and (copy.tier is Tier.DISK or key in self.store)
        if is_whole:
            self.host[copy.host] = key
        slot = self.book.onboarded(copy, is_whole=is_whole, is_corrupt=outcome == "corrupt")
        assert (slot is not None) <= is_whole
        if slot is not None:
            self.held.append(slot)

    @rule()
    def clear(self) -> None:
        if not self.filling and not self.held:
            self.book.clear()

    @invariant()
    def nothing_is_lost(self) -> None:
        self.book.validate()
        queued = sum(self.book.waiting(tier) for tier in self.book.lower)
        busy = {slot for slot, _ in self.filling} | set(self.held)
        busy |= {copy.host for copy in (*self.out, *self.back)}
        assert len(busy) <= self.book.host.held() <= len(busy) + queued


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
