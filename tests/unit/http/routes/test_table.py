"""The table of routes."""

from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient

from dynamo.http.openapi.description import describe
from dynamo.http.routes.table import Access, Operation, RouteTable, as_json, refuse
from dynamo.protocols.openai_answers import ModelList
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.response_stream import ResponseStream


async def thing(request: Request) -> Response:
    return as_json({"method": request.method, **request.path_params})


def hot(exchange: ResponseStream) -> None:
    exchange.respond(200, b"")


@pytest.fixture
def table() -> RouteTable:
    table = RouteTable()
    table.hot("POST", "/hot", hot, Operation("Hot", answer=ModelList, streams=True, refusals=(400,)))
    table.plain("GET", "/things/{name}", thing, Operation("One thing"))
    table.plain("POST", "/things/{name}", thing, Operation("Change it", body=ModelList), access=Access.OPEN)
    return table


def client(table: RouteTable) -> TestClient:
    return TestClient(Starlette(routes=table.starlette_routes()))


def test_path_with_several_methods_serves_each_and_lists_them_in_allow(table: RouteTable) -> None:
    http = client(table)
    assert http.get("/things/a").json() == {"method": "GET", "name": "a"}
    assert http.post("/things/a").json() == {"method": "POST", "name": "a"}
    assert http.head("/things/a").status_code == 200
    refused = http.delete("/things/a")
    assert refused.status_code == 405
    assert {"GET", "POST"} <= set(refused.headers["allow"].split(", "))


def test_hot_route_is_served_by_the_protocol_and_refuses_other_methods(table: RouteTable) -> None:
    assert table.hot_handlers() == {(b"POST", b"/hot"): hot}
    refused = client(table).get("/hot")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


def test_only_routes_with_open_access_are_open(table: RouteTable) -> None:
    assert table.open_paths() == {b"/things/{name}"}


def test_route_path_is_read_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_HTTP_SVC_X_PATH", "/elsewhere")
    table = RouteTable()
    table.hot("POST", "/here", hot, Operation("Hot"), variable="DYN_HTTP_SVC_X_PATH")
    assert list(table.hot_handlers()) == [(b"POST", b"/elsewhere")]
    assert table.request_handlers == {"/here": hot}


def test_route_can_have_a_separate_error_format() -> None:
    def body(error: ErrorAnswer) -> bytes:
        return b""

    table = RouteTable()
    table.hot("POST", "/own", hot, Operation("Own"), error_body=body)
    table.hot("POST", "/usual", hot, Operation("Usual"))
    assert table.error_bodies() == {b"/own": body}


def test_route_table_describes_every_route(table: RouteTable) -> None:
    document: dict[str, Any] = describe(table)
    assert set(document["paths"]) == {"/hot", "/things/{name}"}
    assert set(document["paths"]["/things/{name}"]) == {"get", "post"}
    one = document["paths"]["/things/{name}"]["post"]
    assert one["parameters"] == [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    assert one["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ModelList"}
    answers = document["paths"]["/hot"]["post"]["responses"]
    assert set(answers) == {"200", "400"}
    assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}
    ids = [one["operationId"] for methods in document["paths"].values() for one in methods.values()]
    assert len(set(ids)) == len(ids)


def test_refusal_contains_retry_after() -> None:
    assert refuse(ErrorAnswer(503, "busy", retry_after_s=3)).headers["retry-after"] == "3"
    assert "retry-after" not in refuse(ErrorAnswer(404, "none")).headers
