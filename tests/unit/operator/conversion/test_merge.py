"""Three-way merge: changes by field and by name, and the identity without changes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.operator.conversion.merge import merged

values = st.recursive(
    st.integers(0, 2) | st.text("ab", max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=6,
)


@given(original=values, before=values)
def test_merge_without_a_change_returns_the_original(original: Any, before: Any) -> None:
    assert merged(original, before, before) == original


@given(before=values, after=values)
def test_merge_into_the_unchanged_object_returns_the_changed_object(before: Any, after: Any) -> None:
    assert merged(before, before, after) == after


@pytest.mark.parametrize(
    ("original", "before", "after", "result"),
    [
        ({"a": 1, "x": 9}, {"a": 1}, {"a": 2}, {"a": 2, "x": 9}),
        ({"a": 1, "x": 9}, {"a": 1}, {}, {"x": 9}),
        ({"x": 9}, {}, {"b": 1}, {"x": 9, "b": 1}),
        (
            [{"name": "a", "x": 1, "n": 1}, {"name": "b"}],
            [{"name": "a", "n": 1}, {"name": "b"}],
            [{"name": "a", "n": 2}],
            [{"name": "a", "x": 1, "n": 2}],
        ),
        ([1, 2], [1], [3], [3]),
    ],
)
def test_merge_applies_changes_to_the_original(original: Any, before: Any, after: Any, result: Any) -> None:
    assert merged(original, before, after) == result
