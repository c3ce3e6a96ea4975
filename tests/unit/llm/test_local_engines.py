"""Engines of the same process are served as workers are."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.settle import until

from dynamo.core.errors import InvalidArgument
from dynamo.core.loops import LoopThread
from dynamo.core.metrics import MetricsRegistry
from dynamo.llm.local_engines import LocalEngines, PythonAsyncEngine, handler_of
from dynamo.model_card.types import ModelType
from dynamo.runtime.context import Context
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.models import Models

CHAT, TENSORS = ModelType.Chat, ModelType.TensorBased


async def echo(request: Any) -> AsyncIterator[Any]:
    yield request


async def test_models_are_added_and_removed_while_serving() -> None:
    engines = LocalEngines(CHAT, TENSORS)
    engine = PythonAsyncEngine(echo, asyncio.get_running_loop())
    engines.add(CHAT, "a", engine)
    async with engines.serving() as runtime:
        models = Models(runtime, FrontendMetrics(MetricsRegistry()), router_mode="round-robin")
        models.start()
        await models.wait_synced(30)
        assert sorted(models.served()) == ["a"]
        engines.add(TENSORS, "b", engine, tensor_model_config={"name": "b"})
        await until(lambda: sorted(models.served()) == ["a", "b"])
        assert models.served()["b"][0].card.tensor_model_config == {"name": "b"}
        engines.remove(CHAT, "a")
        await until(lambda: sorted(models.served()) == ["b"])
        engines.show(TENSORS, shown=False)
        await until(lambda: not models.served())
        engines.show(TENSORS, shown=True)
        await until(lambda: sorted(models.served()) == ["b"])
        await models.close()
    assert (engines.names(CHAT), engines.names(TENSORS)) == ([], ["b"])


async def test_unknown_model_cannot_be_removed() -> None:
    with pytest.raises(InvalidArgument, match="not served"):
        LocalEngines(CHAT).remove(CHAT, "a")


async def test_engine_of_another_loop_runs_on_it_with_its_own_context() -> None:
    thread = LoopThread(asyncio.new_event_loop())
    seen: list[Any] = []

    async def generate(request: Any, context: Context) -> AsyncIterator[Any]:
        seen.extend((asyncio.get_running_loop(), context.id()))
        yield request

    thread.ensure_running()
    try:
        handler = handler_of(PythonAsyncEngine(generate, thread.loop))
        assert [element async for element in handler({"a": 1}, Context("r"))] == [{"a": 1}]
        assert seen == [thread.loop, "r"]
        assert handler_of(PythonAsyncEngine(echo, asyncio.get_running_loop())) is echo
    finally:
        thread.stop()
        thread.loop.close()
