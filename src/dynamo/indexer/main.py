"""The indexer process: listen, copy a peer's index, follow engines, stop."""

import logging
import sys
from collections.abc import Sequence

from dynamo.core import logging as logs
from dynamo.core.config import load
from dynamo.core.errors import ConfigError, HttpError
from dynamo.core.listening import bind
from dynamo.core.metrics import MetricsRegistry
from dynamo.core.parent import die_with_parent
from dynamo.core.signals import stop_event
from dynamo.indexer.access_log import AccessLog
from dynamo.indexer.config import IndexerOptions
from dynamo.indexer.routes import IndexerRoutes
from dynamo.routing.services.indexed_models import IndexedModels
from dynamo.routing.services.indexer_peers import Peers

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the indexer until it is stopped; `argv` defaults to the command line. Raises `ConfigError`."""
    options = load(IndexerOptions, sys.argv[1:] if argv is None else argv, prog="python -m dynamo.indexer")
    logs.setup(component="indexer")
    die_with_parent()
    import uvloop

    return uvloop.run(serve(options))


async def serve(options: IndexerOptions) -> int:
    """Run the indexer from the options to the exit status."""
    stop = stop_event()
    listener = bind("0.0.0.0", options.port, "--port")  # noqa: S104 - as upstream: peers are on other hosts
    listener.listen()  # Clients that connect before the service is ready wait.
    log = None
    if options.access_log is not None:
        log = AccessLog(options.access_log, options.trace_id_header, is_local_time=options.access_log_local_time)
    models = IndexedModels(blocks_max=options.index_blocks_max)
    try:
        peers = Peers(options.peers)
        for worker in options.initial_workers():
            place = (options.model_name, options.routing_group)
            models.follow(worker.instance_id, worker.dp_rank, worker.endpoint, place, options.block_size or 0)
    except HttpError as error:
        raise ConfigError(error.message) from None
    server = IndexerRoutes(models, peers, MetricsRegistry(), log).routes.server()
    await server.start(listener)
    await peers.recover(models)
    models.gate.set()
    logger.info("indexer ready: http://%s:%d", *listener.getsockname()[:2])
    await stop.wait()
    await server.close()
    await models.close()
    if log is not None:
        log.close()
    return 0
