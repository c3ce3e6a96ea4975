"""Decorators: a runtime for a function, a model for a request."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import BaseModel
from tests.settle import turns

from dynamo.core.errors import ConfigError
from dynamo.runtime import Context, DistributedRuntime, dynamo_endpoint, dynamo_worker

TIMEOUT_S = 10.0


@pytest.fixture(autouse=True)
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DYN_DISCOVERY_BACKEND", "DYN_REQUEST_PLANE", "DYN_EVENT_PLANE"):
        monkeypatch.setenv(name, "mem")


async def test_worker_decorator_passes_arguments_and_closes_the_runtime_on_return() -> None:
    seen: list[DistributedRuntime] = []

    @dynamo_worker()
    async def work(runtime: DistributedRuntime, first: int, second: int = 0) -> int:
        seen.append(runtime)
        return first + second

    assert await work(2, second=3) == 5
    await asyncio.wait_for(seen[0].wait_closed(), TIMEOUT_S)


async def test_worker_decorator_raises_the_exception_of_the_worker() -> None:
    @dynamo_worker()
    async def work(runtime: DistributedRuntime) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        await work()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_worker_signal_drains_endpoints_and_the_worker_returns(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    seen: list[str] = []

    @dynamo_worker()
    async def work(runtime: DistributedRuntime) -> str:
        async def generate(request: Any) -> AsyncIterator[Any]:
            yield request

        serving = asyncio.ensure_future(runtime.endpoint("ns.comp.ep").serve_endpoint(generate))
        client = await runtime.endpoint("ns.comp.ep").client()
        await client.wait_for_instances(TIMEOUT_S)
        os.kill(os.getpid(), number)
        await asyncio.wait_for(serving, TIMEOUT_S)
        seen.append("drained")
        return "done"

    assert await asyncio.wait_for(work(), TIMEOUT_S) == "done"
    assert seen == ["drained"]
    assert signal.getsignal(number) is before


async def serve_forever(runtime: DistributedRuntime, signals: int) -> None:
    """Serve an endpoint, send that many signals to this process, and ignore the shutdown."""

    async def generate(request: Any) -> AsyncIterator[Any]:
        yield request

    endpoint = runtime.endpoint("ns.comp.ep")
    serving = asyncio.ensure_future(endpoint.serve_endpoint(generate))
    client = await endpoint.client()
    await client.wait_for_instances(TIMEOUT_S)
    for _ in range(signals):
        os.kill(os.getpid(), signal.SIGTERM)
        await turns(3)
    await serving
    await asyncio.Event().wait()


async def test_worker_that_ignores_shutdown_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.runtime.decorators.END_S", 0.0)

    @dynamo_worker()
    async def work(runtime: DistributedRuntime) -> None:
        await serve_forever(runtime, signals=1)

    assert await asyncio.wait_for(work(), TIMEOUT_S) is None


async def test_second_signal_cancels_the_worker_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.runtime.decorators.END_S", 1000.0)

    @dynamo_worker()
    async def work(runtime: DistributedRuntime) -> None:
        await serve_forever(runtime, signals=2)

    assert await asyncio.wait_for(work(), TIMEOUT_S) is None


async def test_client_without_endpoints_is_cancelled_at_the_first_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.runtime.decorators.END_S", 1000.0)

    steps: list[str] = []

    @dynamo_worker()
    async def work(runtime: DistributedRuntime) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            steps.append("cancelled")
            raise

    assert await asyncio.wait_for(work(), TIMEOUT_S) is None
    assert steps == ["cancelled"]


async def test_worker_decorator_keeps_an_existing_signal_handler() -> None:
    collect: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: collect.append(number))

    @dynamo_worker()
    async def work(runtime: DistributedRuntime) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        await turns()
        return "untouched"

    try:
        assert await work() == "untouched"
        assert collect == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_worker_decorator_raises_cancelled_error_when_cancelled() -> None:
    @dynamo_worker()
    async def work(runtime: DistributedRuntime) -> None:
        await asyncio.Event().wait()

    running = asyncio.ensure_future(work())
    await turns()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_worker_decorator_uses_planes_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "carrier-pigeon")

    @dynamo_worker()
    async def work(runtime: DistributedRuntime) -> None: ...

    with pytest.raises(ConfigError, match="carrier-pigeon"):
        await work()


def test_deprecated_argument_warns() -> None:
    with pytest.warns(DeprecationWarning, match="enable_nats"):
        dynamo_worker(enable_nats=True)


# Endpoints -------------------------------------------------------------------------------------------------------


class Question(BaseModel):
    data: str


class Answer(BaseModel):
    char: str


class Service:
    @dynamo_endpoint(Question, Answer)
    async def generate(self, request: Question) -> AsyncIterator[Any]:
        yield request.data


@dynamo_endpoint(Question, Answer)
async def generate(request: Question, context: Context | None = None) -> AsyncIterator[Any]:
    for char in request.data:
        yield char


async def collect(elements: AsyncIterator[Any]) -> list[Any]:
    return [element async for element in elements]


@pytest.mark.parametrize("payload", [{"data": "ab"}, '{"data": "ab"}', Question(data="ab")])
async def test_endpoint_decorator_parses_requests_into_the_model(payload: Any) -> None:
    assert await collect(generate(payload)) == ["a", "b"]
    assert await collect(generate(payload, context=Context())) == ["a", "b"]
    assert await collect(Service().generate(payload)) == ["ab"]


@pytest.mark.parametrize("payload", [{"other": 1}, "{", 5, None])
async def test_invalid_request_raises_value_error_on_first_iteration(payload: Any) -> None:
    elements = generate(payload)
    with pytest.raises(ValueError, match="Invalid request"):
        await collect(elements)


async def test_endpoint_decorator_does_not_parse_a_type_that_is_no_model() -> None:
    @dynamo_endpoint(str, Answer)
    async def plain(request: Any) -> AsyncIterator[Any]:
        yield request

    assert await collect(plain({"other": 1})) == [{"other": 1}]
