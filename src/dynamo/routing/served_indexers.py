"""ServedIndexers: the indexes of a frontend's KV routers, served to other routers (`--serve-indexer`).

There is one per endpoint, because models of one endpoint, such as adapters, share workers and therefore cached blocks.
"""

from collections.abc import Collection, Mapping

from dynamo.kv_router.router import Router
from dynamo.routing.remote_indexer import IndexerServer
from dynamo.runtime.distributed import DistributedRuntime


class ServedIndexers:
    """Indexer servers of one frontend, by endpoint."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        self._runtime = runtime
        self._servers: dict[str, tuple[Router, IndexerServer]] = {}
        self._names: dict[str, Collection[str]] = {}

    async def follow(self, path: str, machines: Mapping[str, Router]) -> None:
        """Replace the models of an endpoint and their routers; the index of the first one is served."""
        self._names[path] = list(machines)
        machine = next(iter(machines.values()), None)
        known = self._servers.get(path)
        if known is not None and known[0] not in machines.values():
            del self._servers[path]
            await known[1].close()
            known = None
        if machine is None:
            del self._names[path]
        elif known is None:
            server = IndexerServer(self._runtime.endpoint(path), machine, lambda: self._names.get(path, ()))
            self._servers[path] = machine, server
            await server.start()

    async def close(self) -> None:
        """Unregister all indexers."""
        servers, self._servers = self._servers, {}
        for _, server in servers.values():
            await server.close()
