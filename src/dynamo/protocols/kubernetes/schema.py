"""Structural schemas of the API types, and the API server's steps on them: defaults, pruning and structural checks."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect as types

from dynamo.protocols.kubernetes.common import KubeStruct, ObjectMeta

Schema = dict[str, Any]
PRESERVE = "x-kubernetes-preserve-unknown-fields"
INT_OR_STRING: Schema = {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}
SCALARS: dict[type[types.Type], str] = {
    types.StrType: "string",
    types.IntType: "integer",
    types.FloatType: "number",
    types.BoolType: "boolean",
}
LIMITS = {"ge": "minimum", "le": "maximum", "min_length": "minLength", "max_length": "maxLength", "pattern": "pattern"}


def schema_of(kind: type[KubeStruct]) -> Schema:
    """Return the structural schema of a Struct; attribute docstrings become descriptions."""
    info = types.type_info(kind)
    assert isinstance(info, types.StructType)
    return _struct(info)


def _schema(info: types.Type) -> Schema:
    if isinstance(info, types.Metadata):
        extra = info.extra_json_schema or {}
        return {**_schema(info.type), **extra}
    if isinstance(info, types.UnionType):
        return _union(info)
    if isinstance(info, types.LiteralType):
        return {"type": "string", "enum": list(info.values)}
    if isinstance(info, types.StructType):
        return _struct(info)
    if isinstance(info, types.ListType):
        return {"type": "array", "items": _schema(info.item_type)}
    if isinstance(info, types.DictType):
        if isinstance(info.value_type, types.AnyType):
            return {"type": "object"}
        return {"type": "object", "additionalProperties": _schema(info.value_type)}
    scalar = SCALARS.get(type(info))
    if scalar is None:
        raise TypeError(f"{info!r} has no structural schema")
    limits = {name: getattr(info, key) for key, name in LIMITS.items() if getattr(info, key, None) is not None}
    return {"type": scalar, **limits}


def _union(info: types.UnionType) -> Schema:
    members = [member for member in info.types if not isinstance(member, types.NoneType)]
    if len(members) == 1:
        return _schema(members[0])
    if {type(member) for member in members} == {types.IntType, types.StrType}:
        return dict(INT_OR_STRING)
    raise TypeError(f"{info!r} has no structural schema")


def _struct(info: types.StructType) -> Schema:
    if issubclass(info.cls, ObjectMeta):
        return {"type": "object"}
    described = descriptions(info.cls)
    properties: dict[str, Schema] = {}
    for field in info.fields:
        properties[field.encode_name] = _schema(field.type)
        text = described.get(field.name)
        if text and "description" not in properties[field.encode_name]:
            properties[field.encode_name] = {"description": text, **properties[field.encode_name]}
    schema: Schema = {"type": "object", "properties": properties}
    required = [field.encode_name for field in info.fields if field.required]
    if required:
        schema["required"] = required
    rules = getattr(info.cls, "RULES", ())
    if rules:
        schema["x-kubernetes-validations"] = [{"rule": rule.rule, "message": rule.message} for rule in rules]
    return schema


@cache
def descriptions(kind: type) -> Mapping[str, str]:
    """Return the attribute docstrings of a class and its bases by attribute."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, KubeStruct) and base is not KubeStruct:
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
            assert isinstance(body, ast.ClassDef)
            for statement, following in zip(body.body, body.body[1:], strict=False):
                if (
                    isinstance(statement, ast.AnnAssign)
                    and isinstance(statement.target, ast.Name)
                    and isinstance(following, ast.Expr)
                    and isinstance(following.value, ast.Constant)
                ):
                    found[statement.target.id] = " ".join(str(following.value.value).split())
    return found


class SchemaProblem(NamedTuple):
    """One value that does not match its schema."""

    path: str
    reason: str


def with_defaults(value: Any, schema: Schema) -> Any:
    """Return JSON data with the schema's defaults, as the API server stores it."""
    if isinstance(value, dict):
        properties: Mapping[str, Schema] = schema.get("properties", {})
        filled = dict(value)
        for name, part in properties.items():
            if "default" in part and filled.get(name) is None:
                filled[name] = part["default"]
        other = schema.get("additionalProperties")
        for name, item in filled.items():
            schema_of_item = properties.get(name) or (other if isinstance(other, dict) else None)
            if schema_of_item is not None:
                filled[name] = with_defaults(item, schema_of_item)
        return filled
    if isinstance(value, list) and "items" in schema:
        return [with_defaults(item, schema["items"]) for item in value]
    return value


def without_nulls(value: Any, schema: Schema) -> Any:
    """Return JSON data without the nulls of declared fields.

    The API server does this where an object is created, but refuses the nulls in a server-side apply.
    """
    if isinstance(value, dict):
        properties: Mapping[str, Schema] = schema.get("properties", {})
        other = schema.get("additionalProperties")
        kept: dict[str, Any] = {}
        for name, item in value.items():
            part = properties.get(name) or (other if isinstance(other, dict) else None)
            if part is None:
                kept[name] = item
            elif item is not None:
                kept[name] = without_nulls(item, part)
        return kept
    if isinstance(value, list) and "items" in schema:
        return [without_nulls(item, schema["items"]) for item in value]
    return value


def problems(value: Any, schema: Schema, path: str = "") -> Iterator[SchemaProblem]:
    """Yield every field that is unknown, missing, of the wrong type or outside its limits."""
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(value, int | str) or isinstance(value, bool):
            yield SchemaProblem(path, f"must be an integer or a string, not {_kind(value)}")
        return
    expected = schema.get("type", "object")
    if not _is_of(value, expected):
        yield SchemaProblem(path, f"must be of type {expected}, not {_kind(value)}")
    elif isinstance(value, dict):
        yield from _object_problems(value, schema, path)
    elif isinstance(value, list):
        yield from _list_problems(value, schema, path)
    else:
        yield from _scalar_problems(value, schema, path)


def _object_problems(value: dict[str, Any], schema: Schema, path: str) -> Iterator[SchemaProblem]:
    properties: Mapping[str, Schema] = schema.get("properties", {})
    other = schema.get("additionalProperties")
    for name in schema.get("required", ()):
        if value.get(name) is None:
            yield SchemaProblem(_joined(path, name), "is required")
    if len(value) > schema.get("maxProperties", len(value)):
        yield SchemaProblem(path, f"has {len(value)} entries; at most {schema['maxProperties']} are allowed")
    for name, item in value.items():
        part = properties.get(name) or (other if isinstance(other, dict) else None)
        if part is None:
            if not schema.get(PRESERVE) and (properties or other is not None):
                yield SchemaProblem(_joined(path, name), "is not a known field")
        elif item is not None:
            yield from problems(item, part, _joined(path, name))


def _list_problems(value: list[Any], schema: Schema, path: str) -> Iterator[SchemaProblem]:
    if len(value) > schema.get("maxItems", len(value)):
        yield SchemaProblem(path, f"has {len(value)} items; at most {schema['maxItems']} are allowed")
    for index, item in enumerate(value):
        yield from problems(item, schema.get("items", {}), f"{path}[{index}]")
    keys = schema.get("x-kubernetes-list-map-keys")
    if keys:
        seen: set[tuple[Any, ...]] = set()
        for index, item in enumerate(value):
            key = tuple(item.get(name) for name in keys) if isinstance(item, dict) else ()
            if key in seen:
                yield SchemaProblem(f"{path}[{index}]", f"repeats {' '.join(keys)} {' '.join(map(str, key))}")
            seen.add(key)


def _scalar_problems(value: Any, schema: Schema, path: str) -> Iterator[SchemaProblem]:
    if "enum" in schema and value not in schema["enum"]:
        allowed = ", ".join(repr(one) for one in schema["enum"])
        yield SchemaProblem(path, f"{value!r} is not one of {allowed}")
    if "minimum" in schema and value < schema["minimum"]:
        yield SchemaProblem(path, f"{value} must be at least {schema['minimum']}")
    if "maximum" in schema and value > schema["maximum"]:
        yield SchemaProblem(path, f"{value} must be at most {schema['maximum']}")
    if isinstance(value, str):
        if len(value) < schema.get("minLength", 0):
            yield SchemaProblem(path, "must not be empty")
        if len(value) > schema.get("maxLength", len(value)):
            yield SchemaProblem(path, f"has {len(value)} characters; at most {schema['maxLength']} are allowed")
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield SchemaProblem(path, f"{value!r} does not match {schema['pattern']}")


def _is_of(value: Any, expected: str) -> bool:
    if expected == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if expected == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, {"object": dict, "array": list, "string": str, "boolean": bool}[expected])


def _kind(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
    return names.get(type(value), "null")


def _joined(path: str, name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][\w-]*", name):
        return f"{path}[{name}]"
    return f"{path}.{name}" if path else name


def fields_of(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the wire names of a Struct's fields."""
    return kind.__struct_encode_fields__
