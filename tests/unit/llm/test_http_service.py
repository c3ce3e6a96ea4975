"""HttpService: its registered engines. Its HTTP responses are covered by the integration tests."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.http.routes.table import Operation, RouteTable
from dynamo.llm import HttpService, PythonAsyncEngine
from dynamo.llm.http_service import flat_errors
from dynamo.serving.errors import ErrorAnswer


async def generate(request: Any) -> AsyncIterator[Any]:
    yield request


async def test_engines_are_added_listed_and_removed() -> None:
    service = HttpService(0)
    engine = PythonAsyncEngine(generate, asyncio.get_running_loop())
    service.add_chat_completions_model("b", "sum", engine)
    service.add_chat_completions_model("a", "sum", engine)
    service.add_completions_model("c", "sum", engine)
    assert (service.list_chat_completions_models(), service.list_completions_models()) == (["a", "b"], ["c"])
    service.remove_chat_completions_model("a")
    service.remove_completions_model("c")
    assert (service.list_chat_completions_models(), service.list_completions_models()) == (["b"], [])
    for remove in (service.remove_chat_completions_model, service.remove_completions_model):
        with pytest.raises(InvalidArgument, match="not served"):
            remove("c")


async def test_only_existing_endpoints_can_be_enabled() -> None:
    service = HttpService(0)
    service.enable_endpoint("chat", True)
    service.enable_endpoint("Completion", False)
    with pytest.raises(InvalidArgument, match="embedding"):
        service.enable_endpoint("embedding", True)
    with pytest.raises(InvalidArgument, match="batch endpoint availability is fixed when the HTTP service is built"):
        service.enable_endpoint("batch", True)


def test_route_errors_have_only_upstream_keys() -> None:
    routes = RouteTable()
    routes.hot("POST", "/v1/x", cast(Any, None), Operation("x"))
    flat_errors(routes, cast(Any, None))
    assert routes.error_bodies() == {b"/v1/x": ErrorAnswer.flat_body}
