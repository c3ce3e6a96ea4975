"""KserveGrpcService: upstream's KServe server for engines in the same process.

A completions engine takes OpenAI's request and yields its chunks; a tensor engine takes and yields tensors
(`grpc.tensors`). Chat models are listed but cannot be called: KServe has no conversations.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from dynamo.core.loops import LoopThread
from dynamo.core.metrics import MetricsRegistry
from dynamo.http.embedded import FrontendOptions, ServedFrontend, run_frontend
from dynamo.http.routes.groups import metrics_group
from dynamo.llm.local_engines import LocalEngines, PythonAsyncEngine
from dynamo.model_card.runtime_config import ModelRuntimeConfig
from dynamo.model_card.types import ModelType
from dynamo.runtime.distributed import DistributedRuntime

DEFAULT_PORT = 8787

CHAT, COMPLETIONS, TENSORS = ModelType.Chat, ModelType.Completions, ModelType.TensorBased


class KserveGrpcService:
    """KServe gRPC server."""

    def __init__(self, port: int | None = None, host: str | None = None) -> None:
        self._host = "0.0.0.0" if host is None else host  # noqa: S104 - upstream's default
        self._wanted_port = DEFAULT_PORT if port is None else port
        self._engines = LocalEngines(CHAT, COMPLETIONS, TENSORS)
        self._ending = asyncio.Event()
        self.port: int | None = None
        """Port of the server, once it listens."""

    def add_completions_model(self, model: str, checksum: str, engine: PythonAsyncEngine) -> None:
        """Serve a text model with the engine. `checksum` has no effect (compatibility)."""
        self._engines.add(COMPLETIONS, model, engine)

    def add_chat_completions_model(self, model: str, checksum: str, engine: PythonAsyncEngine) -> None:
        """Register a chat model."""
        self._engines.add(CHAT, model, engine)

    def add_tensor_model(
        self,
        model: str,
        checksum: str,
        engine: PythonAsyncEngine,
        *,
        runtime_config: ModelRuntimeConfig | None = None,
        tensor_model_config: Mapping[str, Any] | None = None,
    ) -> None:
        """Serve a tensor model with the engine. Raise `ConfigError` for an invalid `tensor_model_config`."""
        if tensor_model_config is not None:
            from dynamo.grpc.descriptions import check_tensor_config

            check_tensor_config(tensor_model_config)
        self._engines.add(
            TENSORS, model, engine, runtime_config=runtime_config, tensor_model_config=tensor_model_config
        )

    def remove_completions_model(self, model: str) -> None:
        """Stop serving a model. Raise `InvalidArgument` for a name that is not served, as do the next two methods."""
        self._engines.remove(COMPLETIONS, model)

    def remove_chat_completions_model(self, model: str) -> None:
        self._engines.remove(CHAT, model)

    def remove_tensor_model(self, model: str) -> None:
        self._engines.remove(TENSORS, model)

    def list_completions_models(self) -> list[str]:
        return self._engines.names(COMPLETIONS)

    def list_chat_completions_models(self) -> list[str]:
        return self._engines.names(CHAT)

    def list_tensor_models(self) -> list[str]:
        return self._engines.names(TENSORS)

    async def run(self, runtime: DistributedRuntime) -> None:
        """Serve until `shutdown`, or until the runtime has shut down. Raise `ConfigError` for a port in use.

        The server has an event loop and a thread of its own: clients in this process may block the caller's loop, as
        Triton's client does while it closes a stream.
        """
        server, ending = LoopThread(asyncio.new_event_loop()), asyncio.Event()
        watching = asyncio.ensure_future(runtime.wait_closed())
        serving = asyncio.ensure_future(server.run(self._serve(runtime.metrics, ending)))
        waits = [serving, watching, asyncio.ensure_future(self._ending.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            server.loop.call_soon_threadsafe(ending.set)
            try:
                await asyncio.shield(serving)
            finally:
                for one in waits:
                    one.cancel()
                server.stop()
                server.loop.close()

    async def _serve(self, metrics: MetricsRegistry, ending: asyncio.Event) -> None:
        from dynamo.grpc.service import KserveOptions, add_kserve  # Requires an optional dependency.

        async with self._engines.serving() as inner:
            frontend = ServedFrontend(inner, FrontendOptions(port=None, groups=(metrics_group,)), metrics)
            self.port = add_kserve(frontend, KserveOptions(host=self._host, port=self._wanted_port)).port
            await run_frontend(frontend, ending)

    def shutdown(self) -> None:
        """Stop `run`."""
        self._ending.set()
