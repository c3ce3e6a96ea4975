"""Small HTTP services answer as upstream's do."""

from typing import Any

import msgspec
import pytest

from dynamo.core.errors import ConfigError, HttpError
from dynamo.runtime.json_service import HttpCall, JsonRoutes, Served, Text, listen

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


async def test_bodies_queries_and_paths_are_read() -> None:
    routes = table()
    assert await routes.answer("POST", "/echo", "a=1&b=", JSON, b'{"name": "x"}') == (
        201,
        {"name": "x", "count": 1, "a": "1", "b": ""},
    )
    assert await routes.answer("GET", "/things/a%20b", "", {}, b"") == (200, "a b")
    assert await routes.answer("POST", "/things/7/done", "", {}, b"") == (200, "7")


async def test_what_is_wrong_is_told() -> None:
    routes = table()
    for given, status in (
        (("POST", "/echo", "", JSON, b"{}"), 422),
        (("POST", "/echo", "", JSON, b"x"), 400),
        (("POST", "/echo", "", {}, b'{"name": "x"}'), 415),
        (("GET", "/nothing", "", {}, b""), 404),
        (("GET", "/things/a/b", "", {}, b""), 404),
        (("PUT", "/echo", "", {}, b""), 405),
        (("DELETE", "/things/7", "", {}, b""), 409),
    ):
        found, value = await routes.answer(*given)
        assert found == status
        assert set(value) == {"error"}


async def test_a_service_may_tell_it_in_plain_text() -> None:
    routes = table(errors_as_text=True, names_missing_routes=False)
    status, value = await routes.answer("POST", "/echo", "", JSON, b"{}")
    assert status == 422 and isinstance(value, Text) and "name" in value.text
    assert await routes.answer("GET", "/nothing", "", {}, b"") == (404, None)
    assert await routes.answer("PUT", "/echo", "", {}, b"") == (405, None)
    assert (await routes.answer("DELETE", "/things/7", "", {}, b""))[1] == {"error": "already there"}


async def test_a_bug_is_logged_and_told_as_one(caplog: pytest.LogCaptureFixture) -> None:
    assert await table().answer("GET", "/fail", "", {}, b"") == (500, {"error": "internal error"})
    assert "GET /fail failed" in caplog.text


async def test_an_observer_hears_of_every_request() -> None:
    routes, seen = table(), list[Served]()
    routes.observer = seen.append
    await routes.answer("GET", "/things/7", "", {"x-trace-id": "t"}, b"")
    await routes.answer("GET", "/nothing", "", {}, b"")
    assert [(one.route, one.status, one.is_routed) for one in seen] == [
        ("/things/{}", 200, True),
        ("/nothing", 404, False),
    ]
    assert seen[0].headers["x-trace-id"] == "t"


def test_a_port_that_cannot_be_had_is_named() -> None:
    with listen(0, "127.0.0.1") as taken, pytest.raises(ConfigError, match="--port"):
        listen(taken.getsockname()[1], "127.0.0.1")
    with pytest.raises(ConfigError, match="--port 99999"):
        listen(99999, "127.0.0.1")
