"""Small HTTP services respond as upstream's do."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from tests.asgi import request_json

from dynamo.core.errors import HttpError
from dynamo.runtime.json_service import AnsweredRequest, HttpCall, JsonRoutes

JSON = {"content-type": "application/json"}


class Body(msgspec.Struct):
    name: str
    count: int = 1


async def echo(call: HttpCall[Body]) -> tuple[int, Any]:
    return 201, {"name": call.body.name, "count": call.body.count, **call.query}


async def part(call: HttpCall[None]) -> tuple[int, Any]:
    return 200, call.path


async def refuse(call: HttpCall[None]) -> tuple[int, Any]:
    raise HttpError(409, "already there")


async def fail(call: HttpCall[None]) -> tuple[int, Any]:
    raise RuntimeError("a bug")


def table(**how: bool) -> JsonRoutes:
    routes = JsonRoutes(**how)
    routes.add("POST", "/echo", echo, Body)
    routes.add("GET", "/things/{}", part)
    routes.add("DELETE", "/things/{}", refuse)
    routes.add("POST", "/things/{}/done", part)
    routes.add("GET", "/fail", fail)
    return routes


async def send_request(
    routes: JsonRoutes, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> tuple[int, Any]:
    return await request_json(routes.application(), method, path, body, headers)


async def test_json_service_reads_bodies_queries_and_paths() -> None:
    routes = table()
    assert await send_request(routes, "POST", "/echo?a=1&b=", b'{"name": "x"}', JSON) == (
        201,
        {"name": "x", "count": 1, "a": "1", "b": ""},
    )
    assert await send_request(routes, "GET", "/things/a%20b") == (200, "a b")
    assert await send_request(routes, "POST", "/things/7/done") == (200, "7")


async def test_invalid_requests_get_a_status_and_an_error_body() -> None:
    routes = table()
    for given, status in (
        (("POST", "/echo", b"{}", JSON), 422),
        (("POST", "/echo", b"x", JSON), 400),
        (("POST", "/echo", b'{"name": "x"}', {}), 415),
        (("GET", "/nothing", b"", {}), 404),
        (("GET", "/things/a/b", b"", {}), 404),
        (("PUT", "/echo", b"", {}), 405),
        (("DELETE", "/things/7", b"", {}), 409),
    ):
        found, value = await send_request(routes, *given)
        assert found == status
        assert set(value) == {"error"}


async def test_service_may_return_errors_as_plain_text() -> None:
    routes = table(errors_as_text=True, names_missing_routes=False)
    status, value = await send_request(routes, "POST", "/echo", b"{}", JSON)
    assert status == 422 and isinstance(value, str) and "name" in value
    assert await send_request(routes, "GET", "/nothing") == (404, None)
    assert await send_request(routes, "PUT", "/echo") == (405, None)
    assert (await send_request(routes, "DELETE", "/things/7"))[1] == {"error": "already there"}


async def test_unexpected_error_is_logged_and_returns_500(caplog: pytest.LogCaptureFixture) -> None:
    assert await send_request(table(), "GET", "/fail") == (500, {"error": "internal error"})
    assert "GET /fail failed" in caplog.text


async def test_json_service_observer_receives_every_request() -> None:
    routes, seen = table(), list[AnsweredRequest]()
    routes.observer = seen.append
    await send_request(routes, "GET", "/things/7", b"", {"x-trace-id": "t"})
    await send_request(routes, "GET", "/nothing")
    assert [(one.route, one.status, one.is_routed) for one in seen] == [
        ("/things/{}", 200, True),
        ("/nothing", 404, False),
    ]
    assert seen[0].headers["x-trace-id"] == "t"


async def test_route_with_a_body_of_bytes_accepts_any_content_type() -> None:
    async def size(call: HttpCall[bytes]) -> tuple[int, Any]:
        return 200, len(call.body)

    routes = JsonRoutes()
    routes.add("PATCH", "/size", size, bytes)
    assert await request_json(routes.application(), "PATCH", "/size", b"abc") == (200, 3)
