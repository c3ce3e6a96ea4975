"""Requests to an ASGI application without a socket."""

import json
from collections.abc import Mapping
from typing import Any

import httpx
from starlette.types import ASGIApp


async def request(
    application: ASGIApp, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> httpx.Response:
    """Return the response of the application; one that it sends before it raises counts."""
    transport = httpx.ASGITransport(application, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(method, path, content=body, headers=headers)


class JsonObject(dict[str, Any]):
    """A JSON object whose members are attributes, too."""

    __getattr__ = dict.__getitem__


async def request_json(
    application: ASGIApp, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> tuple[int, Any]:
    """Return the status and the body: a JSON value, text for another content type, None for an empty body."""
    response = await request(application, method, path, body, headers)
    if response.headers.get("content-type") == "application/json":
        return response.status_code, json.loads(response.content, object_hook=JsonObject)
    return response.status_code, response.text or None
