"""StrictSchema: checks of a tool's parameters against the rules of OpenAI's strict mode. Pure.

A strict tool's schema leaves nothing open: every object lists all of its properties, requires them all and allows no
others. `check_strict(parameters, "get_weather", "tools[0].function.parameters")` raises `InvalidArgument` with the text
of OpenAI's API and the location as a JSON pointer.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from dynamo.core.errors import InvalidArgument

LEVELS_MAX = 10  # Nesting depth of objects, as in OpenAI's API.
TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
UNSUPPORTED = (
    "allOf", "oneOf", "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "contains", "minContains",
    "maxContains", "uniqueItems", "unevaluatedItems",
)  # fmt: skip
FOREIGN = ("$dynamicRef", "$recursiveRef")
REFERENCES_MAX = 32  # A longer chain of references is treated as a cycle.


class _Fault(Exception):
    """A violation and its location."""

    def __init__(self, context: str, what: str) -> None:
        super().__init__(what)
        self.context = context


def check_strict(parameters: Any, name: str, where: str) -> None:
    """Raise `InvalidArgument` for parameters that strict mode does not allow."""
    try:
        _check_root(parameters, parameters, "#")
        _check_all(parameters)
    except _Fault as fault:
        message = f"Validation: Invalid schema for function '{name}': In context={fault.context}, {fault}"
        raise InvalidArgument(message, param=where) from None


def _check_root(schema: Any, whole: Any, context: str) -> None:
    """Check that the root is an object and nothing else, or a reference to one."""
    for _ in range(REFERENCES_MAX):
        if not isinstance(schema, Mapping):
            break
        if "anyOf" in schema:
            raise _Fault(context, "the root must not use anyOf")
        if "type" in schema:
            if schema["type"] not in ("object", ["object"]):
                raise _Fault(context, "the root must be of type object alone")
            return
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        context, schema = reference, _target(whole, reference, f"{context}/$ref")
    raise _Fault(context, "the root must be of type object, or refer to a schema that is")


def _check_all(whole: Any) -> None:
    """Check a schema and all schemas within it."""
    waiting = [(whole, "#", 0)]
    while waiting:
        schema, context, level = waiting.pop()
        if not isinstance(schema, Mapping):
            continue
        level += _check(schema, whole, context)
        if level > LEVELS_MAX:
            raise _Fault(context, f"exceeds {LEVELS_MAX} levels of nested objects")
        waiting += [(inner, place, level) for inner, place in _inner(schema, context)]


def _check(schema: Mapping[str, Any], whole: Any, context: str) -> bool:
    """Check the keywords of one schema; return whether it describes an object."""
    for key in UNSUPPORTED:
        if key in schema:
            raise _Fault(f"{context}/{key}", "keyword is not supported in strict schemas")
    for key in FOREIGN:
        if key in schema:
            raise _Fault(f"{context}/{key}", "references of this kind are not supported")
    kind = schema.get("type")
    kinds = [] if kind is None else kind if isinstance(kind, list) else [kind]
    if not all(isinstance(one, str) and one in TYPES for one in kinds) or len(set(kinds)) < len(kinds):
        raise _Fault(f"{context}/type", "must name JSON types, each once")
    if "anyOf" in schema and (not isinstance(schema["anyOf"], list) or not schema["anyOf"]):
        raise _Fault(f"{context}/anyOf", "must be a non-empty list")
    if "$ref" in schema:
        _target(whole, schema["$ref"], f"{context}/$ref")
    is_object = "object" in kinds or "properties" in schema or "patternProperties" in schema
    if is_object:
        _check_object(schema, context)
    return is_object


def _check_object(schema: Mapping[str, Any], context: str) -> None:
    if schema.get("additionalProperties") is not False:
        raise _Fault(context, "object schemas require additionalProperties: false")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping):
        raise _Fault(f"{context}/properties", "must be an object")
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise _Fault(f"{context}/required", "must be a list of strings")
    given = set(required)
    for name in properties:
        if name not in given:
            raise _Fault(f"{context}/required", f"must include property '{name}'")
    for name in required:
        if name not in properties:
            raise _Fault(f"{context}/required", f"names '{name}', which is not a property")


def _inner(schema: Mapping[str, Any], context: str) -> Iterator[tuple[Any, str]]:
    """Yield the schemas directly within a schema, with the pointer to each."""
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        inner = schema.get(key)
        if isinstance(inner, Mapping):
            for name, one in inner.items():
                yield one, f"{context}/{key}/{name}"
    for key in ("anyOf", "prefixItems", "items"):
        inner = schema.get(key)
        if isinstance(inner, list):
            for number, one in enumerate(inner):
                yield one, f"{context}/{key}/{number}"
        elif inner is not None:
            yield inner, f"{context}/{key}"


def _target(whole: Any, reference: Any, context: str) -> Any:
    """Return the target of a reference within the document."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise _Fault(context, "only references within the schema are supported")
    at = whole
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(at, list) and name.isdecimal() and int(name) < len(at):
            at = at[int(name)]
        elif isinstance(at, Mapping) and name in at:
            at = at[name]
        else:
            raise _Fault(context, "the reference's target does not exist")
    return at
