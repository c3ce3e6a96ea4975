"""Completion calls: the same completions as in JSON, errors as errors, and readers that disconnect or are too slow."""

import asyncio
import json
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from tests.scripted_engine.script import Script
from tests.scripted_engine.stack import NAME, ScriptedStack, open_stack
from tests.settle import turns

from dynamo.core.errors import ResponseTimeout
from dynamo.protocols.openai import CompletionRequest, completion_of
from dynamo.protocols.openai_answers import TextChoice, TextCompletion
from dynamo.serving.completion_calls import CompletionCall
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.local_requests import UNREAD_BYTES_MAX, LocalRequest

REQUEST = CompletionRequest(model="m", prompt="Hi", stream=True)
PIECE = TextCompletion("c", [TextChoice("x", 0)], 1, "m")


def fields_of(script: Script, **fields: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": "Hi", "nvext": {"annotations": [script.annotation()]}, **fields}


async def received(call: CompletionCall) -> list[TextCompletion]:
    return [completion async for completion in call.completions()]


async def called(stack: ScriptedStack, fields: dict[str, Any]) -> tuple[list[TextCompletion], ErrorAnswer | None]:
    call = CompletionCall(stack.pipeline.handle_call, completion_of(fields))
    return await received(call), call.refusal


async def decoded_from_json(stack: ScriptedStack, fields: dict[str, Any]) -> list[TextCompletion]:
    request = LocalRequest(stack.pipeline.handle_completion, json.dumps(fields).encode())
    events = [event async for event in request.events()] if fields["stream"] else [(await request.whole()).body]
    return [msgspec.json.decode(event, type=TextCompletion) for event in events]


def in_order(completions: list[TextCompletion]) -> list[TextCompletion]:
    """Return the completions without id and time, by choice: the ticks in which tokens arrive order different choices."""
    assert all(completion.id.startswith("cmpl-") and completion.created for completion in completions)
    bare = [msgspec.structs.replace(completion, id="", created=0) for completion in completions]
    return sorted(bare, key=lambda completion: completion.choices[0].index)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2},
        {"stop": "re"},
        {"logprobs": 1},
        {"logprobs": 1, "n": 2},
        {"echo": True},
        {"echo": True, "max_tokens": 0},
        {"prompt": ["Hi", "Ho"]},
    ],
    ids=str,
)
async def test_completion_calls_return_the_completions_of_the_json_response(
    fields: dict[str, Any], stream: bool
) -> None:
    script = Script(["Hello there.", "Good day, you two."][: fields.get("n", 1)])
    async with open_stack() as stack:
        sent = fields_of(script, stream=stream, **fields)
        completions, refusal = await called(stack, sent)
        expected = await decoded_from_json(stack, sent)
        assert refusal is None
        assert stack.pipeline.inflight == 0
    assert in_order(completions) == in_order(expected)


async def test_tokens_of_one_message_are_separate_completions() -> None:
    async with open_stack() as stack:
        completions, _ = await called(stack, fields_of(Script(["Hello there."], sizes=[9]), stream=True))
        assert len(completions) > 2
        assert "".join(one.choices[0].text for one in completions) == "Hello there."
        assert [one.choices[0].finish_reason for one in completions] == [None] * (len(completions) - 1) + ["stop"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "status", "label"),
    [
        ({"model": "no-such-model"}, 404, "not_found"),
        ({"temperature": 9}, 400, "validation"),
        ({"nvext": {"annotations": [Script(["Hello there."], fails_after=0).annotation()]}}, 400, "validation"),
    ],
    ids=["unknown model", "invalid value", "failed engine"],
)
async def test_error_before_the_first_completion(fields: dict[str, Any], stream: bool, status: int, label: str) -> None:
    async with open_stack() as stack:
        completions, refusal = await called(stack, {**fields_of(Script(["Hi"]), stream=stream), **fields})
        assert refusal is not None
        assert (completions, refusal.status, refusal.label) == ([], status, label)
        assert stack.pipeline.inflight == 0


async def test_error_after_the_first_completion_ends_the_stream() -> None:
    script = Script(["Hello there."], fails_after=2)
    async with open_stack() as stack:
        completions, refusal = await called(stack, fields_of(script, stream=True))
        assert completions and all(one.choices[0].finish_reason is None for one in completions)
        assert refusal is not None and refusal.status == 400


async def test_call_is_refused_while_the_frontend_drains() -> None:
    async with open_stack() as stack:
        await stack.pipeline.drain(0.0)
        completions, refusal = await called(stack, fields_of(Script(["Hi"])))
        assert refusal is not None
        assert (completions, refusal.status) == ([], 503)


async def test_reader_disconnect_cancels_the_request() -> None:
    async with open_stack() as stack:
        fields = fields_of(Script(["Hello there. " * 50]), stream=True)
        call = CompletionCall(stack.pipeline.handle_call, completion_of(fields))
        async with aclosing(call.completions()) as completions:
            await anext(completions)
            assert stack.pipeline.inflight == 1
        assert (stack.pipeline.inflight, call.disconnected) == (0, True)


async def test_slow_reader_is_disconnected() -> None:
    left: list[str] = []

    def handler(call: CompletionCall) -> None:
        call.on_disconnect = lambda: left.append("left")
        large = TextCompletion("c", [TextChoice("x" * (UNREAD_BYTES_MAX // 2), 0)], 1, "m")
        for _ in range(2):
            call.deliver(large)

    with pytest.raises(ResponseTimeout):
        await received(CompletionCall(handler, REQUEST))
    assert left == ["left"]


async def test_single_completion_may_exceed_the_unread_byte_limit() -> None:
    large = TextCompletion("c", [TextChoice("x" * (UNREAD_BYTES_MAX + 1), 0)], 1, "m")

    def handler(call: CompletionCall) -> None:
        call.deliver(large)
        call.end()

    assert await received(CompletionCall(handler, REQUEST)) == [large]


async def test_completion_call_delivers_no_completion_after_the_end() -> None:
    def handler(call: CompletionCall) -> None:
        call.deliver(PIECE)
        call.end()
        call.deliver(PIECE)
        call.refuse(ErrorAnswer(500, "late"))

    call = CompletionCall(handler, REQUEST)
    assert (await received(call), call.refusal) == ([PIECE], None)


async def test_comment_does_not_start_the_response() -> None:
    call = CompletionCall(CompletionCall.comment, REQUEST)
    reading = asyncio.ensure_future(received(call))
    await turns()
    assert not call.response_started and not reading.done()
    call.refuse(ErrorAnswer(500, "failed"))
    assert await reading == []


async def test_capture_keeps_the_completions_as_events() -> None:
    def handler(call: CompletionCall) -> None:
        capture = call.capture()
        call.deliver(PIECE)
        call.end()
        events = capture.response(list)
        assert [event["choices"][0]["text"] for event in events] == ["x"]

    assert await received(CompletionCall(handler, REQUEST)) == [PIECE]
