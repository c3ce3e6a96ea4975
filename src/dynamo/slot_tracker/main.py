"""The slot tracker process: listen, track the load, stop."""

import logging
import sys
from collections.abc import Sequence

from dynamo.core import logging as logs
from dynamo.core.clock import SystemClock
from dynamo.core.config import load
from dynamo.core.listening import bind
from dynamo.core.parent import die_with_parent
from dynamo.core.signals import stop_event
from dynamo.routing.sync.replica_peers import ReplicaPeers
from dynamo.slot_tracker.config import SlotTrackerOptions
from dynamo.slot_tracker.routes import SlotRoutes
from dynamo.slot_tracker.tracker import SlotTracker

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the slot tracker until it is stopped; `argv` defaults to the command line. Raises `ConfigError`."""
    options = load(SlotTrackerOptions, sys.argv[1:] if argv is None else argv, prog="python -m dynamo.slot_tracker")
    logs.setup(component="slot-tracker")
    die_with_parent()
    import uvloop

    return uvloop.run(serve(options))


async def serve(options: SlotTrackerOptions) -> int:
    """Run the slot tracker from the options to the exit status."""
    stop = stop_event()
    listener = bind("0.0.0.0", options.port, "--port")  # noqa: S104 - as upstream: peers are on other hosts
    listener.listen()  # Clients that connect before the service is ready wait.
    tracker = SlotTracker(SystemClock())
    peers = None
    if options.replica_sync_port is not None:
        peers = ReplicaPeers(tracker, options.replica_sync_peers)
        await peers.start(options.replica_sync_port)
    server = SlotRoutes(tracker, peers).routes.server()
    await server.start(listener)
    logger.info("slot tracker ready: http://%s:%d", *listener.getsockname()[:2])
    await stop.wait()
    await server.close()
    if peers is not None:
        await peers.close()
    return 0
