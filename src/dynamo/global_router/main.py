"""The global router process: read the pools, follow their routers, publish the model, forward requests, drain."""

import logging
import sys

from dynamo.core import logging as logs
from dynamo.core.config import load
from dynamo.core.parent import die_with_parent
from dynamo.core.signals import stop_event
from dynamo.global_router.config import GlobalRouterOptions
from dynamo.global_router.pools import Pools, Stage, read_pools
from dynamo.global_router.relay import PoolRelay
from dynamo.llm.register import register_model
from dynamo.model_card.types import ModelInput, ModelType, WorkerType
from dynamo.runtime.component import Endpoint, Serving
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.streams import GeneratorHandler

logger = logging.getLogger(__name__)

DRAIN_S = 30.0  # As workers: a long response may be in progress.

STAGES: dict[Stage, tuple[str, ModelType, WorkerType, list[list[WorkerType]]]] = {
    "agg": ("generate", ModelType.Chat | ModelType.Completions, WorkerType.Aggregated, []),
    "prefill": ("prefill_generate", ModelType.Prefill, WorkerType.Prefill, []),
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
    pools = read_pools(options.config)
    logs.setup(component="global-router")
    die_with_parent()
    import uvloop

    return uvloop.run(serve(options, pools))


async def serve(options: GlobalRouterOptions, pools: dict[Stage, Pools]) -> int:
    """Run the global router from the options to the exit status."""
    stop = stop_event()
    runtime = DistributedRuntime.from_options(options)
    try:
        await runtime.connect()
        await runtime.start_system_server()
        servings = [await show(runtime, options, stage, one) for stage, one in pools.items()]
        logger.info(
            "global router ready: %s", ", ".join(f"{len(one.namespaces)} {stage}" for stage, one in pools.items())
        )
        await stop.wait()
        logger.info("draining")
        for serving in servings:
            await serving.close(DRAIN_S)
    finally:
        await runtime.shutdown(drain_timeout_s=0.0)
    return 0


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
