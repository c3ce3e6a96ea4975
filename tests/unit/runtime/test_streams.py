"""Streams: a response as an async iterator, and an async generator as a handler."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.settle import turns

from dynamo.core.codec import encode, msgpack_encode
from dynamo.core.errors import (
    Cancelled,
    Disconnected,
    EngineShutdown,
    HttpError,
    InvalidArgument,
    ResponseTimeout,
    Unknown,
)
from dynamo.core.tasks import TaskOwner
from dynamo.runtime.context import Context
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.request_plane.base import AnnotatedValue, Item, Request
from dynamo.runtime.request_plane.reply import ReplyBase
from dynamo.runtime.request_plane.request_frames import RequestFrames
from dynamo.runtime.streams import BidirectionalHandler, GeneratorHandler, ResponseStream, write


class FakeCall:
    instance_id = 1

    def __init__(self) -> None:
        self.outputs: list[str] = []

    def stop(self) -> None:
        self.outputs.append("stop")

    def kill(self) -> None:
        self.outputs.append("kill")


class FakeReply(ReplyBase):
    def __init__(self) -> None:
        super().__init__("r")
        self.written: list[Any] = []
        self.end: BaseException | str | None = "open"

    def token(self, token_id: int) -> None:
        self.written.append(token_id)

    def item(self, value: Any) -> None:
        self.written.append(value)

    def write_end(self) -> None:
        self.end = None

    def write_error(self, error: BaseException) -> None:
        self.end = error


def bound(annotated: bool = True, context: Context | None = None) -> tuple[ResponseStream, FakeCall]:
    stream, call = ResponseStream(annotated), FakeCall()
    stream.bind(call, context)
    return stream, call


async def test_response_stream_yields_plain_or_annotated_values() -> None:
    for annotated in (False, True):
        stream, _ = bound(annotated)
        stream.on_token(7)
        stream.on_item(Item(msgpack_encode({"a": 1}), "msgpack", "i", "e", ["c"]))
        stream.on_end()
        elements = [element async for element in stream]
        if not annotated:
            assert elements == [{"token_ids": [7], "index": 0}, {"a": 1}]
        else:
            token, item = elements
            assert (token.data(), token.event(), token.comments(), token.id()) == (
                {"token_ids": [7], "index": 0}, None, None, None,
            )  # fmt: skip
            assert (item.data(), item.event(), item.comments(), item.id()) == ({"a": 1}, "e", ["c"], "i")
            assert not token.is_error()
            assert not item.is_error()
            assert repr(item) == "Annotated(data={'a': 1}, event='e')"


async def test_response_stream_reader_waits_for_the_next_element() -> None:
    stream, _ = bound(annotated=False)
    reading = asyncio.ensure_future(anext(stream))
    await turns()
    stream.on_token(1)
    assert await reading == {"token_ids": [1], "index": 0}
    ending = asyncio.ensure_future(anext(stream, "end"))
    await turns()
    stream.on_end()
    assert await ending == "end"


async def test_response_stream_raises_an_error_after_earlier_elements() -> None:
    stream, _ = bound(annotated=False)
    stream.on_token(1)
    stream.on_error(InvalidArgument("no"))
    assert await anext(stream) == {"token_ids": [1], "index": 0}
    with pytest.raises(InvalidArgument):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_response_stream_close_before_the_end_kills_the_request_once() -> None:
    stream, call = bound()
    stream.on_token(1)
    await stream.aclose()
    await stream.aclose()
    assert call.outputs == ["kill"]
    dropped, other = bound()
    del dropped
    assert other.outputs == ["kill"]


async def test_response_stream_close_after_the_end_does_not_kill_the_request() -> None:
    stream, call = bound()
    stream.on_end()
    await stream.aclose()
    assert call.outputs == []


async def test_response_stream_cancelled_reader_kills_the_request() -> None:
    stream, call = bound()
    reading = asyncio.ensure_future(anext(stream))
    await turns()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert call.outputs == ["kill"]


async def test_response_stream_context_stops_and_kills_the_call() -> None:
    for end, output in ((Context.stop_generating, "stop"), (Context.kill, "kill")):
        context = Context()
        stream, call = bound(context=context)
        end(context)
        assert call.outputs == [output]
        stream.on_end()


async def test_response_stream_reader_ends_when_its_context_is_killed() -> None:
    context = Context()
    stream, call = bound(context=context)
    stream.on_token(1)
    context.stop_generating()
    assert (await anext(stream)).data() == {"token_ids": [1], "index": 0}
    reading = asyncio.ensure_future(anext(stream, "end"))
    await turns()
    context.kill()
    assert await reading == "end"
    assert call.outputs == ["stop", "kill"]


async def test_stopping_the_context_ends_the_stream_after_the_elements_received_so_far() -> None:
    for late in (None, Cancelled("CancelledError: ")):
        context = Context()
        stream, call = bound(annotated=False, context=context)
        stream.on_token(1)
        context.stop_generating()
        stream.on_token(2)
        assert [element async for element in stream] == [{"token_ids": [1], "index": 0}]
        stream.on_error(late) if late else stream.on_end()
        assert [element async for element in stream] == []
        assert call.outputs == ["stop"]


async def test_response_stream_dropped_after_stop_does_not_kill_the_request() -> None:
    context = Context()
    context.stop_generating()
    stream, call = bound(context=context)
    assert [element async for element in stream] == []
    del stream
    assert call.outputs == ["stop"]


@pytest.mark.parametrize("error", [Unknown("why"), HttpError(415, "why"), Disconnected("why"), InvalidArgument("why")])
async def test_response_stream_error_is_a_value_error_and_keeps_its_class(error: Exception) -> None:
    stream, _ = bound()
    stream.on_error(error)
    with pytest.raises(ValueError, match="why") as raised:
        await anext(stream)
    assert isinstance(raised.value, type(error))
    assert vars(raised.value) == vars(error)


async def test_context_does_not_keep_references_to_its_streams() -> None:
    context = Context()
    stream, call = bound(context=context)
    stream.on_end()
    dropped, other = bound(context=context)
    del dropped
    context.stop_generating()
    assert call.outputs == []
    assert other.outputs == ["kill"]


async def test_response_stream_kills_the_request_when_the_reader_is_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.runtime.streams.UNREAD_MAX", 2)
    stream, call = bound(annotated=False)
    for token in range(4):
        stream.on_token(token)
    assert call.outputs == ["kill"]
    assert [await anext(stream), await anext(stream)] == [{"token_ids": [t], "index": 0} for t in (0, 1)]
    with pytest.raises(ResponseTimeout):
        await anext(stream)


# Handlers --------------------------------------------------------------------------------------------------------


async def run(handler: Any, body: Any = None) -> FakeReply:
    tasks, reply = TaskOwner("t"), FakeReply()
    GeneratorHandler(handler, tasks)(Request("r", msgpack_encode(body), metadata={"m": "1"}), reply)
    assert await tasks.wait(1.0)
    return reply


async def test_generator_values_are_written_and_its_return_ends_the_response() -> None:
    async def generate(request: dict[str, Any]) -> AsyncIterator[Any]:
        yield {"token_ids": [request["first"]], "index": 0}
        yield {"token_ids": [2], "index": 1}

    reply = await run(generate, {"first": 5})
    assert (reply.written, reply.end) == ([5, {"token_ids": [2], "index": 1}], None)


async def test_generator_handler_receives_the_context() -> None:
    async def generate(request: Any, context: Context) -> AsyncIterator[Any]:
        yield [context.id(), context.metadata]

    assert (await run(generate)).written == [["r", {"m": "1"}]]


async def test_generator_handler_receives_the_context_by_name_or_second_position() -> None:
    async def by_name(request: Any, option: str = "default", *, context: Context) -> AsyncIterator[Any]:
        yield [option, context.id()]

    async def by_place(request: Any, ctx: Context) -> AsyncIterator[Any]:
        yield ["place", ctx.id()]

    async def without(request: Any, option: Any = None) -> AsyncIterator[Any]:
        yield [option]

    assert (await run(by_name)).written == [["default", "r"]]
    assert (await run(by_place)).written == [["place", "r"]]
    assert (await run(without)).written == [[None]]


def test_generator_handler_refuses_a_function_that_is_no_generator() -> None:
    async def generate(request: Any) -> Any:
        return request

    with pytest.raises(InvalidArgument, match="generate"):
        GeneratorHandler(generate, TaskOwner("t"))


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (ValueError("bad"), InvalidArgument),
        (TypeError("bad"), InvalidArgument),
        (EngineShutdown("x"), EngineShutdown),
        (asyncio.CancelledError("x"), Cancelled),
        (RuntimeError("boom"), RuntimeError),
    ],
)
async def test_generator_exception_ends_the_response_with_its_error(
    raised: BaseException, kind: type[Exception]
) -> None:
    async def generate(request: Any) -> AsyncIterator[Any]:
        yield "before"
        raise raised

    reply = await run(generate)
    assert reply.written == ["before"]
    assert type(reply.end) is kind


async def test_generator_cancelled_by_shutdown_ends_with_engine_shutdown() -> None:
    async def generate(request: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield None

    tasks, reply = TaskOwner("t"), FakeReply()
    GeneratorHandler(generate, tasks)(Request("r", b"\xc0"), reply)
    await turns()
    await tasks.cancel_and_wait()
    assert isinstance(reply.end, EngineShutdown)


async def test_generator_context_reports_stop_and_kill() -> None:
    for end, expected in ((ReplyBase.stop, (True, False)), (ReplyBase.kill, (True, True))):
        seen: list[tuple[bool, bool]] = []

        async def generate(request: Any, context: Context, seen: Any = seen) -> AsyncIterator[Any]:
            await context.async_killed_or_stopped()
            seen.append((context.is_stopped(), context.is_killed()))
            yield "last"

        tasks, reply = TaskOwner("t"), FakeReply()
        GeneratorHandler(generate, tasks)(Request("r", b"\xc0"), reply)
        await turns()
        end(reply)
        assert await tasks.wait(1.0)
        assert seen == [expected]


@pytest.mark.parametrize("end", [ReplyBase.stop, ReplyBase.kill])
async def test_cancelled_generator_is_resumed_once_and_then_closed(end: Callable[[FakeReply], None]) -> None:
    """As upstream: the handler sees the cancellation, and its further elements are not sent."""
    steps: list[Any] = []
    go_on = asyncio.Event()

    async def generate(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            yield 1
            await go_on.wait()
            yield 2
            steps.append(context.is_stopped())
            yield 3
            steps.append("resumed again")
        finally:
            steps.append("closed")

    tasks, reply = TaskOwner("t"), FakeReply()
    GeneratorHandler(generate, tasks)(Request("r", b"\xc0"), reply)
    await turns()
    end(reply)
    go_on.set()
    assert await tasks.wait(1.0)
    assert steps == [True, "closed"]
    assert reply.written == [1]


def test_generator_handler_refuses_an_unreadable_body_as_invalid_argument() -> None:
    async def generate(request: Any) -> AsyncIterator[Any]:
        yield None

    with pytest.raises(InvalidArgument):
        GeneratorHandler(generate, TaskOwner("t"))(Request("r", b"\xc1"), FakeReply())


@pytest.mark.parametrize(
    ("element", "written"),
    [
        ({"token_ids": [3], "index": 0}, 3),
        ({"token_ids": [3], "index": 1}, None),
        ({"token_ids": [3, 4], "index": 0}, None),
        ({"token_ids": [-3], "index": 0}, None),
        ({"token_ids": [True], "index": 0}, None),
        ({"token_ids": [3], "index": 0, "finish_reason": "stop"}, None),
        ("text", None),
    ],
)
def test_generator_output_uses_token_fast_path_only_for_a_single_plain_token(element: Any, written: Any) -> None:
    reply = FakeReply()
    write(reply, element)
    assert reply.written == [element if written is None else written]


async def test_first_token_callback_runs_at_the_first_element() -> None:
    reported: list[int] = []
    output: list[int] = []

    async def handler(_: Any, context: Context) -> AsyncIterator[Any]:
        context.on_first_token(lambda: reported.append(len(output)))
        for number in range(3):
            output.append(number)
            yield number

    tasks = TaskOwner("test")
    GeneratorHandler(handler, tasks)(Request("r", msgpack_encode({}), "msgpack"), FakeReply())
    assert await tasks.wait(5)
    assert reported == [1]


async def test_bidirectional_handler_reads_its_request_as_a_stream() -> None:
    async def handler(request_stream: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        async for frame in request_stream:
            yield [context.id(), frame]
        yield ["the answer goes on"]

    tasks, reply = TaskOwner("test"), FakeReply()
    BidirectionalHandler(handler, tasks)(Request("r", msgpack_encode({"a": 1}), "msgpack"), reply)
    assert await tasks.wait(5)
    assert (reply.written, reply.end) == ([["r", {"a": 1}], ["the answer goes on"]], None)


async def test_bidirectional_handler_reads_request_frames_as_they_arrive() -> None:
    frames = RequestFrames()

    async def handler(request_stream: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for frame in request_stream:
            yield [frame]

    tasks, reply = TaskOwner("test"), FakeReply()
    BidirectionalHandler(handler, tasks)(Request("r", b"", "msgpack", frames=frames), reply)
    for number in range(3):
        frames.add(msgpack_encode(number))
        await turns()
    frames.end()
    assert await tasks.wait(5)
    assert (reply.written, reply.end) == ([[0], [1], [2]], None)


async def test_bidirectional_handler_reports_an_unreadable_frame_as_invalid_argument() -> None:
    frames = RequestFrames()

    async def handler(request_stream: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for frame in request_stream:
            yield [frame]

    tasks, reply = TaskOwner("test"), FakeReply()
    BidirectionalHandler(handler, tasks)(Request("r", b"", "msgpack", frames=frames), reply)
    frames.add(b"\xc1")
    assert await tasks.wait(5)
    assert isinstance(reply.end, InvalidArgument)


async def test_generator_envelope_is_written_with_its_annotations() -> None:
    async def generate(request: Any) -> AsyncIterator[Any]:
        yield {"_dynamo_annotated": True, "data": {"b": 2}, "event": "progress", "comment": ["half"], "id": "7"}
        yield {"_dynamo_annotated": False, "data": 5}
        yield {"_dynamo_annotated": True, "event": "error", "comment": ["out of", "memory"]}

    reply = await run(generate)
    assert reply.written == [
        AnnotatedValue({"b": 2}, "7", "progress", ["half"]),
        {"_dynamo_annotated": False, "data": 5},
    ]
    assert isinstance(reply.end, Unknown)
    assert str(reply.end) == "out of, memory"


@pytest.mark.parametrize("wrong", [{"id": 7}, {"event": 3}, {"comment": "text"}, {"comment": [1]}])
async def test_generator_envelope_with_non_text_annotations_fails_only_its_request(wrong: dict[str, Any]) -> None:
    async def generate(request: Any) -> AsyncIterator[Any]:
        yield {"_dynamo_annotated": True, "data": 1, **wrong}

    reply = await run(generate)
    assert reply.written == []
    assert isinstance(reply.end, Unknown)
    assert "invalid response object from Python async generator" in str(reply.end)


async def test_response_stream_skips_elements_without_data_unless_annotations_are_requested() -> None:
    stream = ResponseStream(annotated=False)
    for data in (None, b"\x05", b"\xc0", b"\x06"):
        stream.on_item(Item(data, "msgpack", event="e"))
    stream.on_end()
    assert [element async for element in stream] == [5, 6]


async def test_annotations_of_an_envelope_reach_the_caller() -> None:
    async def generate(request: Any) -> AsyncIterator[Any]:
        yield {"_dynamo_annotated": True, "data": {"b": 2}, "event": "progress", "comment": ["half"], "id": "7"}
        yield {"_dynamo_annotated": True, "event": "only"}

    runtime = DistributedRuntime(None, "mem", "mem", event_plane="mem")
    endpoint = runtime.endpoint("ns.annotated.ep")
    serving = asyncio.ensure_future(endpoint.serve_endpoint(generate))
    client = await endpoint.client()
    await client.wait_for_instances(5.0)
    found = [(one.data(), one.event(), one.comments(), one.id()) async for one in await client.generate({})]
    assert found == [({"b": 2}, "progress", ["half"], "7"), (None, "only", None, None)]
    await runtime.shutdown()
    await serving


async def test_generator_element_that_cannot_be_encoded_fails_the_request() -> None:
    class EncodingReply(FakeReply):
        def item(self, value: Any) -> None:
            super().item(encode(value, "msgpack"))

    tasks, reply = TaskOwner("test"), EncodingReply()

    async def generate(_: Any) -> AsyncIterator[Any]:
        yield object()

    GeneratorHandler(generate, tasks)(Request("r", msgpack_encode({})), reply)
    await turns()
    assert isinstance(reply.end, Unknown)
    assert "failed serializing Python response" in str(reply.end)


@pytest.mark.parametrize(
    "raised", [asyncio.CancelledError(), RuntimeError("late"), ValueError("late"), Unknown("late")]
)
async def test_errors_of_a_handler_after_a_stop_are_not_sent(raised: BaseException) -> None:
    async def generate(request: Any, context: Context) -> AsyncIterator[Any]:
        yield "first"
        await context.async_killed_or_stopped()
        raise raised

    tasks, reply = TaskOwner("t"), FakeReply()
    GeneratorHandler(generate, tasks)(Request("r", b"\xc0"), reply)
    await turns()
    reply.stop()
    assert await tasks.wait(1.0)
    assert (reply.written, reply.end) == (["first"], None)
