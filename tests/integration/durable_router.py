"""Router in durable mode that kills itself right after a step of its work: `durable_router.py STEP`.

It ends with SIGKILL, so that neither a handler nor a `finally` runs afterwards.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from dynamo.kv_events import snapshots as kv_snapshots
from dynamo.kv_events.durable import DurableEvents
from dynamo.kv_events.snapshots import SnapshotStore
from dynamo.kv_events.subscriber import KvView
from dynamo.kv_router.config import RoutingConfig
from dynamo.protocols.discovery import EndpointId
from dynamo.routing.kv_push_router import KvPushRouter
from dynamo.runtime.distributed import DistributedRuntime

THRESHOLD = 50
LOCK_TTL_S = 1.0

STEPS: dict[str, tuple[type, str]] = {
    "consumer": (DurableEvents, "_make_consumer"),
    "read": (SnapshotStore, "read"),
    "adopt": (KvView, "adopt"),
    "apply": (DurableEvents, "_take"),
    "check": (DurableEvents, "_check"),
    "lock": (SnapshotStore, "lock"),
    "version": (SnapshotStore, "version"),
    "dump": (DurableEvents, "_dump"),
    "piece": (SnapshotStore, "send_piece"),
    "send": (SnapshotStore, "send"),
    "commit": (SnapshotStore, "commit"),
    "sweep": (SnapshotStore, "sweep"),
    "purge": (DurableEvents, "_purge"),
    "unlock": (DurableEvents, "_unlock"),
}
"""Method after which the process kills itself, by step."""


def die_after(owner: type, name: str) -> None:
    """Make a method kill this process when it returns."""
    method: Callable[..., Awaitable[Any]] = getattr(owner, name)

    async def last(*args: Any, **more: Any) -> None:
        await method(*args, **more)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, last)


async def main(endpoint: str, step: str) -> None:
    die_after(*STEPS[step])
    kv_snapshots.LOCK_TTL_S = LOCK_TTL_S
    config = RoutingConfig(block_size=4, durable_kv_events=True, snapshot_threshold=THRESHOLD)
    router = KvPushRouter(DistributedRuntime(), EndpointId.parse(endpoint), config)
    await router.start()
    await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
