"""Adapters of one engine."""

from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.vllm import scripted

from dynamo.backend.adapters import LoadedAdapters
from dynamo.core.errors import InvalidArgument, WorkerUnavailable
from dynamo.llm.register import lora_name_to_id
from dynamo.vllm.lora import adapters_of


def made(settings: object = SimpleNamespace(max_loras=2)) -> tuple[LoadedAdapters[Any], scripted.AsyncLLM]:
    llm = scripted.AsyncLLM(None)
    return adapters_of(llm, scripted.LoRARequest, settings), llm


async def test_an_adapter_is_loaded_once_and_unloaded() -> None:
    adapters, llm = made()
    number = await adapters.load("a", "/a")
    assert number == await adapters.load("a", "/a") == lora_name_to_id("a")
    assert adapters.of("a").lora_path == "/a"
    assert await adapters.unload("a") == number
    assert llm.calls == [("add_lora", "a"), ("remove_lora", number)]
    with pytest.raises(WorkerUnavailable):
        adapters.of("a")
    assert adapters.of(None) is None


async def test_what_vllm_does_not_take_is_not_loaded() -> None:
    adapters, llm = made()
    llm.refuses = ValueError("rank 64 is above 16")
    with pytest.raises(InvalidArgument, match="rank 64"):
        await adapters.load("a", "/a")
    assert adapters.ids == {}


async def test_an_engine_without_adapters_says_so() -> None:
    adapters, _ = made(None)
    with pytest.raises(InvalidArgument, match="--enable-lora"):
        await adapters.load("a", "/a")
