"""KserveGrpcService: upstream's KServe server for engines in the same process.

A completions engine takes OpenAI's request and yields its chunks; a tensor engine takes and yields tensors
(`grpc.tensors`). Chat models are listed but cannot be called: KServe has no conversations.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from dynamo.http.embedded import FrontendOptions, ServedFrontend, run_frontend
from dynamo.http.routes.groups import metrics_group
from dynamo.llm.local_engines import LocalEngines, PythonAsyncEngine, set_when_closed
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
        """Serve until `shutdown`, or until the runtime has shut down. Raise `ConfigError` for a port in use."""
        from dynamo.grpc.service import KserveOptions, add_kserve  # Requires an optional dependency.

        closed = asyncio.Event()
        watching = asyncio.ensure_future(set_when_closed(runtime, closed))
        grpc_options = KserveOptions(host=self._host, port=self._wanted_port)
        try:
            async with self._engines.serving() as inner:
                frontend = ServedFrontend(inner, FrontendOptions(port=None, groups=(metrics_group,)), runtime.metrics)
                self.port = add_kserve(frontend, grpc_options).port
                await run_frontend(frontend, self._ending, closed)
        finally:
            watching.cancel()

    def shutdown(self) -> None:
        """Stop `run`."""
        self._ending.set()
