"""A strict tool's parameters are those that the released frontend accepts, and no others."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.errors import InvalidArgument
from dynamo.text.strict_schemas import check_strict

TEXT = {"type": "string"}


def closed(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False, **more}


def inner(schema: Any) -> dict[str, Any]:
    return closed({"a": schema})


def nested(levels: int) -> Any:
    schema: Any = TEXT
    for _ in range(levels):
        schema = inner(schema)
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        closed({}),
        closed({"a": TEXT, "b": {"type": ["integer", "null"]}}),
        {"type": "object", "additionalProperties": False},
        closed({"a": TEXT}) | {"type": ["object"]},
        inner(True),
        inner({}),
        inner({"type": "array", "items": closed({"x": TEXT})}),
        inner({"type": "array", "items": [TEXT]}),
        inner({"anyOf": [TEXT, closed({"x": TEXT})]}),
        inner({"$ref": "#"}),
        closed({"a": {"$ref": "#/$defs/P", "description": "d"}}, **{"$defs": {"P": TEXT}}),
        {"$ref": "#/$defs/P", "$defs": {"P": closed({"a": TEXT})}},
        nested(10),
        *(
            inner({**TEXT, key: value})
            for key, value in {
                "propertyNames": TEXT, "unevaluatedProperties": False, "prefixItems": [TEXT], "additionalItems": TEXT,
                "const": "x", "enum": ["x"], "format": "date", "pattern": "a", "minLength": 1, "maxItems": 3, "x-own": 1,
            }.items()
        ),
    ],
)  # fmt: skip
def test_strict_schema_check_accepts_a_closed_schema(schema: Any) -> None:
    check_strict(schema, "f", "here")


@pytest.mark.parametrize(
    ("schema", "context"),
    [
        ({}, "#"),
        ({"type": "object"}, "#"),
        (TEXT, "#"),
        (5, "#"),
        (closed({"a": TEXT}) | {"type": ["object", "null"]}, "#"),
        (closed({"a": TEXT}) | {"additionalProperties": True}, "#"),
        (closed({"a": TEXT}) | {"additionalProperties": TEXT}, "#"),
        (closed({"a": TEXT}) | {"anyOf": [closed({})]}, "#"),
        (closed({"a": TEXT, "b": TEXT}, ["a"]), "#/required"),
        (closed({"a": TEXT}, ["a", "b"]), "#/required"),
        (closed({"a": TEXT}) | {"required": "a"}, "#/required"),
        (closed({}) | {"properties": 5, "required": []}, "#/properties"),
        (inner({"type": "object", "properties": {"x": TEXT}}), "#/properties/a"),
        (inner({"properties": {"x": TEXT}}), "#/properties/a"),
        (inner({**TEXT, "patternProperties": {"x": TEXT}}), "#/properties/a"),
        (inner({"type": "array", "items": {"type": "object"}}), "#/properties/a/items"),
        (inner({"anyOf": [TEXT, {"type": "object"}]}), "#/properties/a/anyOf/1"),
        (inner({"anyOf": []}), "#/properties/a/anyOf"),
        (inner(closed({"x": TEXT, "y": TEXT}, ["x"])), "#/properties/a/required"),
        (inner({"type": "nonsense"}), "#/properties/a/type"),
        (inner({"type": ["string", "string"]}), "#/properties/a/type"),
        (inner({"$ref": "http://localhost/x"}), "#/properties/a/$ref"),
        (inner({"$ref": "#/$defs/Q"}), "#/properties/a/$ref"),
        (inner({"$dynamicRef": "#x"}), "#/properties/a/$dynamicRef"),
        ({"$ref": "#/$defs/P", "$defs": {"P": TEXT}}, "#/$defs/P"),
        ({"$ref": "#/$defs/P", "$defs": {"P": {"$ref": "#/$defs/P"}}}, "#/$defs/P"),
        (closed({}, **{"$defs": {"P": closed({"x": TEXT}, [])}}), "#/$defs/P/required"),
        (closed({}, definitions={"P": closed({"x": TEXT}, [])}), "#/definitions/P/required"),
        (nested(11), "#" + "/properties/a" * 10),
        *(
            (inner({**TEXT, key: value}), f"#/properties/a/{key}")
            for key, value in {
                "allOf": [TEXT], "oneOf": [TEXT], "not": TEXT, "if": TEXT, "then": TEXT, "else": TEXT, "contains": TEXT,
                "dependentRequired": {}, "dependentSchemas": {}, "minContains": 1, "maxContains": 1,
                "uniqueItems": True, "unevaluatedItems": False,
            }.items()
        ),
    ],
)  # fmt: skip
def test_strict_schema_error_names_the_open_object(schema: Any, context: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_strict(schema, "f", "here")
    assert str(caught.value).startswith(f"Validation: Invalid schema for function 'f': In context={context}, ")
    assert caught.value.param == "here"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.sampled_from(["object", "string", "#", "#/a", "#/$defs/a"]),
        lambda some: (
            st.lists(some, max_size=3)
            | st.dictionaries(
                st.sampled_from(["type", "items", "properties", "anyOf", "$defs", "$ref", "required", "a"]),
                some,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_strict_schema_check_never_raises_internal_errors(schema: Any) -> None:
    with contextlib.suppress(InvalidArgument):
        check_strict(schema, "f", "here")
