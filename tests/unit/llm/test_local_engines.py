"""Engines of the same process are served as workers are."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.settle import until

from dynamo.core.errors import InvalidArgument
from dynamo.core.metrics import MetricsRegistry
from dynamo.llm.local_engines import LocalEngines, PythonAsyncEngine
from dynamo.model_card.types import ModelType
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.models import Models

CHAT, TENSORS = ModelType.Chat, ModelType.TensorBased


async def say(request: Any) -> AsyncIterator[Any]:
    yield request


async def test_models_come_and_go_while_they_are_served() -> None:
    engines = LocalEngines(CHAT, TENSORS)
    engine = PythonAsyncEngine(say, asyncio.get_running_loop())
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


async def test_what_is_not_served_cannot_be_removed() -> None:
    with pytest.raises(InvalidArgument, match="not served"):
        LocalEngines(CHAT).remove(CHAT, "a")
