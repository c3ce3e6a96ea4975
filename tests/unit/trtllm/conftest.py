"""Engine over a scripted TensorRT-LLM, and its host."""

import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.backend.recorded_reply import RecordedReply, answered
from tests.unit.trtllm import scripted
from tests.unit.vllm.conftest import Host, request

from dynamo.trtllm.config import TrtllmConfig
from dynamo.trtllm.engine import TrtllmEngine
from dynamo.trtllm.library import TrtllmLibrary

__all__ = ["Host", "Running", "Start", "request"]


def library(made: list[scripted.LLM]) -> TrtllmLibrary:
    """Return a library whose engines are kept in `made`."""

    def make(**kwargs: Any) -> scripted.LLM:
        made.append(scripted.LLM(**kwargs))
        return made[-1]

    return TrtllmLibrary(
        LLM=make,
        SamplingParams=scripted.SamplingParams,
        GuidedDecodingParams=scripted.GuidedDecodingParams,
        DisaggregatedParams=scripted.DisaggregatedParams,
        SchedulingParams=scripted.SchedulingParams,
        LoRARequest=scripted.LoRARequest,
        Logprob=scripted.Logprob,
        request_errors=(scripted.RequestError, ValueError),
    )


@dataclasses.dataclass
class Running:
    engine: TrtllmEngine
    llm: scripted.LLM
    host: Host
    config: Any

    async def send_request(self, requested: Any, *script: Any) -> tuple[RecordedReply, BaseException | None]:
        """Run the script to its end."""
        self.llm.script = list(script)
        return await answered(self.engine, requested)


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts an engine: the flags of its configuration, and arguments that beat them."""
    engines: list[TrtllmEngine] = []
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 128}))

    async def make(patches: dict[str, Any] | None = None, **flags: Any) -> Running:
        made: list[scripted.LLM] = []
        host = Host()
        config = TrtllmConfig(**{"model": str(tmp_path), "served_model_name": "m", **flags})
        engine = TrtllmEngine(config, patches or {}, library(made))
        engines.append(engine)
        make_output = await engine.start(host)
        return Running(engine, made[0], host, make_output)

    yield make
    for one in engines:
        await one.stop()
