"""Routes that a deployment adds: handlers and their failures."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from dynamo.core.errors import ConfigError
from dynamo.http.extensions import FrontendExtensionContext, FrontendResponse, FrontendRoute
from dynamo.http.routes import extensions
from dynamo.http.routes.extensions import Extensions
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


def test_extension_handler_reads_frontend_state() -> None:
    def handle(context: FrontendExtensionContext) -> object:
        return [
            context.is_ready(),
            context.is_cancelled(),
            context.has_any_ready_model(),
            context.is_model_ready_to_serve("a"),
            context.is_model_ready_to_serve("b"),
            context.model_display_names(),
            context.serving_ready_display_names(),
        ]

    output = client(FrontendRoute("get", "/x", handle)).get("/x").json()
    assert output == [True, False, True, False, True, ["a", "b"], ["b"]]


@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [(None, 200, "null"), ("text", 200, '"text"'), (FrontendResponse(418, {"x": 1}), 418, '{"x":1}')],
)
def test_extension_handler_result_is_the_response(answer: object, status: int, text: str) -> None:
    output = client(FrontendRoute("GET", "/x", lambda _: answer)).get("/x")
    assert (output.status_code, output.text) == (status, text)


@pytest.mark.parametrize("handler", [fail, lambda _: object()])
def test_extension_handler_exception_is_logged_and_not_returned(handler: Any, caplog: pytest.LogCaptureFixture) -> None:
    output = client(FrontendRoute("GET", "/x", handler)).get("/x")
    assert (output.status_code, output.json()) == (500, {"error": "frontend route extension failed"})
    assert "route extension failed" in caplog.text


def test_extension_handler_timeout_returns_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "HANDLER_S", 0.01)
    ending = threading.Event()
    http = client(FrontendRoute("GET", "/x", lambda _: ending.wait(30)))
    assert http.get("/x").status_code == 503
    ending.set()


def test_extension_requests_over_the_concurrency_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "RUNNING_MAX", 0)
    assert client(FrontendRoute("GET", "/x", lambda _: 1)).get("/x").status_code == 529


def test_duplicate_extension_route_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="duplicate frontend route registered: GET /x"):
        client(FrontendRoute("GET", "/x", fail), FrontendRoute("GET", "/x", fail))
