"""A tally returns the same as the statistics module, for any sequence of additions and removals."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.tally import Tally


@given(st.lists(st.integers(-100, 100_000)), st.lists(st.integers(-100, 100_000)))
def test_tally_agrees_with_statistics_after_additions_and_removals(stay: list[int], leave: list[int]) -> None:
    tally = Tally()
    for value in [*leave, *stay]:
        tally.add(value)
    for value in leave:
        tally.remove(value)
    assert (tally.count, tally.total) == (len(stay), sum(stay))
    assert tally.variance == pytest.approx(statistics.pvariance(stay) if stay else 0.0)
