"""Active load equals the sum of the requests in flight, for any sequence of events."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dynamo.kv_router.active import RECENT_SLOT_REQUESTS, ActiveLoad
from dynamo.kv_router.prompts import overlap_by_slot
from dynamo.kv_router.runs import pack

prompts = st.lists(st.integers(0, 2), max_size=6)
slots = st.integers(0, 3)
names = st.sampled_from("abcdef")


class AgainstSums(RuleBasedStateMachine):
    """Any requests on four slots."""

    def __init__(self) -> None:
        super().__init__()
        self.load = ActiveLoad(expiry_s=10)
        self.load.reach(3)
        self.under_way: dict[str, tuple[int, list[int], float]] = {}
        self.now = 0.0
        self.recent = [0.0] * 4

    @rule(name=names, slot=slots, prompt=prompts, tokens=st.integers(0, 9))
    def book(self, name: str, slot: int, prompt: list[int], tokens: int) -> None:
        self.load.book(name, slot, pack(prompt), prefill_tokens=tokens, now=self.now)
        self.under_way.pop(name, None)
        self.under_way[name] = (slot, prompt, self.now)
        self.recent = [count / (1 + 1 / (RECENT_SLOT_REQUESTS * 4)) for count in self.recent]
        self.recent[slot] += 1

    @rule(name=names)
    def prefilled(self, name: str) -> None:
        assert self.load.prefilled(name) == (name in self.under_way)

    @rule(name=names, weight=st.none() | st.floats(0, 1))
    def grow(self, name: str, weight: float | None) -> None:
        assert self.load.grow(name, weight) == (name in self.under_way)

    @rule(name=names)
    def finish(self, name: str) -> None:
        assert self.load.finish(name) == (self.under_way.pop(name, None) is not None)

    @rule(slot=slots)
    def drop(self, slot: int) -> None:
        gone = {name for name, (its, _, _) in self.under_way.items() if its == slot}
        assert set(self.load.drop(slot)) == gone
        self.recent[slot] = 0.0
        self.under_way = {name: one for name, one in self.under_way.items() if name not in gone}

    @rule(seconds=st.integers(1, 6))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        gone = {name for name, (_, _, at) in self.under_way.items() if self.now - at >= 10}
        assert set(self.load.expire(self.now)) == gone
        self.under_way = {name: one for name, one in self.under_way.items() if name not in gone}

    @rule(prompt=prompts)
    def send_request(self, prompt: list[int]) -> None:
        expected: dict[int, int] = {}
        for slot, other, _ in self.under_way.values():
            same = 0
            while same < min(len(prompt), len(other)) and prompt[same] == other[same]:
                same += 1
            if same:
                expected[slot] = max(same, expected.get(slot, 0))
        assert overlap_by_slot(self.load.overlap(pack(prompt))) == expected

    @invariant()
    def is_consistent(self) -> None:
        self.load.validate()
        assert len(self.load) == len(self.under_way)
        of_mean = 4 / sum(self.recent) if any(self.recent) else 0.0
        scale = self.load.recent_scale(4)
        assert [scale * count for count in self.load.recent] == pytest.approx(
            [of_mean * count for count in self.recent]
        )


AgainstSums.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestAgainstSums = AgainstSums.TestCase


def test_active_slots_count_shared_blocks_once() -> None:
    load = ActiveLoad()
    load.book("a", 0, pack([1, 2, 3]), prefill_tokens=12, now=0)
    load.book("b", 0, pack([1, 2, 9, 9]), prefill_tokens=8, now=0)
    load.book("c", 1, pack([1, 2]), prefill_tokens=8, now=0)
    assert (list(load.blocks), list(load.prefill_tokens), list(load.requests)) == ([5, 2], [20, 8], [2, 1])
    load.finish("a")
    assert list(load.blocks) == [4, 2]


def test_recent_requests_remain_comparable_over_many_requests() -> None:
    load = ActiveLoad()
    for at in range(40_000):
        load.book("a", at % 2, pack([1]), prefill_tokens=4, now=0)
    for _ in range(5):
        load.book("a", 1, pack([1]), prefill_tokens=4, now=0)
    scale = load.recent_scale(2)
    assert [scale * count for count in load.recent] == pytest.approx([0.9, 1.1], abs=0.02)


def test_active_slots_count_unshared_blocks_for_each_request() -> None:
    load = ActiveLoad(shares_blocks=False)
    for name in "ab":
        load.book(name, 0, pack([1, 2]), prefill_tokens=8, now=0)
    assert list(load.blocks) == [4]
    assert load.overlap(pack([1, 2])) == []


def test_active_slots_weight_output_by_its_remaining_length() -> None:
    load = ActiveLoad()
    load.book("a", 0, pack([1, 2]), prefill_tokens=8, now=0)
    load.book("b", 0, pack([1]), prefill_tokens=4, now=0)
    load.grow("a")
    assert list(load.blocks) == [3]
    load.grow("a", 0.5)
    assert list(load.blocks) == [1 + 0.5 * 3], "the block that it shares counts in full"
    load.finish("a")
    assert list(load.blocks) == [1]
