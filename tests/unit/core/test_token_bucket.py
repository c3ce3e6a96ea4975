"""Token buckets: no period exceeds its limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.token_bucket import TokenBucket


@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 5)), max_size=40),
    st.integers(1, 50),
)
def test_token_bucket_grants_at_most_twice_its_size_per_minute(steps: list[tuple[float, int]], size: int) -> None:
    bucket, now, taken = TokenBucket(size, size / 60), 0.0, []
    for wait, amount in steps:
        now += wait
        if amount <= size and bucket.wait_s(now, amount) == 0.0:
            bucket.take(amount, now)
            taken.append((now, amount))
    for at, _ in taken:
        assert sum(amount for when, amount in taken if at <= when < at + 60) <= 2 * size + 1e-2


def test_reservations_beyond_the_size_are_spread_by_the_rate() -> None:
    bucket = TokenBucket(2, 10)
    waits = []
    for _ in range(4):
        waits.append(bucket.wait_s(0.0, 1.0))
        bucket.take(1.0, 0.0)
    assert waits == pytest.approx([0.0, 0.0, 0.1, 0.2])


def test_resized_bucket_holds_at_most_its_new_size() -> None:
    bucket = TokenBucket(100, 10)
    bucket.resize(1, 1)
    bucket.take(1.0, 0.0)
    assert bucket.wait_s(0.0, 1.0) == pytest.approx(1.0)


@given(st.floats(0, 1e8), st.integers(1, 100), st.lists(st.floats(0, 30), max_size=20))
def test_amount_is_available_after_exactly_the_returned_wait(start_s: float, size: int, waits: list[float]) -> None:
    bucket, now = TokenBucket(size, size / 60), start_s
    for wait in waits:
        now += wait
        bucket.take(1.0, now)
    for _ in range(3):
        now += bucket.wait_s(now, 1.0)
        assert bucket.wait_s(now, 1.0) == 0.0
        bucket.take(1.0, now)
