"""PoolRelay: forwards requests to the router of their pool, and its responses to the caller."""

import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from dynamo.core.errors import DynamoException, InvalidArgument
from dynamo.core.metrics import MetricsRegistry
from dynamo.global_router.pools import Pools, wanted_of
from dynamo.runtime.client import Client
from dynamo.runtime.context import Context
from dynamo.runtime.distributed import DistributedRuntime

logger = logging.getLogger(__name__)

ENDPOINT = "router.generate"
"""Endpoint of each pool's router, in the pool's namespace (`python -m dynamo.router`)."""


class PoolRelay:
    """Handler of one stage."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        pools: Pools,
        *,
        ttft_ms: float | None = None,
        itl_ms: float | None = None,
    ) -> None:
        self._runtime = runtime
        self._pools = pools
        self._ttft_ms = ttft_ms
        self._itl_ms = itl_ms
        self._clients: list[Client] = []
        self._metrics = RelayMetrics(runtime.metrics, pools)

    async def start(self) -> None:
        """Follow the pools' routers."""
        for namespace in self._pools.namespaces:
            self._clients.append(await self._runtime.endpoint(f"{namespace}.{ENDPOINT}").client())

    async def generate(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """Stream the pool's response. If it fails before the first item, try faster pools, if fallback is enabled."""
        if not isinstance(request, Mapping):
            raise InvalidArgument(f"the request is {type(request).__name__}: expected a request in tokens")
        order = self._pools.order(self._pools.choose(wanted_of(request, self._ttft_ms, self._itl_ms)))
        for number, pool in enumerate(order):
            self._metrics.sent(pool)
            has_begun = False
            try:
                stream = await self._clients[pool].generate(request, annotated=False, context=context)
                try:
                    async for output in stream:
                        has_begun = True
                        yield output
                finally:
                    await stream.aclose()
            except DynamoException as error:
                if has_begun or number == len(order) - 1 or context.is_stopped():
                    raise
                logger.warning("pool %s failed, trying a faster one: %s", self._pools.namespaces[pool], error)
            else:
                return


class RelayMetrics:
    """Number of requests sent to each pool."""

    def __init__(self, registry: MetricsRegistry, pools: Pools) -> None:
        self._stage = pools.stage
        self._namespaces = pools.namespaces
        self._sent = registry.counter(
            "dynamo_global_router_requests_total", "Requests sent to a pool", ("stage", "pool_namespace")
        )

    def sent(self, pool: int) -> None:
        """Count one request."""
        self._sent.labels(stage=self._stage, pool_namespace=self._namespaces[pool]).inc()
