"""JSON schemas of guided decoding: schemas of the empty object, and reference cycles that no decoder can leave."""

import json
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import unquote

from dynamo.core.errors import HttpError

ANNOTATIONS = frozenset(
    {"title", "description", "$comment", "default", "deprecated", "examples", "readOnly", "writeOnly"}
)
MAPS_OF_SCHEMAS = ("properties", "patternProperties", "dependentSchemas", "dependencies")
SCHEMAS = (
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
    "items",
    "additionalItems",
    "prefixItems",
    "contains",
    "unevaluatedItems",
    "contentSchema",
)
"""Keywords whose schema applies to a part of the value, or, of the list, to its items."""

Node = dict[str, Any]


def admits_only_empty_object(schema: Any) -> bool:
    """Return whether `{}` is the only value of a schema, which has no other restriction."""
    if (
        not isinstance(schema, dict)
        or schema.get("type") != "object"
        or schema.get("additionalProperties") is not False
    ):
        return False
    if schema.get("properties", {}) != {} or schema.get("required", []) != []:
        return False
    rest = set(schema) - ANNOTATIONS - {"type", "properties", "required", "additionalProperties"}
    limits = {"minProperties": range(1), "maxProperties": range(2**63)}
    return all(type(schema[key]) is int and schema[key] in limits.get(key, ()) for key in rest)


def reject_nonprogressing_guided_json_ref_cycles(schema: Any) -> None:
    """Raise `HttpError` 400 if local references, with `allOf`, lead back to themselves without entering a part."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except json.JSONDecodeError:
            return  # The decoder reports it.
    if not isinstance(schema, dict):
        return
    pending = [(schema, schema)]
    same_value: dict[tuple[int, int], set[tuple[int, int]]] = {}
    while pending:
        node, resource = pending.pop()
        key = (id(node), id(resource))
        if key in same_value:
            continue
        applied = list(_applied(node, resource))
        same_value[key] = {(id(target), id(base)) for target, base in applied}
        pending += applied
        pending += [(part, _resource(part, resource)) for part in _parts(node)]
    try:
        TopologicalSorter(same_value).prepare()
    except CycleError:
        raise HttpError(400, "Invalid guided_json schema: non-progressing local $ref cycle detected") from None


def _applied(node: Node, resource: Node) -> Iterator[tuple[Node, Node]]:
    """Yield the schemas that apply to the same value as `node`, each with the resource of its references."""
    reference = node.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        found = _resolve(resource, unquote(reference[1:]))
        if found is not None:
            yield found
    every = node.get("allOf")
    if isinstance(every, list):
        yield from ((child, _resource(child, resource)) for child in every if isinstance(child, dict))


def _parts(node: Node) -> Iterator[Node]:
    """Yield the schemas that apply to a part of the value."""
    for keyword in MAPS_OF_SCHEMAS:
        children = node.get(keyword)
        if isinstance(children, dict):
            yield from (child for child in children.values() if isinstance(child, dict))
    for keyword in SCHEMAS:
        children = node.get(keyword)
        if isinstance(children, dict):
            yield children
        elif isinstance(children, list):
            yield from (child for child in children if isinstance(child, dict))


def _resource(child: Node, resource: Node) -> Node:
    return child if isinstance(child.get("$id"), str) else resource


def _resolve(resource: Node, pointer: str) -> tuple[Node, Node] | None:
    """Return the schema at a JSON pointer (RFC 6901) and its resource; None if there is none."""
    if pointer and not pointer.startswith("/"):
        return None
    target: Any = resource
    base = resource
    for part in pointer.split("/")[1:]:
        if "~" in part.replace("~0", "").replace("~1", ""):
            return None
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict) and name in target:
            target = target[name]
        elif isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        else:
            return None
        if isinstance(target, dict):
            base = _resource(target, base)
    return (target, base) if isinstance(target, dict) else None
