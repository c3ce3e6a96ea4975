"""A request of the process to itself: its response, whole or event by event, and its cancellation."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.scripted_engine.script import Script
from tests.scripted_engine.stack import NAME, USER, open_stack
from tests.settle import turns

from dynamo.core.errors import Cancelled, ResponseTimeout
from dynamo.serving.choice import Frame
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.local_requests import UNREAD_BYTES_MAX, LocalRequest
from dynamo.serving.response_stream import ResponseStream


def exchange_of(handler: Callable[[Any], None]) -> LocalRequest:
    return LocalRequest(handler, b"{}")


async def events_of(exchange: LocalRequest) -> list[bytes]:
    return [event async for event in exchange.events()]


async def test_local_request_returns_status_and_body() -> None:
    answer = await exchange_of(lambda exchange: exchange.respond(201, b"x")).whole()
    assert (answer.status, answer.body, answer.error) == (201, b"x", None)


async def test_local_request_exposes_a_refusal() -> None:
    wrong = ErrorAnswer(400, "wrong", param="n")
    answer = await exchange_of(lambda exchange: exchange.refuse(wrong)).whole()
    assert (answer.status, answer.error) == (400, wrong)
    assert json.loads(answer.body)["error"]["param"] == "n"
    streamed = exchange_of(lambda exchange: exchange.refuse(wrong))
    assert (await events_of(streamed), streamed.refusal) == ([], wrong)


@given(st.lists(st.integers(1, 40), max_size=12))
def test_local_request_events_are_independent_of_write_boundaries(cuts: list[int]) -> None:
    stream = b'data: {"a":1}\n\n: idle\n\nevent: x\n\ndata: {"b":2}\n\ndata: [DONE]\n\n'

    def handler(exchange: ResponseStream) -> None:
        rest = stream
        for place, cut in enumerate(cuts):
            piece, rest = rest[:cut], rest[cut:]
            if piece and place % 2:
                exchange.write_framed(Frame(piece[:2], piece[3:]), piece[2:3])
            elif piece:
                exchange.write(piece)
        exchange.end(rest)

    assert asyncio.run(events_of(exchange_of(handler))) == [b'{"a":1}', b'{"b":2}']


async def test_local_request_reads_several_events_in_one_frame() -> None:
    def handler(exchange: ResponseStream) -> None:
        exchange.write_framed(Frame(b"data: ", b"\n\n"), b"a\n\ndata: b")
        exchange.end()

    assert await events_of(exchange_of(handler)) == [b"a", b"b"]


async def test_cancelled_local_request_disconnects_its_client() -> None:
    left: list[str] = []

    def handler(exchange: ResponseStream) -> None:
        exchange.on_disconnect = lambda: left.append("left")

    asking = asyncio.ensure_future(exchange_of(handler).whole())
    await turns()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert left == ["left"]


async def test_completed_local_request_does_not_call_its_disconnect_handler() -> None:
    left: list[str] = []

    def handler(exchange: ResponseStream) -> None:
        exchange.on_disconnect = lambda: left.append("left")
        exchange.respond(200, b"")

    exchange = exchange_of(handler)
    await exchange.whole()
    exchange.respond(500, b"late")
    exchange.write(b"late")
    exchange.end(b"late")
    assert (left, exchange.disconnected) == ([], True)


async def test_local_request_leave_cancels_its_reader() -> None:
    exchange = exchange_of(lambda _: None)
    asking = asyncio.ensure_future(exchange.whole())
    await turns()
    exchange.leave()
    with pytest.raises(Cancelled):
        await asking


async def test_local_request_with_a_slow_reader_times_out() -> None:
    left: list[str] = []

    def handler(exchange: ResponseStream) -> None:
        exchange.on_disconnect = lambda: left.append("left")
        for _ in range(UNREAD_BYTES_MAX // 1000 + 2):
            exchange.write(b"data: " + b"x" * 1000 + b"\n\n")

    with pytest.raises(ResponseTimeout):
        await events_of(exchange_of(handler))
    assert left == ["left"]


async def test_local_request_is_served_by_the_pipeline() -> None:
    async with open_stack() as stack:
        annotations = [Script(["Hello there."]).annotation()]
        body = {"model": NAME, "messages": USER, "stream": True, "nvext": {"annotations": annotations}}
        exchange = LocalRequest(stack.pipeline.handle_chat, json.dumps(body).encode())
        chunks = [json.loads(event) for event in await events_of(exchange)]
        output = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
        assert output == "Hello there."
        assert stack.pipeline.inflight == 0
