"""LocalEngines: engines in this process, each served like a worker's model by a private runtime."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamo.core.errors import InvalidArgument
from dynamo.core.loops import read_ahead
from dynamo.core.metrics import MetricsRegistry
from dynamo.llm.register import register_model, unregister_model
from dynamo.model_card.types import ModelInput, ModelType
from dynamo.runtime.component import Serving
from dynamo.runtime.context import Context
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.request_plane.memory import MemoryHub, MemoryPlane
from dynamo.runtime.streams import GeneratorFunction, GeneratorHandler, call_handler, takes_context


class PythonAsyncEngine:
    """An async generator function as an engine: `generator(request)` or `generator(request, context)`."""

    def __init__(self, generator: Callable[..., AsyncIterator[Any]], event_loop: asyncio.AbstractEventLoop) -> None:
        self.generator = generator
        self.event_loop = event_loop


@dataclass(frozen=True, slots=True)
class LocalModel:
    """An engine, and the arguments of its model's registration besides the name."""

    engine: PythonAsyncEngine
    arguments: Mapping[str, Any] = field(default_factory=dict)


class LocalEngines:
    """Served models by kind. May change while they are served."""

    def __init__(self, *kinds: ModelType) -> None:
        self._models: dict[ModelType, dict[str, LocalModel]] = {kind: {} for kind in kinds}
        self._hidden: set[ModelType] = set()
        self._runtime: DistributedRuntime | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._served: dict[str, Serving] = {}
        self._changes: set[asyncio.Task[None]] = set()

    def names(self, kind: ModelType) -> list[str]:
        return sorted(self._models[kind])

    def add(self, kind: ModelType, model: str, engine: PythonAsyncEngine, **arguments: Any) -> None:
        """Serve the model with the engine, replacing any previous one."""
        self._models[kind][model] = LocalModel(engine, arguments)
        self._schedule_update(model)

    def remove(self, kind: ModelType, model: str) -> None:
        """Stop serving the model. Raise `InvalidArgument` for a name that is not served."""
        if self._models[kind].pop(model, None) is None:
            raise InvalidArgument(f"model {model!r} is not served for {kind}")
        self._schedule_update(model)

    def show(self, kind: ModelType, shown: bool) -> None:
        """Serve the models of a kind, or hide them."""
        (self._hidden.discard if shown else self._hidden.add)(kind)
        for model in self._models[kind]:
            self._schedule_update(model)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[DistributedRuntime]:
        """Yield a runtime on this event loop that serves all models; each engine runs on its own event loop."""
        self._loop, hub = asyncio.get_running_loop(), MemoryHub()
        runtime = self._runtime = DistributedRuntime(
            None, MemoryDiscovery(MemoryStore()), lambda d, _: MemoryPlane(d, hub), event_plane="mem", metrics=MetricsRegistry()
        )  # fmt: skip
        try:
            for name in {name for models in self._models.values() for name in models}:
                await self._apply(name)
            yield runtime
        finally:
            self._runtime = self._loop = None
            self._served.clear()
            await runtime.shutdown()

    def _schedule_update(self, model: str) -> None:
        """Update a running service after a change of a model; may be called from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._start_update, model)

    def _start_update(self, model: str) -> None:
        task = asyncio.get_running_loop().create_task(self._apply(model), name=f"serve {model}")
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)

    async def _apply(self, name: str) -> None:
        """Register or unregister a model in the runtime to match the present settings."""
        runtime = self._runtime
        if runtime is None:
            return
        for kind, models in self._models.items():
            model = None if kind in self._hidden else models.get(name)
            endpoint = runtime.endpoint(f"local.{kind}.{name.encode().hex()}")
            key = str(endpoint)
            before = self._served.pop(key, None)
            if before is not None:
                await unregister_model(endpoint)
                await before.close()
            if model is not None:
                self._served[key] = await endpoint.serve(GeneratorHandler(handler_of(model.engine), runtime.tasks))
                takes = ModelInput.Tensor if kind is ModelType.TensorBased else ModelInput.Text
                await register_model(takes, kind, endpoint, name, skip_model_assets=True, **model.arguments)


def handler_of(engine: PythonAsyncEngine) -> GeneratorFunction:
    """Return a handler for this event loop that runs the engine's generator on the engine's."""
    generator, loop = engine.generator, engine.event_loop
    if loop is asyncio.get_running_loop():
        return generator
    takes = takes_context(generator)

    def generate(request: Any, context: Context) -> AsyncIterator[Any]:
        shadow = context.shadow(loop)
        return read_ahead(lambda: call_handler(generator, takes, request, shadow), loop)

    return generate


async def set_when_closed(runtime: DistributedRuntime, closed: asyncio.Event) -> None:
    """Set the event when the runtime has shut down."""
    await runtime.wait_closed()
    closed.set()
