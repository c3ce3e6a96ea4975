"""Schemas: types of parameters from a tool's JSON schema, for formats that write values without a type. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.parsers.base import Tool
from dynamo.parsers.tool_calls.values import NUMBER, quoted, whole_json

STRING = frozenset({"string"})
ANYTHING = frozenset({"null", "boolean", "integer", "number", "object", "array", "string"})

BOOLEANS = {"true": "true", "false": "false", "1": "true", "0": "false"}
NULLS = ("null", "None")

_TYPE_NAMES = {
    "string": ("string", "str", "text", "varchar", "char", "enum"),
    "integer": ("integer", "int", "uint", "long", "short", "unsigned", "bigint", "smallint", "tinyint"),
    "number": ("number", "num", "numeric", "float", "double", "decimal", "real"),
    "boolean": ("boolean", "bool"),
    "object": ("object", "dict", "dictionary", "map", "mapping", "struct"),
    "array": ("array", "arr", "list", "tuple", "set", "sequence"),
    "null": ("null", "none", "nonetype", "nil"),
}
"""Type names in tool schemas and their JSON types: names of JSON Schema, and of Python, C and SQL."""
_JSON_TYPES = {name: json_type for json_type, names in _TYPE_NAMES.items() for name in names}
_TYPE_NAME = re.compile(r"(?:typing\.)?([a-z]+)\d*(?:\s*[\[(].*|\s+[a-z]+)?", re.DOTALL)
_TYPE_NAME_CHARS_MAX = 256  # Longer than any type name, unions included, that a schema's author writes.
_LOOSE_NUMBER = re.compile(r"([+-]?)0*(\d*)(?:\.(\d*))?([eE][+-]?\d+)?")

_BRANCHES = ("anyOf", "oneOf", "allOf")
_BRANCHES_MAX = 1000  # Schemas with more branches are not evaluated further.
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


class Schemas:
    """Parameters of a request's tools."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._known: dict[tuple[str, str], frozenset[str]] = {}

    def has(self, name: str) -> bool:
        """Return whether the request offers such a tool."""
        return name in self._tools

    def schema(self, tool: str, key: str) -> Mapping[str, Any]:
        """Return the schema of a parameter; empty if there is none."""
        root = self.root(tool)
        properties = root.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return schema if isinstance(schema, Mapping) else {}

    def has_parameter(self, tool: str, key: str) -> bool:
        """Return whether the schema of a tool lists such a parameter."""
        properties = self.root(tool).get("properties")
        return isinstance(properties, Mapping) and key in properties

    def root(self, tool: str) -> Mapping[str, Any]:
        """Return the schema of a tool's arguments, in which references are resolved."""
        known = self._tools.get(tool)
        return known.parameters if known is not None and isinstance(known.parameters, Mapping) else {}

    def types(self, tool: str, key: str) -> frozenset[str]:
        """Return the types that a parameter may have; empty if unknown."""
        found = self._known.get((tool, key))
        if found is None:
            found = types_of(self.schema(tool, key), self.root(tool))
            if self.has(tool) and len(self._known) < _BRANCHES_MAX:
                self._known[tool, key] = found
        return found


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema allows; empty if it does not specify any."""
    found: set[str] = set()
    seen: set[int] = set()
    waiting = [schema]
    while waiting and len(seen) < _BRANCHES_MAX:
        one = waiting.pop()
        if not isinstance(one, Mapping) or id(one) in seen:
            continue
        seen.add(id(one))
        given = one.get("type")
        for name in [given] if isinstance(given, str) else listed(given):
            found.update(json_types(name) if isinstance(name, str) else ())
        if given is None:
            values = [*listed(one.get("enum")), *([one["const"]] if "const" in one else [])]
            found.update("null" if value is None else _TYPES.get(type(value), "string") for value in values)
            found.update({"object"} if "properties" in one else {"array"} if "items" in one else ())
        waiting.append(referred(one.get("$ref"), root))
        for branch in _BRANCHES:
            waiting += listed(one.get(branch))
    return frozenset(found)


def json_types(name: str) -> frozenset[str]:
    """Return the JSON types of a type name in a schema; all types if the name is unknown.

    Schemas generated from signatures hold names such as `int`, `list[str]`, `Optional[float]` and `dict | None`.
    """
    name = name.strip().lower()
    if name in ANYTHING:
        return frozenset({name})
    if len(name) > _TYPE_NAME_CHARS_MAX:
        return ANYTHING
    members = union_members(name)
    if len(members) > 1:
        return frozenset().union(*map(json_types, members))
    found = _TYPE_NAME.fullmatch(name)
    json_type = _JSON_TYPES.get(found[1]) if found is not None else None
    return frozenset({json_type}) if json_type is not None else ANYTHING


def union_members(name: str) -> list[str]:
    """Return the members of a union as Python writes it (`int | None`, `Union[…]`, `Optional[…]`)."""
    prefix, bracket, rest = name.removeprefix("typing.").partition("[")
    if prefix == "optional" and bracket:
        return [rest.removesuffix("]"), "null"]
    is_union = prefix == "union" and bool(bracket)
    text, separator = (rest.removesuffix("]"), ",") if is_union else (name, "|")
    members, depth = [""], 0
    for char in text:
        depth += (char in "[(") - (char in "])")
        if char == separator and not depth:
            members.append("")
        else:
            members[-1] += char
    return members


def referred(reference: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema referenced within the same document; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    place: Any = root
    for step in reference[2:].split("/"):
        place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place


def listed(value: Any) -> list[Any]:
    """Return a list unchanged, and anything else as an empty one."""
    return value if isinstance(value, list) else []


def typed_json(text: str, types: frozenset[str]) -> str:
    """Return a value written without quotes as JSON: the first of its types that matches, otherwise a string."""
    bare = text.strip()
    if "null" in types and bare in NULLS:
        return "null"
    if "boolean" in types and (
        bare.lower() in BOOLEANS if types.isdisjoint({"integer", "number"}) else bare.lower() in ("true", "false")
    ):
        return BOOLEANS[bare.lower()]
    if not types.isdisjoint({"integer", "number"}):
        number = bare if NUMBER.fullmatch(bare) else "" if "string" in types else loose_number(bare)
        if number:
            return number
    if (bare.startswith("{") and "object" in types) or (bare.startswith("[") and "array" in types):
        whole = whole_json(bare)
        if whole is not None:
            return whole
    if "string" in types and len(types) > 1 and bare.startswith('"'):
        return string_json(bare) or quoted(text)
    return quoted(text)


def loose_number(bare: str) -> str:
    """Return a number that JSON would spell otherwise (`+5`, `.5`, `5.`, `007`) as JSON; empty if it is none."""
    found = _LOOSE_NUMBER.fullmatch(bare) if bare.isascii() else None
    if found is None or not any(char.isdigit() for char in bare.partition("e")[0].partition("E")[0]):
        return ""
    sign, whole, fraction, exponent = found.groups(default="")
    return f"{sign.removeprefix('+')}{whole or '0'}{'.' if fraction else ''}{fraction}{exponent}"


def string_json(bare: str) -> str | None:
    """Return a string that was written with its quotes as JSON; None if it is no such string."""
    try:
        return bare if isinstance(json.loads(bare), str) else None
    except ValueError:
        return None


NAME = re.compile(r"[\w.\-/:]*")
"""Characters of a tool's name."""
