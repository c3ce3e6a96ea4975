"""Unary calls: one request and one response over streaming endpoints."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from dynamo.core.errors import Unknown
from dynamo.runtime.component import Endpoint
from dynamo.runtime.context import Context


class RoundRobinClient(Protocol):
    """Part of a client that unary calls need."""

    async def round_robin(
        self, request: Any, annotated: bool | None = True, context: Context | None = None
    ) -> AsyncIterator[Any]: ...


class UnaryClient:
    """Client that sends a request to the next instance in turn and returns its only response."""

    def __init__(self, client: RoundRobinClient) -> None:
        self._client = client

    async def complete(self, request: Any, *, context: Context | None = None) -> Any:
        """Return the response. Raise `Unknown` unless there is exactly one."""
        answers = await self._client.round_robin(request, annotated=False, context=context)
        try:
            first = await anext(answers, _NONE)
            if first is _NONE:
                raise Unknown("the endpoint ended its stream without a response: must send exactly one")
            if await anext(answers, _NONE) is not _NONE:
                raise Unknown("the endpoint sent several responses: must send exactly one")
        finally:
            close = getattr(answers, "aclose", None)
            if close is not None:
                await close()
        return first


async def serve_unary_endpoint(endpoint: Endpoint, handler: Callable[..., Awaitable[Any]]) -> None:
    """Serve `async handler(request, *, context)`, whose result is the response; return after the shutdown."""

    async def generate(request: Any, *, context: Context) -> AsyncIterator[Any]:
        yield await handler(request, context=context)

    await endpoint.serve_endpoint(generate)


_NONE = object()
