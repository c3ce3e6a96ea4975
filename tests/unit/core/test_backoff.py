"""Backoff: the waits between tries."""

from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.backoff import Backoff


@given(tries=st.integers(1, 40), rngs=st.lists(st.floats(0, 1), min_size=40, max_size=40))
def test_backoff_grows_up_to_its_limit(tries: int, rngs: list[float]) -> None:
    backoff = Backoff(0.1, 10.0)
    waits = [backoff.next(rng) for rng in rngs[:tries]]
    for index, wait in enumerate(waits):
        due = min(0.1 * 2**index, 10.0)
        assert due / 2 <= wait <= due
    backoff.reset()
    assert backoff.next(1.0) == 0.1
