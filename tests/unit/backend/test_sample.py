"""The sample engine echoes its prompt."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from dynamo.backend.sample import EchoEngine
from dynamo.core.errors import EngineShutdown, InvalidArgument
from dynamo.core.metrics import MetricsRegistry
from dynamo.protocols.engine import EngineOutput, PreprocessedRequest, StopConditions
from dynamo.protocols.kv_events import KvEvent
from dynamo.protocols.load import ForwardPass, WorkerLoad


class Host:
    metrics = MetricsRegistry()

    def publish_kv_event(self, event: KvEvent, dp_rank: int = 0) -> None:
        raise AssertionError("an echo has no cache")

    def publish_load(self, load: WorkerLoad) -> None:
        self.load = load

    def publish_forward_pass(self, passed: ForwardPass, dp_rank: int = 0) -> None:
        raise AssertionError("an echo computes nothing")

    def fail(self, error: BaseException) -> None:
        raise error


class ReceivedOutput:
    request_id = "r"
    is_cancelled = False

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.last: EngineOutput | None = None
        self.ended = asyncio.Event()

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """A cancel callback that is never called."""

    def token(self, token_id: int) -> None:
        self.tokens.append(token_id)

    def item(self, value: Any) -> None:
        self.last = value

    def finish(self) -> None:
        self.ended.set()

    def fail(self, error: BaseException) -> None:
        raise error


async def started() -> EchoEngine:
    engine = EchoEngine("/nowhere")
    await engine.start(Host())
    return engine


def request(token_ids: list[int], max_tokens: int | None = None) -> PreprocessedRequest:
    return PreprocessedRequest(model="echo", token_ids=token_ids, stop_conditions=StopConditions(max_tokens=max_tokens))


async def test_sample_engine_echoes_the_prompt() -> None:
    engine, received = await started(), ReceivedOutput()
    engine.submit(request([7, 8, 9]), received)
    await asyncio.wait_for(engine.drain(), 5)
    assert received.ended.is_set()
    assert received.tokens == [7, 8]
    assert received.last is not None
    assert (received.last.token_ids, received.last.finish_reason) == ([9], "length")


async def test_response_length_is_limited_by_max_tokens() -> None:
    engine, received = await started(), ReceivedOutput()
    engine.submit(request([7, 8, 9], 2), received)
    await asyncio.wait_for(engine.drain(), 5)
    assert received.last is not None
    assert received.last.completion_usage is not None
    assert received.last.completion_usage.total_tokens == 5


async def test_cancelled_request_receives_no_output() -> None:
    engine, received = await started(), ReceivedOutput()
    engine.submit(request([7, 8, 9]), received)
    engine.cancel(received)
    await asyncio.wait_for(engine.drain(), 5)
    assert (received.tokens, received.ended.is_set()) == ([], False)


@pytest.mark.parametrize("wrong", [request([]), request([1], 0), request([1] * 5000)])
async def test_invalid_request_is_refused(wrong: PreprocessedRequest) -> None:
    engine = await started()
    with pytest.raises(InvalidArgument):
        engine.submit(wrong, ReceivedOutput())


async def test_stopped_engine_refuses_requests_with_engine_shutdown() -> None:
    engine = await started()
    await engine.stop()
    with pytest.raises(EngineShutdown):
        engine.submit(request([1]), ReceivedOutput())
