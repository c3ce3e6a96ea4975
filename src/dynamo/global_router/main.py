"""Global router: `python -m dynamo.global_router`, its options, and the endpoint and card of each stage."""

import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from dynamo.core.config import load, option, setting
from dynamo.core.errors import ConfigError
from dynamo.global_router.handler import GlobalRouterHandler
from dynamo.global_router.pool_selection import Stage
from dynamo.llm.register import register_model
from dynamo.model_card.types import ModelInput, ModelType, WorkerType
from dynamo.runtime.component import Endpoint, Serving
from dynamo.runtime.config import RuntimeOptions
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.run_service import open_runtime, run_service
from dynamo.runtime.streams import GeneratorHandler

logger = logging.getLogger(__name__)

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
        lambda: setting("DYN_GLOBAL_ROUTER_DEFAULT_TTFT_TARGET", None, float),  # The former name.
        "--default-ttft-target-ms",
        "DYN_GLOBAL_ROUTER_DEFAULT_TTFT_TARGET_MS",
        "Target time to first token of requests without one, in ms; default: the middle of the file's range",
        aliases=["--default-ttft-target"],
    )
    default_itl_target_ms: float | None = option(
        lambda: setting("DYN_GLOBAL_ROUTER_DEFAULT_ITL_TARGET", None, float),  # The former name.
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
    return run_service("global-router", serve(options))


@asynccontextmanager
async def serve(options: GlobalRouterOptions) -> AsyncIterator[None]:
    """Follow the pools' routers, serve and register each stage; drain at the end of the block. Raises `ConfigError`."""
    async with open_runtime(options) as runtime:
        handler = open_handler(runtime, options)
        await handler.initialize()
        servings = [await show(runtime, options, stage, handler) for stage in handler.config.stages]
        logger.info("global router ready: %s", handler.get_pool_info())
        yield
        logger.info("draining")
        for serving in servings:
            await serving.close(DRAIN_S)


def open_handler(runtime: DistributedRuntime, options: GlobalRouterOptions) -> GlobalRouterHandler:
    """Return the handler with the pools of the configuration file. Raises `ConfigError`."""
    assert options.config is not None, "checked by __post_init__"
    assert options.model_name is not None, "checked by __post_init__"
    try:
        return GlobalRouterHandler(
            runtime,
            options.config,
            options.model_name,
            options.default_ttft_target_ms,
            options.default_itl_target_ms,
        )
    except OSError as error:
        raise ConfigError(f"--config {options.config}: {error.strerror}") from None


async def show(
    runtime: DistributedRuntime, options: GlobalRouterOptions, stage: Stage, handler: GlobalRouterHandler
) -> Serving:
    """Serve and register one stage. Raises `ConfigError` for a model that cannot be read."""
    name, kind, worker, needs = STAGES[stage]
    forward = {"prefill": handler.handle_prefill, "decode": handler.handle_decode, "agg": handler.handle_generate}
    endpoint: Endpoint = runtime.endpoint(f"{options.namespace}.{options.component_name}.{name}")
    serving = await endpoint.serve(GeneratorHandler(forward[stage], runtime.tasks))
    assert options.model_name is not None, "checked by __post_init__"
    await register_model(
        ModelInput.Tokens,
        kind,
        endpoint,
        options.model_path or options.model_name,
        options.model_name,
        worker_type=worker,
        needs=needs or None,
        ignore_weights=True,  # Requests are forwarded in tokens.
    )
    return serving
