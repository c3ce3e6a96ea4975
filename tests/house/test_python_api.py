"""Every difference of the public Python API from the released package has a reason, and every reason a difference."""

import pytest
from tools import python_api


def test_every_difference_from_the_released_api_has_a_reason() -> None:
    assert len(python_api.released()) > 100
    assert python_api.unexplained() == []


def test_every_reason_applies_to_a_difference() -> None:
    assert python_api.unused_patterns() == [], "run python -m tools.python_api"


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        (["a", "b=1"], ["a", "b=1", "c=2"], []),
        (["a"], ["a=None"], []),
        (["a=..."], ["a=True"], []),
        (["..."], ["a"], []),
        (["*", "a"], ["a"], []),
        (["a"], ["*", "a"], ["parameter `a` at another position"]),
        (["a", "b"], ["b", "a"], ["parameter `a` at another position", "parameter `b` at another position"]),
        (["a=1"], ["a=2"], ["`a` `2` instead of `1`"]),
        (["a=..."], ["a"], ["`a` required instead of `...`"]),
        (["a"], ["b"], ["parameter `a` missing", "additional required parameter `b`"]),
        (["*args"], [], ["parameter `*args` missing"]),
    ],
)
def test_parameters_are_compared_as_a_caller_uses_them(theirs: list[str], ours: list[str], expected: list[str]) -> None:
    assert list(python_api.of_parameters(theirs, ours)) == expected


def test_a_class_is_compared_by_kind_bases_and_members() -> None:
    theirs = {"kind": "class", "parameters": [], "bases": ["ValueError"], "members": {"a": None, "b": [], "c": ["x"]}}
    ours = {"kind": "class", "parameters": [], "bases": [], "members": {"b": None, "c": ["y=1"]}, "assigned": []}
    assert [one.text for one in python_api.of_name("m.C", theirs, ours)] == [
        "no subclass of `ValueError`",
        "`a` missing",
        "`b` is no method",
        "`c`: parameter `x` missing",
    ]
    assert [one.text for one in python_api.of_name("m.C", theirs, {"kind": "value"})] == ["a value instead of a class"]
