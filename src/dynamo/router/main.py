"""The router process: open the runtime, follow the workers, serve, drain."""

import logging
import sys

from dynamo.core import logging as logs
from dynamo.core.parent import die_with_parent
from dynamo.core.signals import stop_event
from dynamo.core.unsupported_flags import load
from dynamo.router.config import UNSUPPORTED, RouterOptions
from dynamo.router.service import RouterService
from dynamo.routing.endpoint_router import EndpointRouter
from dynamo.runtime.distributed import DistributedRuntime

logger = logging.getLogger(__name__)

DRAIN_S = 30.0  # As workers: a long response may be in progress.


def main() -> int:
    """Run the router until it is stopped. Raises `ConfigError`."""
    options = load(RouterOptions, sys.argv[1:], UNSUPPORTED, prog="python -m dynamo.router")
    logs.setup(component="router")
    die_with_parent()
    import uvloop

    return uvloop.run(serve(options))


async def serve(options: RouterOptions) -> int:
    """Run the router from the options to the exit status."""
    stop = stop_event()
    runtime = DistributedRuntime.from_options(options)
    config, profile = options.meaning()
    try:
        await runtime.connect()
        await runtime.start_system_server()
        router = EndpointRouter(runtime.endpoint(str(options.target())), config, profile=profile)
        service = RouterService(runtime, router, serves_indexer=options.serve_indexer)
        runtime.health.checks.append(lambda: router.is_sound)
        await service.start()
        logger.info("router ready: %s, blocks of %d tokens", options.target(), config.block_size)
        await stop.wait()
        logger.info("draining")
        await service.close(DRAIN_S)
    finally:
        await runtime.shutdown(drain_timeout_s=0.0)
    return 0
