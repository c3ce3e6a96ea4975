"""Runtimes of one process that share discovery, request plane and event plane in memory."""

from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.memory import MemoryBus, MemoryEventPlane
from dynamo.runtime.request_plane.memory import MemoryHub, MemoryPlane


class MemoryCluster:
    """Creates runtimes that discover and call each other in memory, and shuts them down."""

    def __init__(self) -> None:
        self.store, self.hub, self.bus = MemoryStore(), MemoryHub(), MemoryBus()
        self.runtimes: list[DistributedRuntime] = []

    def runtime(self) -> DistributedRuntime:
        """Return another runtime of the cluster."""
        made = DistributedRuntime(
            None,
            MemoryDiscovery(self.store),
            lambda dispatcher, _: MemoryPlane(dispatcher, self.hub),
            event_plane=lambda _: MemoryEventPlane(self.bus),
        )
        self.runtimes.append(made)
        return made

    async def shutdown(self) -> None:
        """Shut down every runtime, the newest first."""
        for one in reversed(self.runtimes):
            await one.shutdown(drain_timeout_s=0.0)
