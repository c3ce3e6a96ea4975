"""Unary: exactly one answer."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynamo.core.errors import Unknown
from dynamo.runtime import Context, DistributedRuntime, UnaryClient, serve_unary_endpoint

TIMEOUT_S = 5.0


class Fixed:
    def __init__(self, *answers: Any) -> None:
        self.answers = answers
        self.closed = False

    async def round_robin(
        self, request: Any, annotated: bool | None = True, context: Context | None = None
    ) -> AsyncIterator[Any]:
        assert annotated is False
        return self.stream()

    async def stream(self) -> AsyncIterator[Any]:
        try:
            for answer in self.answers:
                yield answer
        finally:
            self.closed = True


async def test_unary_handler_returns_the_single_response() -> None:
    client = Fixed({"a": 1})
    assert await UnaryClient(client).complete({}) == {"a": 1}
    assert client.closed


@pytest.mark.parametrize("answers", [(), (1, 2), (1, 2, 3)])
async def test_unary_handler_refuses_no_response_and_several(answers: tuple[int, ...]) -> None:
    client = Fixed(*answers)
    with pytest.raises(Unknown, match="must send exactly one"):
        await UnaryClient(client).complete({})
    assert client.closed


async def test_unary_handler_accepts_none_as_a_response() -> None:
    assert await UnaryClient(Fixed(None)).complete({}) is None


async def test_unary_handler_receives_its_context() -> None:
    async def handler(request: Any, *, context: Context) -> Any:
        return [request, context.id()]

    runtime = DistributedRuntime(None, "mem", "mem", event_plane="mem")
    serving = asyncio.ensure_future(serve_unary_endpoint(runtime.endpoint("ns.unary.ep"), handler))
    client = await runtime.endpoint("ns.unary.ep").client()
    await client.wait_for_instances(TIMEOUT_S)
    assert await UnaryClient(client).complete("q", context=Context("my-id")) == ["q", "my-id"]
    await runtime.shutdown()
    await serving
