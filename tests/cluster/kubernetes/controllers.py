"""Stand-ins for the controllers of a cluster: garbage collection, namespaces, workloads, pods and endpoint slices."""

from tests.cluster.kubernetes.api import Api


class Controllers:
    """Reacts to the writes of the storage."""

    def __init__(self, api: Api, *, ready_s: float = 0.0) -> None:
        self.api, self.ready_s = api, ready_s

    async def run(self) -> None:
        """Run until cancelled."""
