"""Global router: `python -m dynamo.global_router`, its options, and the relay of each stage to the pools."""

import logging
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from dynamo.core.config import load, option
from dynamo.core.errors import ConfigError, DynamoException, InvalidArgument
from dynamo.core.metrics import MetricsRegistry
from dynamo.global_router.pools import Pools, Stage, read_pools, wanted_of
from dynamo.llm.register import register_model
from dynamo.model_card.types import ModelInput, ModelType, WorkerType
from dynamo.runtime.client import Client
from dynamo.runtime.component import Endpoint, Serving
from dynamo.runtime.config import RuntimeOptions
from dynamo.runtime.context import Context
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.run_service import open_runtime, run_service
from dynamo.runtime.streams import GeneratorHandler

logger = logging.getLogger(__name__)

ENDPOINT = "router.generate"
"""Endpoint of each pool's router, in the pool's namespace (`python -m dynamo.router`)."""
DRAIN_S = 30.0  # As workers: a long response may be in progress.


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalRouterOptions(RuntimeOptions):
    """Global router: routes each request to a pool of workers by its length and latency targets."""

    config: str | None = option(
        None, "--config", "DYN_GLOBAL_ROUTER_CONFIG", "JSON file with the pools and their selection"
    )
    model_name: str | None = option(
        None, "--model-name", "DYN_GLOBAL_ROUTER_MODEL_NAME", "Name of the model that all pools serve"
    )
    model_path: str | None = option(
        None, "--model-path", "DYN_GLOBAL_ROUTER_MODEL_PATH", "Directory of the model's files; default: --model-name"
    )
    namespace: str = option(
        "dynamo", "--namespace", "DYN_NAMESPACE", "Namespace of the global router, watched by frontends"
    )
    component_name: str = option(
        "global_router", "--component-name", "DYN_GLOBAL_ROUTER_COMPONENT_NAME", "Component name of the global router"
    )
    default_ttft_target_ms: float | None = option(
        None,
        "--default-ttft-target-ms",
        "DYN_GLOBAL_ROUTER_DEFAULT_TTFT_TARGET_MS",
        "Target time to first token of requests without one, in ms; default: the middle of the file's range",
        aliases=["--default-ttft-target"],
    )
    default_itl_target_ms: float | None = option(
        None,
        "--default-itl-target-ms",
        "DYN_GLOBAL_ROUTER_DEFAULT_ITL_TARGET_MS",
        "Target time between tokens of requests without one, in ms; default: the middle of the file's range",
        aliases=["--default-itl-target"],
    )

    def __post_init__(self) -> None:
        if self.config is None:
            raise ConfigError("--config is missing: expected a JSON file (DYN_GLOBAL_ROUTER_CONFIG)")
        if self.model_name is None:
            raise ConfigError("--model-name is missing (DYN_GLOBAL_ROUTER_MODEL_NAME)")


class PoolRelay:
    """Handler of one stage."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        pools: Pools,
        *,
        ttft_ms: float | None = None,
        itl_ms: float | None = None,
    ) -> None:
        self._runtime = runtime
        self._pools = pools
        self._ttft_ms = ttft_ms
        self._itl_ms = itl_ms
        self._clients: list[Client] = []
        self._metrics = RelayMetrics(runtime.metrics, pools)

    async def start(self) -> None:
        """Follow the pools' routers."""
        for namespace in self._pools.namespaces:
            self._clients.append(await self._runtime.endpoint(f"{namespace}.{ENDPOINT}").client())

    async def generate(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """Stream the pool's response. If it fails before the first item, try faster pools, if fallback is enabled."""
        if not isinstance(request, Mapping):
            raise InvalidArgument(f"the request is {type(request).__name__}: expected a request in tokens")
        order = self._pools.order(self._pools.choose(wanted_of(request, self._ttft_ms, self._itl_ms)))
        for number, pool in enumerate(order):
            self._metrics.sent(pool)
            has_begun = False
            try:
                stream = await self._clients[pool].generate(request, annotated=False, context=context)
                try:
                    async for output in stream:
                        has_begun = True
                        yield output
                finally:
                    await stream.aclose()
            except DynamoException as error:
                if has_begun or number == len(order) - 1 or context.is_stopped():
                    raise
                logger.warning("pool %s failed, trying a faster one: %s", self._pools.namespaces[pool], error)
            else:
                return


class RelayMetrics:
    """Number of requests sent to each pool."""

    def __init__(self, registry: MetricsRegistry, pools: Pools) -> None:
        self._stage = pools.stage
        self._namespaces = pools.namespaces
        self._sent = registry.counter(
            "dynamo_global_router_requests_total", "Requests sent to a pool", ("stage", "pool_namespace")
        )

    def sent(self, pool: int) -> None:
        """Count one request."""
        self._sent.labels(stage=self._stage, pool_namespace=self._namespaces[pool]).inc()


STAGES: dict[Stage, tuple[str, ModelType, WorkerType, list[list[WorkerType]]]] = {
    "agg": ("generate", ModelType.Chat | ModelType.Completions, WorkerType.Aggregated, []),
    "prefill": ("prefill_generate", ModelType.Prefill, WorkerType.Prefill, [[WorkerType.Decode]]),
    "decode": (
        "decode_generate",
        ModelType.Chat | ModelType.Completions,
        WorkerType.Decode,
        [[WorkerType.Prefill]],
    ),
}
"""The endpoint and the contents of its card, by stage."""


def main() -> int:
    """Run the global router until it is stopped. Raises `ConfigError`."""
    options = load(GlobalRouterOptions, sys.argv[1:], prog="python -m dynamo.global_router")
    assert options.config is not None, "checked by __post_init__"
    return run_service("global-router", serve(options, read_pools(options.config)))


@asynccontextmanager
async def serve(options: GlobalRouterOptions, pools: dict[Stage, Pools]) -> AsyncIterator[None]:
    """Follow the pools' routers, serve and register each stage; drain at the end of the block."""
    async with open_runtime(options) as runtime:
        servings = [await show(runtime, options, stage, one) for stage, one in pools.items()]
        logger.info(
            "global router ready: %s", ", ".join(f"{len(one.namespaces)} {stage}" for stage, one in pools.items())
        )
        yield
        logger.info("draining")
        for serving in servings:
            await serving.close(DRAIN_S)


async def show(runtime: DistributedRuntime, options: GlobalRouterOptions, stage: Stage, pools: Pools) -> Serving:
    """Serve and register one stage. Raises `ConfigError` for a model that cannot be read."""
    relay = PoolRelay(runtime, pools, ttft_ms=options.default_ttft_target_ms, itl_ms=options.default_itl_target_ms)
    await relay.start()
    name, kind, worker, needs = STAGES[stage]
    endpoint: Endpoint = runtime.endpoint(f"{options.namespace}.{options.component_name}.{name}")
    serving = await endpoint.serve(GeneratorHandler(relay.generate, runtime.tasks))
    assert options.model_name is not None, "checked by __post_init__"
    await register_model(
        ModelInput.Tokens,
        kind,
        endpoint,
        options.model_path or options.model_name,
        options.model_name,
        worker_type=worker,
        needs=needs or None,
    )
    return serving
