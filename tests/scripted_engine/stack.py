"""ScriptedFrontend: a frontend's pipeline and a worker with the scripted engine in one process, and a client of it."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tests.scripted_engine.engine import ScriptedEngine, ScriptedOptions
from tests.scripted_engine.script import Script

from dynamo.backend.worker import EngineWorker
from dynamo.core.config import load
from dynamo.core.metrics import MetricsRegistry
from dynamo.cpu.config import DEMO_MODEL
from dynamo.http.server.exchange import Exchange, HotHandler
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.memory import MemoryBus, MemoryEventPlane
from dynamo.runtime.request_plane.memory import MemoryHub, MemoryPlane
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.models import Models
from dynamo.serving.pipeline import Pipeline

NAME = "m"
T = TypeVar("T")
DEADLINE_S = 30.0
USER = [{"role": "user", "content": "Hi"}]


class Wire:
    """Transport and protocol of one exchange, which records the written bytes."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        self.transport = self
        self.exchanges: set[Exchange] = set()
        self.is_stalled = False
        self.turns = None
        self.fd = -1
        self.data = bytearray()
        self.written = asyncio.Event()
        self.complete = asyncio.Event()

    def write(self, data: bytes) -> None:
        self.data += data
        self.written.set()

    def close(self) -> None:
        """Do nothing: the connection is never reused."""

    def on_response_complete(self) -> None:
        self.complete.set()


@dataclass
class Answer:
    """Response as the client received it."""

    status: int
    headers: dict[str, str]
    body: bytes
    writes: list[bytes] = field(default_factory=list)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text_events(self) -> list[str]:
        """Events of a stream, as they were written."""
        assert self.body.endswith(b"\n\n"), self.body
        return self.body.decode().removesuffix("\n\n").split("\n\n")

    @property
    def events(self) -> list[Any]:
        """Data of a stream's events; the last one must be [DONE]."""
        lines = [one.removeprefix("data: ") for one in self.text_events if one.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]


def parse(data: bytes) -> Answer:
    """Parse an HTTP response, chunked or not."""
    head, _, rest = data.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    body = rest
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return Answer(int(status.split()[1]), headers, body)


class ScriptedStack:
    """Frontend pipeline and its scripted engine."""

    def __init__(self, runtime: DistributedRuntime, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.metrics = FrontendMetrics(MetricsRegistry())
        self.models = Models(runtime, self.metrics, router_mode="round-robin")
        self.pipeline = Pipeline(self.models, self.metrics)

    def begin(self, handler: HotHandler, body: Any, headers: Mapping[str, str] | None = None) -> tuple[Exchange, Wire]:
        """Start a request and return its exchange and wire."""
        wire = Wire(headers or {})
        exchange = Exchange(wire, handler, keep_alive=True)  # type: ignore[arg-type]
        exchange.body = bytearray(body if isinstance(body, bytes) else json.dumps(body).encode())
        handler(exchange)
        return exchange, wire

    async def send_request(self, handler: HotHandler, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        """Send a request and return the complete response."""
        _, wire = self.begin(handler, body, headers)
        async with asyncio.timeout(DEADLINE_S):
            await wire.complete.wait()
        return parse(bytes(wire.data))

    async def wait_requested(self, model: str) -> None:
        """Return when the engine's newest request is for that model."""
        async with asyncio.timeout(DEADLINE_S):
            while not self.engine.requests or self.engine.requests[-1].model != model:
                self.engine.request_arrived.clear()
                await self.engine.request_arrived.wait()

    async def chat(
        self, script: Script | None = None, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> Answer:
        """Send a chat request whose response is the script."""
        return await self.send_request(self.pipeline.handle_chat, body_of(script, {"messages": USER}, fields), headers)

    async def complete(
        self, script: Script | None = None, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> Answer:
        """Send a text completion request whose response is the script."""
        return await self.send_request(
            self.pipeline.handle_completion, body_of(script, {"prompt": "Hi"}, fields), headers
        )


def body_of(script: Script | None, base: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a request."""
    body = {"model": NAME, **base, **fields}
    if script is not None:
        nvext = body.get("nvext") or {}
        body["nvext"] = {**nvext, "annotations": [*nvext.get("annotations", ()), script.annotation()]}
    return body


@asynccontextmanager
async def open_stack(*flags: str, model: str = DEMO_MODEL) -> AsyncIterator[ScriptedStack]:
    """Open a pipeline whose worker has these flags."""
    store, hub, bus = MemoryStore(), MemoryHub(), MemoryBus()

    def runtime() -> DistributedRuntime:
        return DistributedRuntime(
            None,
            MemoryDiscovery(store),
            lambda dispatcher, _: MemoryPlane(dispatcher, hub),
            event_plane=lambda _: MemoryEventPlane(bus),
        )

    argv = ["--model-path", model, "--model-name", NAME, *flags]
    engine = ScriptedEngine(model, NAME)
    worker = EngineWorker(load(ScriptedOptions, argv), engine, runtime())
    frontend = runtime()
    stack = ScriptedStack(frontend, engine)
    try:
        await worker.start()
        stack.models.start()
        await stack.models.wait_synced(DEADLINE_S)
        yield stack
    finally:
        await stack.pipeline.drain(0.0)
        await stack.models.close()
        await worker.stop()
        await frontend.shutdown(drain_timeout_s=0.0)


class ScriptedStackPool:
    """Event loop with pipelines that all tests share, so that examples are quick."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.runner = runner
        self.exits = AsyncExitStack()
        self.others: dict[str, ScriptedStack] = {}
        self.plain: ScriptedStack = self.open()
        self.parsed: ScriptedStack = self.open("--dyn-tool-call-parser", "hermes", "--dyn-reasoning-parser", "qwen3")

    def open(self, *flags: str) -> ScriptedStack:
        return self.run(self.exits.enter_async_context(open_stack(*flags)))

    def opened(self, *flags: str, model: str) -> ScriptedStack:
        """Return the pipeline of that model, opened on first use."""
        stack = self.others.get(model)
        if stack is None:
            stack = self.others[model] = self.run(self.exits.enter_async_context(open_stack(*flags, model=model)))
        return stack

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)
