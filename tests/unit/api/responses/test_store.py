"""Responses in this process's memory."""

from collections.abc import Coroutine
from typing import Any, TypeVar

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dynamo.api.responses.store import Dropped, MemoryResponseStore, StoreLimits
from dynamo.core.clock import ManualClock
from dynamo.core.metrics import MetricsRegistry

T = TypeVar("T")


def ended(work: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("it waited")


class House:
    def __init__(self, limits: StoreLimits) -> None:
        self.clock = ManualClock()
        self.registry = MetricsRegistry()
        self.store = MemoryResponseStore(limits, Dropped(self.registry, "x"), self.clock)

    def get(self, key: str) -> bytes | None:
        return ended(self.store.get(key))

    def dropped(self, reason: str) -> float:
        line = f'x_responses_store_dropped_total{{reason="{reason}"}}'
        return next(float(one.split()[-1]) for one in self.registry.render().splitlines() if one.startswith(line))


def test_what_was_put_is_there_until_it_is_deleted() -> None:
    house = House(StoreLimits())
    house.store.put("a", b"1")
    assert house.get("a") == b"1"
    assert ended(house.store.delete("a")) and not ended(house.store.delete("a"))
    assert house.get("a") is None
    house.store.validate()


def test_the_one_not_asked_for_the_longest_makes_room() -> None:
    house = House(StoreLimits(entries_max=2))
    house.store.put("a", b"1")
    house.store.put("b", b"2")
    assert house.get("a") == b"1"
    house.store.put("c", b"3")
    assert (house.get("a"), house.get("b"), house.get("c")) == (b"1", None, b"3")
    assert house.dropped("full") == 1
    house.store.validate()


def test_bytes_are_bounded_and_what_is_larger_than_all_is_not_kept() -> None:
    house = House(StoreLimits(bytes_max=10))
    house.store.put("a", b"x" * 6)
    house.store.put("b", b"x" * 6)
    assert house.get("a") is None and house.store.size == 6
    house.store.put("c", b"x" * 11)
    assert house.get("c") is None and house.get("b") is not None
    assert house.dropped("full") == 2
    house.store.validate()


def test_what_nobody_asks_for_expires_and_asking_keeps_it() -> None:
    house = House(StoreLimits(unused_s=10.0))
    house.store.put("a", b"1")
    house.store.put("b", b"2")
    house.clock.advance(9.0)
    assert house.get("a") == b"1"
    house.clock.advance(9.0)
    assert house.get("a") == b"1" and house.get("b") is None
    assert house.dropped("expired") == 1
    house.clock.advance(11.0)
    house.store.put("c", b"3")
    assert house.store.entries == 1
    house.store.validate()


class StoreMachine(RuleBasedStateMachine):
    """Against a dictionary: what is there is what was put last."""

    def __init__(self) -> None:
        super().__init__()
        self.house = House(StoreLimits(entries_max=3, bytes_max=40, unused_s=10.0))
        self.put: dict[str, bytes] = {}

    @rule(key=st.sampled_from("abcde"), size=st.integers(0, 45))
    def put_one(self, key: str, size: int) -> None:
        self.put[key] = bytes(size)
        self.house.store.put(key, self.put[key])

    @rule(key=st.sampled_from("abcde"))
    def get_one(self, key: str) -> None:
        assert self.house.get(key) in (None, self.put.get(key))

    @rule(key=st.sampled_from("abcde"))
    def delete_one(self, key: str) -> None:
        ended(self.house.store.delete(key))
        assert self.house.get(key) is None

    @rule(seconds=st.floats(0, 12))
    def wait(self, seconds: float) -> None:
        self.house.clock.advance(seconds)

    @invariant()
    def is_sound(self) -> None:
        self.house.store.validate()


TestStoreMachine = StoreMachine.TestCase


@given(st.integers(0, 30))
def test_the_gauges_say_what_there_is(count: int) -> None:
    house = House(StoreLimits(entries_max=10))
    for number in range(count):
        house.store.put(str(number), b"xx")
    assert house.store.entries == min(count, 10)
    assert house.store.size == 2 * house.store.entries
