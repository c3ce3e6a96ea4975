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
    """Return the result of a coroutine that never suspends."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("it waited")


class StoreHarness:
    def __init__(self, limits: StoreLimits) -> None:
        self.clock = ManualClock()
        self.registry = MetricsRegistry()
        self.store = MemoryResponseStore(limits, Dropped(self.registry, "x"), self.clock)

    def get(self, key: str) -> bytes | None:
        return ended(self.store.get(key))

    def dropped(self, reason: str) -> float:
        line = f'x_responses_store_dropped_total{{reason="{reason}"}}'
        return next(float(one.split()[-1]) for one in self.registry.render().splitlines() if one.startswith(line))


def test_stored_response_is_available_until_deleted() -> None:
    harness = StoreHarness(StoreLimits())
    harness.store.put("a", b"1")
    assert harness.get("a") == b"1"
    assert ended(harness.store.delete("a")) and not ended(harness.store.delete("a"))
    assert harness.get("a") is None
    harness.store.validate()


def test_full_store_evicts_the_least_recently_read_entry() -> None:
    harness = StoreHarness(StoreLimits(entries_max=2))
    harness.store.put("a", b"1")
    harness.store.put("b", b"2")
    assert harness.get("a") == b"1"
    harness.store.put("c", b"3")
    assert (harness.get("a"), harness.get("b"), harness.get("c")) == (b"1", None, b"3")
    assert harness.dropped("full") == 1
    harness.store.validate()


def test_store_bytes_are_bounded_and_an_oversized_response_is_not_stored() -> None:
    harness = StoreHarness(StoreLimits(bytes_max=10))
    harness.store.put("a", b"x" * 6)
    harness.store.put("b", b"x" * 6)
    assert harness.get("a") is None and harness.store.size == 6
    harness.store.put("c", b"x" * 11)
    assert harness.get("c") is None and harness.get("b") is not None
    assert harness.dropped("full") == 2
    harness.store.validate()


def test_memory_store_unread_entries_expire_and_a_read_extends_the_lifetime() -> None:
    harness = StoreHarness(StoreLimits(unused_s=10.0))
    harness.store.put("a", b"1")
    harness.store.put("b", b"2")
    harness.clock.advance(9.0)
    assert harness.get("a") == b"1"
    harness.clock.advance(9.0)
    assert harness.get("a") == b"1" and harness.get("b") is None
    assert harness.dropped("expired") == 1
    harness.clock.advance(11.0)
    harness.store.put("c", b"3")
    assert harness.store.entries == 1
    harness.store.validate()


class StoreMachine(RuleBasedStateMachine):
    """Comparison with a dictionary: the store returns the last value put."""

    def __init__(self) -> None:
        super().__init__()
        self.harness = StoreHarness(StoreLimits(entries_max=3, bytes_max=40, unused_s=10.0))
        self.put: dict[str, bytes] = {}

    @rule(key=st.sampled_from("abcde"), size=st.integers(0, 45))
    def put_one(self, key: str, size: int) -> None:
        self.put[key] = bytes(size)
        self.harness.store.put(key, self.put[key])

    @rule(key=st.sampled_from("abcde"))
    def get_one(self, key: str) -> None:
        assert self.harness.get(key) in (None, self.put.get(key))

    @rule(key=st.sampled_from("abcde"))
    def delete_one(self, key: str) -> None:
        ended(self.harness.store.delete(key))
        assert self.harness.get(key) is None

    @rule(seconds=st.floats(0, 12))
    def wait(self, seconds: float) -> None:
        self.harness.clock.advance(seconds)

    @invariant()
    def is_sound(self) -> None:
        self.harness.store.validate()


TestStoreMachine = StoreMachine.TestCase


@given(st.integers(0, 30))
def test_gauges_report_entries_and_bytes(count: int) -> None:
    harness = StoreHarness(StoreLimits(entries_max=10))
    for number in range(count):
        harness.store.put(str(number), b"xx")
    assert harness.store.entries == min(count, 10)
    assert harness.store.size == 2 * harness.store.entries
