"""The description of every route that is really served."""

import json
import re
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from dynamo.core.codec import json_encode
from dynamo.core.metrics import MetricsRegistry
from dynamo.http.openapi.description import describe
from dynamo.http.routes.api_options import ApiOptions
from dynamo.http.routes.groups import GROUPS
from dynamo.http.routes.table import RouteContext, RouteTable, routes_of


@pytest.fixture
async def table() -> RouteTable:
    mock = cast(Any, MagicMock())
    apis = ApiOptions(enable_anthropic=True)
    return routes_of(RouteContext(mock, mock, MetricsRegistry(), lambda: True, apis=apis), GROUPS)


@pytest.fixture
async def document(table: RouteTable) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json_encode(describe(table)))
    return found


async def test_openapi_document_describes_every_route_once(table: RouteTable, document: dict[str, Any]) -> None:
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    served = {(entry.method, re.sub(r":\w+}", "}", entry.path)) for entry in table.entries}
    assert described == served
    assert len(table.entries) == len(served), "a route is there twice"
    assert {("POST", "/v1/chat/completions"), ("GET", "/v1/models/{model}"), ("GET", "/docs")} <= served


async def test_openapi_references_resolve_to_schemas(document: dict[str, Any]) -> None:
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert references and references <= set(document["components"]["schemas"])


async def test_operations_have_unique_ids_and_declare_path_parameters(document: dict[str, Any]) -> None:
    names = []
    for path, methods in document["paths"].items():
        for operation in methods.values():
            names.append(operation["operationId"])
            output = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"}
            assert output == set(re.findall(r"{(\w+)}", path))
            assert operation["summary"] and "200" in operation["responses"]
    assert len(set(names)) == len(names)


async def test_document_describes_api_keys_when_required(table: RouteTable) -> None:
    table.asks_keys = True
    document = describe(table)
    models, health = document["paths"]["/v1/models"]["get"], document["paths"]["/health"]["get"]
    assert models["security"] == [{"bearer": []}, {"key": []}] and {"401", "403", "429"} <= set(models["responses"])
    assert "security" not in health
    assert set(document["components"]["securitySchemes"]) == {"bearer", "key"}


async def test_openapi_document_describes_flat_error_bodies(document: dict[str, Any]) -> None:
    output = document["paths"]["/busy_threshold"]["post"]["responses"]["404"]["content"]["application/json"]["schema"]
    assert output["properties"]["error"] == {"type": "string"}


async def test_openapi_document_describes_the_handling_of_fields_without_effect(document: dict[str, Any]) -> None:
    chat = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert chat["user"]["description"].startswith("Accepted for compatibility; has no effect")
    assert chat["audio"]["description"] == "Refused"
    assert "description" not in chat["temperature"]
