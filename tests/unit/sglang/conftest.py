"""Engine over a scripted SGLang, and its host."""

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.backend.recorded_reply import RecordedReply, answered
from tests.unit.sglang import scripted
from tests.unit.vllm.conftest import Host, request

from dynamo.sglang.config import SglangConfig
from dynamo.sglang.engine import SglangEngine
from dynamo.sglang.library import SglangLibrary

__all__ = ["Host", "Running", "Start", "request"]


def library(made: list[scripted.Engine], script: list[Any]) -> SglangLibrary:
    """Return a library whose engines are kept in `made` and begin with this script."""

    def make(**kwargs: Any) -> scripted.Engine:
        engine = scripted.Engine(**kwargs)
        engine.script = script
        made.append(engine)
        return engine

    return SglangLibrary(
        Engine=make,
        io_struct=scripted.io_struct,
        read_server_args=lambda words: scripted.ServerArgs(),
        fake_bootstrap_host=scripted.FAKE_BOOTSTRAP_HOST,
        is_eagle=lambda name: name == "EAGLE",
        is_mla=lambda manager: False,
        render_metrics=lambda: "sglang:x 1\n",
    )


@dataclasses.dataclass
class Running:
    engine: SglangEngine
    sglang: scripted.Engine
    host: Host
    config: Any

    async def send_request(self, requested: Any, *script: Any) -> tuple[RecordedReply, BaseException | None]:
        """Run the script to its end."""
        self.sglang.script = list(script)
        return await answered(self.engine, requested)


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts an engine: the flags of its configuration, and SGLang's arguments."""
    engines: list[SglangEngine] = []

    async def make(args: dict[str, Any] | None = None, **flags: Any) -> Running:
        made: list[scripted.Engine] = []
        host = Host()
        given = scripted.ServerArgs(**{"model_path": str(tmp_path), "served_model_name": "m", **(args or {})})
        engine = SglangEngine(SglangConfig(**flags), given, library(made, [scripted.chunk(1, finish=scripted.LENGTH)]))
        engines.append(engine)
        config = await engine.start(host)
        return Running(engine, made[0], host, config)

    yield make
    for one in engines:
        await one.stop()
