"""Engine over a scripted vLLM, its host, and replies."""

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.backend.recorded_reply import RecordedReply, answered
from tests.unit.vllm import scripted

from dynamo.core.errors import InvalidArgument
from dynamo.core.metrics import MetricsRegistry
from dynamo.protocols.engine import PreprocessedRequest, StopConditions
from dynamo.vllm.config import VllmConfig
from dynamo.vllm.engine import VllmEngine
from dynamo.vllm.library import VllmLibrary


class Host:
    worker_id = 7

    def __init__(self) -> None:
        self.metrics = MetricsRegistry()
        self.failed: list[BaseException] = []
        self.loads: list[Any] = []
        self.events: list[Any] = []
        self.passes: list[Any] = []
        self.service: list[str] = []

    def publish_kv_event(self, event: Any, dp_rank: int = 0, tier: str = "device") -> None:
        self.events.append((event, dp_rank, tier))

    def publish_load(self, load: Any) -> None:
        self.loads.append(load)

    def publish_forward_pass(self, passed: Any, dp_rank: int = 0) -> None:
        self.passes.append((passed, dp_rank))

    def fail(self, error: BaseException) -> None:
        self.failed.append(error)

    async def leave_service(self) -> None:
        self.service.append("left")

    async def return_to_service(self) -> None:
        self.service.append("back")


def request(*tokens: int, **changes: Any) -> PreprocessedRequest:
    stop = changes.pop("stop", StopConditions(max_tokens=8))
    return PreprocessedRequest("m", list(tokens) or [1, 2, 3], stop, eos_token_ids=[9], **changes)


def library(llm: scripted.AsyncLLM) -> VllmLibrary:
    """Return a library whose engine is this one."""

    class Made(scripted.AsyncLLM):
        @classmethod
        def from_engine_args(
            cls, engine_args: Any, start_engine_loop: bool = True, usage_context: Any = None, stat_loggers: Any = None
        ) -> scripted.AsyncLLM:
            llm.loggers = [make(llm.vllm_config, 0) for make in stat_loggers or ()]
            return llm

    async def decode(kind: str, media: Any, io: Any) -> Any:
        if "wrong" in io.get(kind, {}):
            raise TypeError("unexpected keyword argument 'wrong'")
        return (kind, media.data, io[kind]) if kind in io else (kind, media.data)

    def load_embeds(model_config: Any, text: str) -> Any:
        if text == "bad":
            raise InvalidArgument("prompt_embeds is not a valid tensor", param="prompt_embeds")
        return SimpleNamespace(shape=(int(text), 8))

    return VllmLibrary(
        AsyncLLM=Made,
        AsyncEngineArgs=scripted.AsyncEngineArgs,
        FlexibleArgumentParser=None,
        SamplingParams=scripted.SamplingParams,
        StructuredOutputsParams=scripted.StructuredOutputsParams,
        RequestOutputKind=scripted.RequestOutputKind,
        PoolingParams=scripted.PoolingParams,
        LoRARequest=scripted.LoRARequest,
        dead_errors=(scripted.EngineDeadError,),
        client_errors=(scripted.ClientError,),
        render_metrics=lambda: "vllm:x 1\n",
        run_headless=lambda argv: None,
        load_embeds=load_embeds,
        decode_media=decode,
    )


@dataclasses.dataclass
class Running:
    engine: VllmEngine
    llm: scripted.AsyncLLM
    host: Host
    config: Any

    async def send_request(self, requested: Any, *script: Any) -> tuple[RecordedReply, BaseException | None]:
        """Run the script to its end."""
        self.llm.script = list(script)
        return await answered(self.engine, requested)


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts an engine: `kind` of engine, the flags of its configuration, and vLLM's settings."""
    made: list[VllmEngine] = []

    async def make(kind: type[VllmEngine] = VllmEngine, settings: Any = None, **flags: Any) -> Running:
        llm, host = scripted.AsyncLLM(settings or scripted.settings()), Host()
        args = scripted.AsyncEngineArgs(str(tmp_path), ["m", "other"])
        engine = kind(VllmConfig(**flags), args, library(llm))
        made.append(engine)
        return Running(engine, llm, host, await engine.start(host))

    yield make
    for one in made:
        await one.stop()
