"""A reduction while workers start only cancels starts or removes workers."""

from hypothesis import given
from hypothesis import strategies as st

from dynamo.planner.core.scaling import startup_reduction


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 3))
def test_starting_workers_are_only_ever_cancelled(target: int, ready: int, pending: int) -> None:
    found = startup_reduction(target, ready, pending)
    assert found is None or found <= ready
    if target > ready:
        assert found is None
