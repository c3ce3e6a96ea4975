"""Predicted cache contents: blocks of routed prompts, for a limited time and size."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dynamo.kv_router.predicted import Predicted
from dynamo.kv_router.prompts import overlap_by_slot
from dynamo.kv_router.runs import pack

TTL_S = 10
prompts = st.lists(st.integers(0, 2), max_size=6)
slots = st.integers(0, 2)


class AgainstList(RuleBasedStateMachine):
    """Placements that expire."""

    def __init__(self) -> None:
        super().__init__()
        self.predicted = Predicted(ttl_s=TTL_S)
        self.placed: list[tuple[int, list[int], float]] = []
        self.now = 0.0

    @rule(slot=slots, prompt=prompts)
    def place(self, slot: int, prompt: list[int]) -> None:
        self.predicted.place(slot, pack(prompt), self.now)
        self.placed.append((slot, prompt, self.now))

    @rule(seconds=st.integers(1, 6))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(slot=slots)
    def drop(self, slot: int) -> None:
        self.predicted.drop(slot)
        self.placed = [one for one in self.placed if one[0] != slot]

    @rule(prompt=prompts)
    def send_request(self, prompt: list[int]) -> None:
        expected: dict[int, int] = {}
        for slot, other, at in self.placed:
            same = 0
            while same < min(len(prompt), len(other)) and prompt[same] == other[same]:
                same += 1
            if same and self.now - at < TTL_S:
                expected[slot] = max(same, expected.get(slot, 0))
        assert overlap_by_slot(self.predicted.overlap(pack(prompt), self.now)) == expected

    @invariant()
    def is_consistent(self) -> None:
        self.predicted.validate()


AgainstList.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestAgainstList = AgainstList.TestCase


def test_predicted_index_without_ttl_evicts_the_oldest_prompt() -> None:
    predicted = Predicted(ttl_s=None)
    predicted.place(0, pack([1, 2, 3]), 0, capacity=5)
    predicted.place(0, pack([4, 5]), 1, capacity=5)
    predicted.place(0, pack([1, 2, 9]), 2, capacity=5)
    assert overlap_by_slot(predicted.overlap(pack([1, 2, 3]), 1e9)) == {0: 2}
    assert overlap_by_slot(predicted.overlap(pack([4, 5]), 1e9)) == {0: 2}
    assert predicted.blocks(0) == 5
    predicted.place(0, pack([7]), 3, capacity=5)
    assert predicted.overlap(pack([4, 5]), 1e9) == []
    predicted.validate()


def test_predicted_index_accepts_a_prompt_larger_than_its_bound() -> None:
    predicted = Predicted(ttl_s=None)
    predicted.place(0, pack([1, 2, 3]), 0, capacity=2)
    assert predicted.blocks(0) == 3
