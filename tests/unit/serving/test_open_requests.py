"""Open requests: every counted request is closed after any exception; traces cover requests without a socket."""

import asyncio
import contextlib
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.scripted_engine.engine import ScriptedEngine
from tests.scripted_engine.script import Script
from tests.scripted_engine.stack import NAME, USER, ScriptedStack, open_stack
from tests.settle import turns, until

from dynamo.core.errors import InvalidArgument
from dynamo.core.metrics import MetricsRegistry
from dynamo.protocols.openai import completion_of
from dynamo.runtime.request_plane.base import Reply
from dynamo.serving.answers import StreamAnswer, UnaryAnswer
from dynamo.serving.completion_calls import CompletionCall
from dynamo.serving.local_requests import LocalRequest
from dynamo.serving.pipeline import Pipeline
from dynamo.serving.request_trace.trace import RequestTrace, TraceOptions
from dynamo.serving.served_model import ServedModel


def chat_body(*, stream: bool = False) -> bytes:
    nvext = {"annotations": [Script(["Hello there."]).annotation()]}
    return json.dumps({"model": NAME, "messages": USER, "stream": stream, "nvext": nvext}).encode()


def trace_of(folder: Path, records: str) -> RequestTrace:
    options = TraceOptions.from_environment(
        {
            "DYN_REQUEST_TRACE": "1",
            "DYN_REQUEST_TRACE_RECORDS": records,
            "DYN_REQUEST_TRACE_FILE_FORMAT": "jsonl",
            "DYN_REQUEST_TRACE_FILE_PATH": str(folder / "trace"),
        }
    )
    assert options is not None
    return RequestTrace(options, MetricsRegistry(), "p")


def rows_of(folder: Path) -> list[Any]:
    return [json.loads(line)["event"] for line in (folder / "trace").read_text().splitlines()]


def gauges(stack: ScriptedStack) -> tuple[float, float, float, int]:
    model = stack.metrics.model(NAME)
    return model.active.value, model.inflight.value, model.queued.value, stack.pipeline.inflight


def traced(stack: ScriptedStack, trace: RequestTrace) -> Pipeline:
    stack.pipeline = Pipeline(stack.models, stack.metrics, trace=trace)
    return stack.pipeline


@pytest.mark.parametrize("records", ["request_end", "request_payload", "request_end,request_payload"])
async def test_trace_records_a_batch_line_and_its_response(tmp_path: Path, records: str) -> None:
    trace = trace_of(tmp_path, records)
    await trace.start()
    async with open_stack() as stack:
        exchange = LocalRequest(traced(stack, trace).handle_chat, chat_body())
        answer = await exchange.whole()
        assert (answer.status, gauges(stack)) == (200, (0, 0, 0, 0))
    await trace.close()
    rows = rows_of(tmp_path)
    assert {row["event_type"] for row in rows} == set(records.split(","))
    for row in rows:
        if row["event_type"] == "request_payload":
            payload = row["payload"]
            assert payload["payload_complete"] is True
            assert payload["response"]["choices"][0]["message"]["content"] == "Hello there."


async def test_trace_folds_an_internal_stream_into_one_response(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, "request_payload")
    await trace.start()
    async with open_stack() as stack:
        exchange = LocalRequest(traced(stack, trace).handle_chat, chat_body(stream=True))
        assert [event async for event in exchange.events()]
        assert gauges(stack) == (0, 0, 0, 0)
    await trace.close()
    (row,) = rows_of(tmp_path)
    assert row["payload"]["payload_complete"] is True
    assert row["payload"]["response"]["choices"][0]["message"]["content"] == "Hello there."


@pytest.mark.parametrize("stream", [False, True])
async def test_trace_of_a_kserve_completion_does_not_fail_the_request(tmp_path: Path, stream: bool) -> None:
    trace = trace_of(tmp_path, "request_end,request_payload")
    await trace.start()
    async with open_stack() as stack:
        call = CompletionCall(
            traced(stack, trace).handle_call, completion_of({"model": NAME, "prompt": "Hi", "stream": stream})
        )
        texts = [completion.choices[0].text async for completion in call.completions()]
        assert "".join(texts) == "Hello there."
        assert gauges(stack) == (0, 0, 0, 0)
    await trace.close()
    assert [row["event_type"] for row in rows_of(tmp_path)] == ["request_end"]


class BrokenTrace:
    """A request trace whose named methods raise."""

    def __init__(self, *broken: str) -> None:
        self._broken = broken

    def begin(self, answer: object, block_size: int) -> None:
        if "begin" in self._broken:
            raise RuntimeError("trace begin")

    def end(self, answer: object, error_type: str) -> None:
        if "end" in self._broken:
            raise RuntimeError("trace end")


@pytest.mark.parametrize("broken", ["begin", "end"])
@pytest.mark.parametrize("stream", [False, True])
async def test_failing_trace_does_not_fail_requests_or_leak_gauges(
    broken: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_stack() as stack:
        traced(stack, BrokenTrace(broken))  # type: ignore[arg-type]
        answer = await stack.send_request(stack.pipeline.handle_chat, chat_body(stream=stream))
        assert (answer.status, gauges(stack)) == (200, (0, 0, 0, 0))
        assert b"Hello" in answer.body
    assert "request trace" in caplog.text


def break_method(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> Callable[[], int]:
    calls = 0

    def fail(*_args: object, **_named: object) -> Any:
        nonlocal calls
        calls += 1
        raise RuntimeError(f"{name} failed")

    monkeypatch.setattr(owner, name, fail)
    return lambda: calls


@pytest.mark.parametrize(
    ("owner", "name", "stream"),
    [
        (UnaryAnswer, "complete", False),
        (UnaryAnswer, "touch", False),
        (UnaryAnswer, "__init__", False),
        (StreamAnswer, "complete", True),
        (StreamAnswer, "flush", True),
        (StreamAnswer, "__init__", True),
        (Pipeline, "_preprocess", False),
        (Pipeline, "_begin_generations", True),
        (Pipeline, "_route", False),
        (Pipeline, "_send", True),
        (Pipeline, "_answer", True),
    ],
)
async def test_any_exception_ends_a_request_and_resets_its_gauges(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, stream: bool
) -> None:
    async with open_stack() as stack:
        with monkeypatch.context() as patch:
            calls = break_method(patch, owner, name)
            answer = await stack.send_request(stack.pipeline.handle_chat, chat_body(stream=stream))
            assert calls() > 0
        assert answer.status == 500 or b"error" in answer.body
        assert gauges(stack) == (0, 0, 0, 0)
        assert (await stack.send_request(stack.pipeline.handle_chat, chat_body(stream=stream))).status == 200


async def test_failing_error_response_resets_the_gauges(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_stack() as stack:
        with monkeypatch.context() as patch:
            break_method(patch, UnaryAnswer, "complete")
            break_method(patch, UnaryAnswer, "write_error")
            exchange, _ = stack.begin(stack.pipeline.handle_chat, chat_body())
            await until(lambda: not (not stack.engine.requests or stack.pipeline.inflight))
        assert gauges(stack) == (0, 0, 0, 0)
        exchange.left()


async def test_one_failing_stream_does_not_block_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of one turn of the loop are written by one callback."""
    async with open_stack() as stack:
        flush, broken = StreamAnswer.flush, list[StreamAnswer]()

        def fail_first(answer: StreamAnswer, choice: Any, now_s: float) -> None:
            if not broken:
                broken.append(answer)
            if answer is broken[0]:
                raise RuntimeError("flush failed")
            flush(answer, choice, now_s)

        monkeypatch.setattr(StreamAnswer, "flush", fail_first)
        requested = [stack.begin(stack.pipeline.handle_chat, chat_body(stream=True)) for _ in range(3)]
        for _, wire in requested:
            await wire.complete.wait()
        texts = sorted(b"Hello" in bytes(wire.data) for _, wire in requested)
        assert texts == [False, True, True]
        assert gauges(stack) == (0, 0, 0, 0)


@contextlib.contextmanager
def garbage() -> Iterator[list[object]]:
    """Return the objects in reference cycles that the block leaves behind, after the block."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    found: list[object] = []
    try:
        yield found
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def chat_of(stack: ScriptedStack, *, stream: bool, n: int = 1) -> LocalRequest:
    nvext = {"annotations": [Script(["long " * 20] * n).annotation()]}
    body = {"model": NAME, "messages": USER, "stream": stream, "n": n, "nvext": nvext}
    return LocalRequest(stack.pipeline.handle_chat, json.dumps(body).encode())


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("way", ["stream", "whole", "left"])
async def test_request_that_is_over_leaves_nothing_to_the_garbage_collector(way: str, n: int) -> None:
    async def send(stack: ScriptedStack) -> None:
        if way == "whole":
            assert (await chat_of(stack, stream=False, n=n).whole()).status == 200
            return
        async with contextlib.aclosing(chat_of(stack, stream=True, n=n).events()) as events:
            async for _ in events:
                if way == "left":
                    break
        await until(lambda: stack.pipeline.inflight == 0)

    async with open_stack() as stack:
        await send(stack)  # The first request imports modules and fills caches.
        with garbage() as found:
            await send(stack)
            await turns()
    assert not our_types(found)


def our_types(found: list[object]) -> set[str]:
    # A tokenizer belongs to a model: one of an earlier test may become garbage when a thread that still had it ends.
    modules = {type(one): type(one).__module__ for one in found}
    return {
        kind.__name__
        for kind, module in modules.items()
        if module.startswith("dynamo.") and not module.startswith("dynamo.text.tokenizer.")
    }


@pytest.mark.parametrize(
    ("owner", "step"),
    [
        (Pipeline, "_preprocess"),
        (ServedModel, "choose"),
        (ServedModel, "send"),
    ],
)
async def test_request_whose_client_leaves_during_a_step_leaves_nothing_to_the_garbage_collector(
    monkeypatch: pytest.MonkeyPatch, owner: type, step: str
) -> None:
    go_on, real = asyncio.Event(), getattr(owner, step)

    async def held(*values: Any, **named: Any) -> Any:
        await go_on.wait()
        return await real(*values, **named)

    async def leave(stack: ScriptedStack) -> None:
        events = chat_of(stack, stream=True).events()
        first = asyncio.ensure_future(anext(events))
        await until(lambda: stack.pipeline.inflight == 1)
        first.cancel()
        await asyncio.wait({first})
        await events.aclose()
        assert stack.pipeline.inflight == 0, "the response is over, its step is not"
        go_on.set()
        await until(lambda: not stack.pipeline.tasks)
        go_on.clear()

    async with open_stack() as stack:
        monkeypatch.setattr(owner, step, held)
        await leave(stack)
        with garbage() as found:
            await leave(stack)
            await turns()
    assert not our_types(found)


@pytest.mark.parametrize("way", ["refused", "broken", "failed", "left"])
async def test_request_without_any_output_leaves_nothing_to_the_garbage_collector(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The engine refuses it, raises, fails it later, or has not answered when its client leaves."""

    arrived = asyncio.Event()

    def submit(_engine: ScriptedEngine, _request: object, reply: Reply) -> None:
        arrived.set()
        if way == "refused":
            raise InvalidArgument("refused")
        if way == "broken":
            raise RuntimeError("broken")
        if way == "failed":
            reply.fail(InvalidArgument("failed"))

    async def send(stack: ScriptedStack) -> None:
        answered = asyncio.ensure_future(chat_of(stack, stream=False).whole())
        if way == "left":
            await arrived.wait()
            answered.cancel()
            await asyncio.wait({answered})
        else:
            assert (await answered).status >= 400
        await until(lambda: not stack.pipeline.inflight)
        await turns(20)
        arrived.clear()

    monkeypatch.setattr(ScriptedEngine, "submit", submit)
    async with open_stack() as stack:
        await send(stack)
        with garbage() as found:
            await send(stack)
    assert not our_types(found)
