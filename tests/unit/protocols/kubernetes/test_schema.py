"""Structural schemas, and the API server's steps on them."""

from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from dynamo.protocols.kubernetes.common import CelRule, KubeStruct, ObjectMeta, Preserved, Quantity
from dynamo.protocols.kubernetes.schema import (
    PRESERVE,
    descriptions,
    fields_of,
    problems,
    schema_of,
    with_defaults,
    without_nulls,
)


class Part(KubeStruct):
    """Part of a sample."""

    name: Annotated[str, Meta(min_length=1, max_length=5, pattern="^[a-z]+$")]
    count: Annotated[int | None, Meta(extra_json_schema={"default": 2})] = None


class Sample(KubeStruct):
    """One field of each type."""

    part: Part
    """The part
    of it."""
    size: Quantity | None = None
    mode: Literal["a", "b"] | None = None
    ratio: Annotated[float, Meta(ge=0, le=1)] | None = None
    by_name: dict[str, Part] | None = None
    parts: Annotated[
        list[Part] | None, Meta(extra_json_schema={"maxItems": 2, "x-kubernetes-list-map-keys": ["name"]})
    ] = None
    anything: Preserved | None = None
    flag: bool | None = None
    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    RULES = (CelRule("has(self.size) || has(self.mode)", "size or mode must be set"),)


SCHEMA = schema_of(Sample)


def found(value: dict[str, Any]) -> list[str]:
    return [f"{one.path}: {one.reason}" for one in problems({"part": {"name": "ok"}, **value}, SCHEMA)]


def test_schema_has_wire_names_types_limits_and_rules() -> None:
    properties = SCHEMA["properties"]
    assert set(properties) == {
        "part", "size", "mode", "ratio", "byName", "parts", "anything", "flag", "metadata",
    }  # fmt: skip
    assert SCHEMA["required"] == ["part"]
    assert properties["mode"] == {"type": "string", "enum": ["a", "b"]}
    assert properties["ratio"] == {"type": "number", "minimum": 0, "maximum": 1}
    assert properties["size"]["x-kubernetes-int-or-string"] is True
    assert properties["byName"]["additionalProperties"]["required"] == ["name"]
    assert properties["metadata"] == {"type": "object"}
    assert SCHEMA["x-kubernetes-validations"] == [
        {"rule": "has(self.size) || has(self.mode)", "message": "size or mode must be set"}
    ]


def test_attribute_docstrings_become_descriptions() -> None:
    assert SCHEMA["properties"]["part"]["description"] == "The part of it."
    assert descriptions(Sample) == {"part": "The part of it."}


def test_type_without_a_structural_schema_is_refused() -> None:
    class Wrong(KubeStruct):
        value: bytes

    with pytest.raises(TypeError, match="no structural schema"):
        schema_of(Wrong)


def test_defaults_are_filled_in_nested_values_without_modifying_the_input() -> None:
    value = {"part": {"name": "x"}, "parts": [{"name": "y", "count": 5}], "byName": {"k": {"name": "z"}}}
    filled = with_defaults(value, SCHEMA)
    assert filled["part"] == {"name": "x", "count": 2}
    assert filled["parts"] == [{"name": "y", "count": 5}]
    assert filled["byName"] == {"k": {"name": "z", "count": 2}}
    assert value["part"] == {"name": "x"}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"part": {}}, "part.name: is required"),
        ({"part": 3}, "part: must be of type object, not integer"),
        ({"part": {"name": ""}}, "part.name: must not be empty"),
        ({"part": {"name": "abcdef"}}, "part.name: has 6 characters; at most 5 are allowed"),
        ({"part": {"name": "A"}}, "part.name: 'A' does not match ^[a-z]+$"),
        ({"other": 1}, "other: is not a known field"),
        ({"mode": "c"}, "mode: 'c' is not one of 'a', 'b'"),
        ({"ratio": 2}, "ratio: 2 must be at most 1"),
        ({"ratio": -1}, "ratio: -1 must be at least 0"),
        ({"ratio": True}, "ratio: must be of type number, not boolean"),
        ({"size": 1.5}, "size: must be an integer or a string, not number"),
        ({"flag": "yes"}, "flag: must be of type boolean, not string"),
        ({"byName": {"a.b": {"name": "A"}}}, "byName[a.b].name: 'A' does not match ^[a-z]+$"),
        ({"parts": [{"name": "a"}, {"name": "a"}]}, "parts[1]: repeats name a"),
        ({"parts": [{"name": "a"}, {"name": "b"}, {"name": "c"}]}, "parts: has 3 items; at most 2 are allowed"),
    ],
)
def test_validation_problem_names_the_field_and_the_allowed_values(value: dict[str, Any], problem: str) -> None:
    assert problem in found(value)


def test_valid_value_has_no_problem() -> None:
    assert found({"size": "8Gi", "anything": {"x": [1]}, "flag": False, "mode": None}) == []


def test_fields_of_returns_wire_names() -> None:
    assert fields_of(Part) == ("name", "count")


def test_nulls_of_declared_fields_are_removed_and_others_kept() -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "free": {"type": "object", PRESERVE: True},
            "items": {"type": "array", "items": {"type": "object", "properties": {"size": {"type": "integer"}}}},
        },
    }
    value = {"name": None, "free": {"a": None}, "items": [{"size": None, "other": None}], "unknown": None}
    assert without_nulls(value, schema) == {"free": {"a": None}, "items": [{"other": None}], "unknown": None}
