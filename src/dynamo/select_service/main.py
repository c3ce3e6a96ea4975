"""The selection service process: listen, copy a peer's index, follow engines, stop."""

import logging
import sys
from collections.abc import Sequence

from dynamo.core import logging as logs
from dynamo.core.config import load
from dynamo.core.listening import bind
from dynamo.core.parent import die_with_parent
from dynamo.core.signals import stop_event
from dynamo.routing.services.selection import SelectionCacheConfig, SelectionService
from dynamo.select_service.config import SelectOptions
from dynamo.select_service.routes import SelectRoutes

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service until it is stopped; `argv` defaults to the command line. Raises `ConfigError`."""
    options = load(SelectOptions, sys.argv[1:] if argv is None else argv, prog="python -m dynamo.select_service")
    logs.setup(component="select-service")
    die_with_parent()
    import uvloop

    return uvloop.run(serve(options))


async def serve(options: SelectOptions) -> int:
    """Run the service from the options to the exit status."""
    stop = stop_event()
    listener = bind("0.0.0.0", options.port, "--port")  # noqa: S104 - as upstream: peers are on other hosts
    listener.listen()  # Clients that connect before the service is ready wait.
    service = SelectionService(
        indexer_peers=options.indexer_peers,
        replica_sync_port=options.replica_sync_port,
        replica_sync_peers=options.replica_sync_peers,
        selection_cache=SelectionCacheConfig(
            ttl_secs=options.selection_cache_ttl_secs,
            max_entries=options.selection_cache_max_entries,
            max_bytes=options.selection_cache_max_bytes,
        ),
        session_affinity_ttl_secs=options.session_affinity_ttl_secs,
        assume_kv_reuse=options.assume_kv_reuse,
        tracking_key=options.tracking_key(),
    )
    server = SelectRoutes(service).routes.server()
    await server.start(listener)
    await service.start()
    logger.info("selection service ready: http://%s:%d", *listener.getsockname()[:2])
    await stop.wait()
    await server.close()
    await service.close()
    return 0
