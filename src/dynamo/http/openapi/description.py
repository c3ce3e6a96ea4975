"""OpenAPI description: generated from the routes that are served and the types that they use."""

import re
from collections.abc import Iterable
from typing import Any

import msgspec

import dynamo
from dynamo.http.routes.table import Access, Operation, RouteEntry, RouteTable
from dynamo.protocols.field_effects import Effect, effect_of, types_within
from dynamo.serving.errors import reason

ERROR = {
    "type": "object",
    "required": ["error", "message", "type", "code"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        },
        "message": {"type": "string"},
        "type": {"type": "string"},
        "code": {"type": "integer"},
    },
}
SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
KEY_REFUSALS = (401, 403, 429)
PATH_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
REF = "#/components/schemas/{name}"


def describe(routes: RouteTable) -> dict[str, Any]:
    """Return the document of `GET /openapi.json`."""
    entries = [entry for entry in routes.entries if entry.operation.is_listed]
    operations = [entry.operation for entry in entries]
    refs, schemas = _schemas(operations)
    paths: dict[str, dict[str, Any]] = {}
    for entry in entries:
        path = PATH_PARAMETER.sub(r"{\1}", entry.path)
        operation = paths.setdefault(path, {})[entry.method.lower()] = _operation(entry, refs)
        if routes.asks_keys and entry.access is not Access.OPEN:
            _require_key(operation)
    components: dict[str, Any] = {"schemas": {**schemas, "Error": ERROR}}
    if routes.asks_keys:
        components["securitySchemes"] = SECURITY
    return {
        "openapi": "3.1.0",
        "info": {"title": "NVIDIA Dynamo OpenAI Frontend", "version": dynamo.__version__},
        "paths": paths,
        "components": components,
    }


def _require_key(operation: dict[str, Any]) -> None:
    """Add to an operation the security requirement of an API key, and the errors of a missing or wrong one."""
    operation["security"] = [{name: []} for name in SECURITY]
    for status in KEY_REFUSALS:
        operation["responses"].setdefault(str(status), _refusal(status, {"$ref": REF.format(name="Error")}))


def _refusal(status: int, schema: Any) -> dict[str, Any]:
    return {"description": reason(status), "content": {"application/json": {"schema": schema}}}


def _schemas(operations: Iterable[Operation]) -> tuple[dict[Any, dict[str, Any]], dict[str, Any]]:
    """Return a reference for each type that a route reads or writes, and the schemas that the references point to."""
    types = {kind for one in operations for kind in (one.body, one.answer, one.error) if isinstance(kind, type)}
    ordered = sorted(types, key=lambda kind: kind.__qualname__)
    refs, schemas = msgspec.json.schema_components(ordered, ref_template=REF)
    for name, kind in {one.__name__: one for root in types for one in types_within(root)}.items():
        _describe_fields(schemas.get(name, {}).get("properties", {}), kind)
    return dict(zip(ordered, refs, strict=True)), schemas


def _describe_fields(properties: dict[str, Any], kind: type[msgspec.Struct]) -> None:
    """Describe, in the schema of each field that is not simply honoured, the effect of the field."""
    for field in msgspec.structs.fields(kind):
        effect, note = effect_of(kind, field.name)
        if effect is not Effect.HONOURED and field.encode_name in properties:
            text = f"{effect.value} ({note})" if note else effect.value
            properties[field.encode_name]["description"] = text[0].upper() + text[1:]


def _operation(entry: RouteEntry, refs: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    described = entry.operation
    answer = {described.answer_media: {"schema": _schema(described.answer, refs)}}
    if described.streams:
        answer["text/event-stream"] = {
            "schema": {"description": "Server-sent events"}
        }  # No type: some tools show the body as text, others as objects.
    operation: dict[str, Any] = {
        "summary": described.summary,
        "operationId": re.sub(r"\W+", "_", f"{entry.method.lower()}{entry.path}").strip("_"),
        "responses": {"200": {"description": "Success", "content": answer}},
    }
    if described.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {described.body_media: {"schema": _schema(described.body, refs)}},
        }
    parameters = [_parameter(name, "path", {"type": "string"}) for name in PATH_PARAMETER.findall(entry.path)]
    parameters += [_parameter(name, "query", schema) for name, schema in described.query.items()]
    if parameters:
        operation["parameters"] = parameters
    error = {"$ref": REF.format(name="Error")} if described.error is None else _schema(described.error, refs)
    for status in described.refusals:
        operation["responses"][str(status)] = _refusal(status, error)
    return operation


def _schema(kind: Any, refs: dict[Any, dict[str, Any]]) -> Any:
    if kind is None:
        return {"type": "object"}
    return refs[kind] if isinstance(kind, type) else kind


def _parameter(name: str, place: str, schema: Any) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}
