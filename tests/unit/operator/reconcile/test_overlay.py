"""Overlay of JSON data: objects, named lists, other lists, extended lists, removal."""

from typing import Any

import pytest

from dynamo.operator.reconcile.overlay import overlaid


@pytest.mark.parametrize(
    ("base", "given", "expected"),
    [
        ({"a": 1, "b": {"c": 2}}, {"b": {"d": 3}}, {"a": 1, "b": {"c": 2, "d": 3}}),
        ({"a": 1, "b": 2}, {"a": None}, {"b": 2}),
        ({"args": ["x", "y"]}, {"args": ["z"]}, {"args": ["z"]}),
        (
            {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
            {"env": [{"name": "B", "value": "3"}, {"name": "C", "value": "4"}]},
            {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "3"}, {"name": "C", "value": "4"}]},
        ),
        ({"a": [1]}, {"a": {"b": 1}}, {"a": {"b": 1}}),
    ],
)
def test_fields_are_merged_and_lists_of_named_objects_by_name(base: Any, given: Any, expected: Any) -> None:
    assert overlaid(base, given) == expected


def test_lists_of_some_fields_are_extended_without_repetition_but_for_arguments() -> None:
    base = {"args": ["x"], "tolerations": [{"key": "a"}]}
    given = {"args": ["x"], "tolerations": [{"key": "a"}, {"key": "b"}]}
    found = overlaid(base, given, {"args", "tolerations"})
    assert found == {"args": ["x", "x"], "tolerations": [{"key": "a"}, {"key": "b"}]}
