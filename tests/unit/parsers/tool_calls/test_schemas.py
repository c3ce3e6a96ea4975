"""Schemas: the declared type of a parameter, and the value of its text."""

import pytest

from dynamo.parsers.base import Tool
from dynamo.parsers.tool_calls.schemas import ANYTHING, Schemas, typed_json, types_of

ROOT = {"$defs": {"Size": {"enum": ["s", "m"]}, "Loop": {"$ref": "#/$defs/Loop"}, "a/b": {"type": "array"}}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"integer", "null"}),
        ({"oneOf": [{"allOf": [{"type": "number"}]}]}, {"number"}),
        ({"enum": ["a", 1, None, True, 2.5]}, {"string", "integer", "null", "boolean", "number"}),
        ({"const": None}, {"null"}),
        ({"$ref": "#/$defs/Size"}, {"string"}),
        ({"$ref": "#/$defs/a~1b"}, {"array"}),
        ({"$ref": "#/$defs/Loop"}, set()),
        ({"$ref": "#/nowhere/at/all"}, set()),
        ({"$ref": "https://example.com"}, set()),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
        ({}, set()),
        ({"type": 7, "anyOf": "x", "enum": 3}, set()),
        (None, set()),
        ({"type": ["int", "None"]}, {"integer", "null"}),
        ({"type": "Optional[str]"}, {"string", "null"}),
        ({"anyOf": [{"type": "float"}, {"type": "dict"}]}, {"number", "object"}),
    ],
)
def test_schema_types_are_collected(schema, expected):
    assert types_of(schema, ROOT) == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["str", "text", "varchar", "varchar(20)", "char", "enum", "String"], {"string"}),
        (["int", "INT", "Integer", "int64", "uint32", "long", "short", "unsigned int", "bigint"], {"integer"}),
        (["float", "float32", "double", "decimal", "num", "real", "numeric"], {"number"}),
        (["bool", "Boolean"], {"boolean"}),
        (["dict", "Dict[str, int]", "map", "dict[str, list[int]]", "struct"], {"object"}),
        (["list", "List[int]", "arr", "tuple", "set[str]", "sequence"], {"array"}),
        (["None", "NoneType", "nil"], {"null"}),
        (["any", "Any", "typing.Any", "no_such_type", "interval", ""], ANYTHING),
        (["int | None", "Optional[int]", "typing.Optional[int]"], {"integer", "null"}),
        (["Union[int, list[str]]", "int|List[str]"], {"integer", "array"}),
    ],
)
def test_schema_type_names_of_python_and_sql_are_supported(names, expected):
    assert {name: types_of({"type": name}, {}) for name in names} == dict.fromkeys(names, expected)


def test_parameter_types_are_read_from_their_tool():
    schemas = Schemas([Tool("f", {"properties": {"a": {"type": "integer"}, "b": "?"}}), Tool("g", {"properties": []})])
    assert schemas.types("f", "a") == {"integer"}
    assert schemas.types("f", "a") == {"integer"}
    assert (
        schemas.types("f", "b")
        == schemas.types("f", "c")
        == schemas.types("g", "a")
        == schemas.types("h", "a")
        == set()
    )
    assert schemas.has("g") and not schemas.has("h")


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        (" 2 ", {"integer"}, "2"),
        ("2.50", {"number"}, "2.50"),
        ("two", {"integer"}, '"two"'),
        ("007", {"integer"}, "7"),
        ("-007.50", {"number"}, "-7.50"),
        ("+5", {"integer"}, "5"),
        (".5", {"number"}, "0.5"),
        ("5.", {"number", "null"}, "5"),
        ("-0", {"integer"}, "-0"),
        ("+1.e3", {"number"}, "1e3"),
        (".", {"number"}, '"."'),
        ("007", {"integer", "string"}, '"007"'),
        ("TRUE", {"boolean"}, "true"),
        ("0", {"boolean"}, "false"),
        ("0", {"boolean", "integer"}, "0"),
        ("maybe", {"boolean"}, '"maybe"'),
        ("null", {"integer", "null"}, "null"),
        ("None", {"null", "string"}, "null"),
        ('{"a": 1}', {"object"}, '{"a": 1}'),
        ("{'a': None}", {"object"}, '{"a": null}'),
        ("[1", {"array"}, '"[1"'),
        ("[1]", {"object"}, '"[1]"'),
        ('"x"', ANYTHING, '"x"'),
        ('"x', ANYTHING, '"\\"x"'),
        (" x ", ANYTHING, '" x "'),
        ("é", {"integer"}, '"é"'),
    ],
)
def test_text_value_is_converted_by_its_schema_type(text, types, expected):
    assert typed_json(text, frozenset(types)) == expected
