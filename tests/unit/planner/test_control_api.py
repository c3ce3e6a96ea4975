"""Control API: routes, errors, and a port that is in use."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.asgi import request_json

from dynamo.core.errors import HttpError, StartupError
from dynamo.planner.control_api import control_routes, serve_optional
from dynamo.runtime.json_service import JsonRoutes


class FakePlanner:
    """Limits that are stored as given."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"mode": "agg", "min_endpoint": 1}

    async def limits(self) -> dict[str, Any]:
        return self.values

    async def set_limits(self, update: dict[str, int]) -> dict[str, Any]:
        if update.get("max_gpu_budget") == 0:
            raise HttpError(503, "planner decision in progress; retry the request")
        self.values |= update
        return self.values


async def test_update_without_content_type_is_applied_and_read_back() -> None:
    application = control_routes(FakePlanner()).application()
    assert await request_json(application, "PATCH", "/v1/min-endpoints", b'{"min_endpoint": 3}') == (
        200,
        {"mode": "agg", "min_endpoint": 3},
    )
    assert (await request_json(application, "GET", "/v1/min-endpoints"))[1]["min_endpoint"] == 3


async def test_refused_update_has_its_status_and_message() -> None:
    application = control_routes(FakePlanner()).application()
    assert await request_json(application, "PATCH", "/v1/min-endpoints", b'{"max_gpu_budget": 0}') == (
        503,
        {"error": "planner decision in progress; retry the request"},
    )
    assert (await request_json(application, "PATCH", "/v1/min-endpoints", b"[]"))[0] == 400


async def test_control_api_with_port_zero_is_disabled() -> None:
    async with serve_optional(JsonRoutes(), 0, "control_api_port") as url:
        assert url is None


class UnusableRoutes(JsonRoutes):
    """Routes without a port to serve them on."""

    @asynccontextmanager
    async def serve(self, port: int, *, host: str = "", setting: str = "") -> AsyncIterator[str]:
        raise StartupError(f"{setting} {port}: the port is in use by another process (address {host})")
        yield ""


async def test_port_that_cannot_be_used_is_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        async with serve_optional(UnusableRoutes(), 9086, "control_api_port", host="127.0.0.1") as url:
            assert url is None
    reason = "the port is in use by another process (address 127.0.0.1)"
    assert caplog.messages == [f"control_api_port 9086: {reason}; the planner continues without it"]
