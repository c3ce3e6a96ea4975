"""Routes that a deployment adds."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

import dynamo.llm
from dynamo.core.errors import ConfigError
from dynamo.http.routes import extensions
from dynamo.http.routes.extensions import (
    Extensions,
    FrontendExtensionContext,
    FrontendResponse,
    FrontendRoute,
    load_extensions,
)
from dynamo.http.routes.table import RouteTable


def model(name: str, *workers: int) -> Any:
    return SimpleNamespace(name=name, worker_ids=lambda: list(workers))


def client(*routes: FrontendRoute) -> TestClient:
    models = SimpleNamespace(all_sets=lambda: [model("b", 1), model("a")])
    table = RouteTable()
    Extensions(FrontendExtensionContext(cast(Any, models), lambda: False)).add(table, routes)
    return TestClient(Starlette(routes=table.starlette_routes()))


def fail(context: FrontendExtensionContext) -> object:
    raise ValueError("secret")


def test_a_handler_sees_the_frontend_as_it_is() -> None:
    def say(context: FrontendExtensionContext) -> object:
        return [
            context.is_ready(),
            context.is_cancelled(),
            context.has_any_ready_model(),
            context.is_model_ready_to_serve("a"),
            context.is_model_ready_to_serve("b"),
            context.model_display_names(),
            context.serving_ready_display_names(),
        ]

    said = client(FrontendRoute("get", "/x", say)).get("/x").json()
    assert said == [True, False, True, False, True, ["a", "b"], ["b"]]


@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [(None, 200, "null"), ("text", 200, '"text"'), (FrontendResponse(418, {"x": 1}), 418, '{"x":1}')],
)
def test_what_a_handler_gives_is_the_answer(answer: object, status: int, text: str) -> None:
    said = client(FrontendRoute("GET", "/x", lambda _: answer)).get("/x")
    assert (said.status_code, said.text) == (status, text)


@pytest.mark.parametrize("handler", [fail, lambda _: object()])
def test_a_handler_that_fails_is_not_quoted(handler: Any, caplog: pytest.LogCaptureFixture) -> None:
    said = client(FrontendRoute("GET", "/x", handler)).get("/x")
    assert (said.status_code, said.json()) == (500, {"error": "frontend route extension failed"})
    assert "route extension failed" in caplog.text


def test_a_handler_that_hangs_is_answered_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "HANDLER_S", 0.01)
    ending = threading.Event()
    http = client(FrontendRoute("GET", "/x", lambda _: ending.wait(30)))
    assert http.get("/x").status_code == 503
    ending.set()


def test_too_many_at_a_time_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "RUNNING_MAX", 0)
    assert client(FrontendRoute("GET", "/x", lambda _: 1)).get("/x").status_code == 529


async def asynchronous(context: FrontendExtensionContext) -> object:
    return None


@pytest.mark.parametrize(
    ("method", "path", "handler", "error"),
    [
        ("POST", "/x", fail, ValueError),
        ("GET", "x", fail, ValueError),
        ("GET", "/{x}", fail, ValueError),
        ("GET", "/a b", fail, ValueError),
        ("GET", "/x", 5, TypeError),
        ("GET", "/x", asynchronous, ValueError),
    ],
)
def test_what_can_be_no_route_is_refused(method: str, path: str, handler: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        FrontendRoute(method, path, handler)


def test_a_status_must_be_one() -> None:
    with pytest.raises(ValueError, match="invalid status code 99"):
        FrontendResponse(99, {})


def test_a_path_that_is_taken_is_an_error() -> None:
    with pytest.raises(ConfigError, match="GET /x is already in use"):
        client(FrontendRoute("GET", "/x", fail), FrontendRoute("GET", "/x", fail))


def provide() -> FrontendRoute:
    return FrontendRoute("GET", "/provided", fail)


def provide_none() -> None:
    return None


def provide_wrong() -> object:
    return [5]


def test_providers_are_found_by_their_path_and_asked_once() -> None:
    routes = load_extensions([f"{__name__}:provide", f"{__name__}:provide", f"{__name__}:provide_none"])
    assert [route.path for route in routes] == ["/provided"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nobody", "no such entry point"),
        ("no.such.module:provide", "no.such.module|No module named"),
        (f"{__name__}:nothing", "nothing"),
        (f"{__name__}:pytest", "must name a callable"),
        (f"{__name__}:provide_wrong", "must return FrontendRoute objects"),
    ],
)
def test_a_provider_that_cannot_be_used_is_named(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_extensions([name])


def test_upstreams_names_are_where_upstream_has_them() -> None:
    assert dynamo.llm.FrontendRoute is FrontendRoute  # type: ignore[attr-defined]
    assert dynamo.llm.FrontendResponse is FrontendResponse  # type: ignore[attr-defined]
