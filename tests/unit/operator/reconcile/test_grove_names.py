"""Names with Grove: set, scaling group and clique share the characters of a pod's name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.operator.reconcile.grove_names import LEAST_NAME, NAME_BUDGET, clique_set_name, name_length

LONG = "a-long-name-of-a-graph"


@pytest.mark.parametrize(
    ("is_multinode", "has_group", "length"), [(False, False, 6), (False, True, 12), (True, True, 16)]
)
def test_component_with_a_scaling_group_takes_its_name_twice(is_multinode: bool, has_group: bool, length: int) -> None:
    assert name_length("decode", is_multinode=is_multinode, has_group=has_group) == length


def test_name_that_fits_is_kept_and_a_longer_one_ends_in_a_hash() -> None:
    assert clique_set_name("short", [36]) == "short"
    assert clique_set_name(LONG, [36]) == "a-lo-6c50"
    assert clique_set_name(LONG, []) == LONG


@given(st.text("abc-", min_size=1, max_size=60), st.lists(st.integers(1, 60), max_size=4))
def test_names_fit_into_the_budget_unless_a_component_is_too_long(graph: str, lengths: list[int]) -> None:
    name, longest = clique_set_name(graph, lengths), max(lengths, default=0)
    assert len(name) <= max(NAME_BUDGET - longest, LEAST_NAME)
    assert name == graph or name.startswith(graph[: len(name) - 5])
