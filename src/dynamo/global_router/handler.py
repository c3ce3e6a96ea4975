"""Handlers of the global router: forward a request to the router of its pool, and to faster pools after a failure."""

import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from dynamo.common.utils.token_ids import normalize_request_token_ids, token_ids_len
from dynamo.core.errors import DynamoException, InvalidArgument
from dynamo.core.metrics import MetricsRegistry
from dynamo.global_router.pool_selection import (
    AggPoolSelectionStrategy,
    DecodePoolSelectionStrategy,
    PrefillPoolSelectionStrategy,
    Stage,
    get_priority_retry_order,
    load_config,
)
from dynamo.runtime.client import Client
from dynamo.runtime.context import Context
from dynamo.runtime.distributed import DistributedRuntime

logger = logging.getLogger(__name__)

ENDPOINT = "router.generate"
"""Endpoint of each pool's router, in the pool's namespace (`python -m dynamo.router`)."""
POOL_FAILURES = (DynamoException, OSError, RuntimeError)
"""Failures of a pool after which a faster one may serve the request."""


class RelayMetrics:
    """Number of requests sent to each pool."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self._sent = registry.counter(
            "dynamo_global_router_requests_total", "Requests sent to a pool", ("stage", "pool_namespace")
        )

    def sent(self, stage: Stage, namespace: str) -> None:
        """Count one request."""
        self._sent.labels(stage=stage, pool_namespace=namespace).inc()


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """Properties of a request that determine its pool."""

    tokens: int
    ttft_ms: float | None = None
    itl_ms: float | None = None
    priority: int | None = None


class GlobalRouterHandler:
    """Forwards the requests of each stage. `initialize` connects to the pools; until then the clients are empty."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        config_path: str,
        model_name: str,
        default_ttft_target_ms: float | None = None,
        default_itl_target_ms: float | None = None,
    ) -> None:
        """Read the configuration. Raises `OSError`, `ConfigError`."""
        self.runtime = runtime
        self.config = load_config(config_path)
        self.model_name = model_name
        self.default_ttft_target_ms = default_ttft_target_ms
        self.default_itl_target_ms = default_itl_target_ms
        self.prefill_clients: dict[str, Client] = {}
        self.decode_clients: dict[str, Client] = {}
        self.agg_clients: dict[str, Client] = {}
        self._metrics: RelayMetrics | None = None

    async def initialize(self) -> None:
        """Follow the pools' routers."""
        self._metrics = RelayMetrics(self.runtime.metrics)
        for stage in self.config.stages:
            for namespace in self.config.pools(stage).namespaces:
                self._clients(stage)[namespace] = await self.runtime.endpoint(f"{namespace}.{ENDPOINT}").client()

    def handle_prefill(self, request: Any, context: Context | None = None) -> AsyncGenerator[Any, None]:
        """Stream the response of a prefill pool."""
        return self._forward("prefill", request, context)

    def handle_decode(self, request: Any, context: Context | None = None) -> AsyncGenerator[Any, None]:
        """Stream the response of a decode pool."""
        return self._forward("decode", request, context)

    def handle_generate(self, request: Any, context: Context | None = None) -> AsyncGenerator[Any, None]:
        """Stream the response of a pool that does both phases."""
        return self._forward("agg", request, context)

    def get_pool_info(self) -> dict[str, Any]:
        """Return the pools of each stage and the namespaces that this process follows."""
        info: dict[str, Any] = {"model_name": self.model_name, "mode": self.config.mode}
        for stage in self.config.stages:
            pools = self.config.pools(stage)
            info |= {
                f"num_{stage}_pools": len(pools.namespaces),
                f"{stage}_pools": pools.namespaces,
                f"{stage}_pool_priorities": pools.priorities,
                f"{stage}_connected": list(self._clients(stage)),
            }
        return info | {"enable_priority_retry": self.config.enable_priority_retry}

    def _clients(self, stage: Stage) -> dict[str, Client]:
        return {"prefill": self.prefill_clients, "decode": self.decode_clients, "agg": self.agg_clients}[stage]

    async def _forward(self, stage: Stage, request: Any, context: Context | None) -> AsyncGenerator[Any, None]:
        """Stream the pool's response. If it fails before the first item, try faster pools, if fallback is enabled."""
        if not isinstance(request, Mapping):
            raise InvalidArgument(f"the request is {type(request).__name__}: expected a request in tokens")
        pools = self.config.pools(stage)
        chosen = self._choose(stage, routed_request(request, self.default_ttft_target_ms, self.default_itl_target_ms))
        order = get_priority_retry_order(chosen, pools.priorities, self.config.enable_priority_retry)
        logger.debug("%s request: pools %s, in this order", stage, order)
        # The codec is the destination's: JSON has no packed ids.
        forwarded = normalize_request_token_ids(dict(request))
        for attempt, pool in enumerate(order):
            namespace = pools.namespaces[pool]
            if self._metrics is not None:
                self._metrics.sent(stage, namespace)
            has_begun = False
            try:
                async with aclosing(responses(self._clients(stage)[namespace], forwarded, context)) as stream:
                    async for output in stream:
                        has_begun = True
                        yield output
            except POOL_FAILURES as error:
                if has_begun or attempt == len(order) - 1 or (context is not None and context.is_stopped()):
                    raise
                logger.warning("pool %s failed, trying a faster one: %s", namespace, error)
            else:
                return

    def _choose(self, stage: Stage, request: RoutedRequest) -> int:
        """Return the pool of a request."""
        match self.config.pools(stage).strategy:
            case PrefillPoolSelectionStrategy() as prefill:
                return prefill.select_pool(request.tokens, request.ttft_ms, request.priority)
            case DecodePoolSelectionStrategy() as decode:
                return decode.select_pool(request.tokens, request.itl_ms, request.priority)
            case AggPoolSelectionStrategy() as agg:
                return agg.select_pool(request.ttft_ms, request.itl_ms, request.priority, request.tokens)


async def responses(client: Client, request: Mapping[str, Any], context: Context | None) -> AsyncGenerator[Any, None]:
    """Stream a pool's responses as values. Without a context, the client may return them in an envelope."""
    if context is None:
        stream = cast(AsyncIterator[Any], await client.generate(request))
    else:
        stream = await client.generate(request, annotated=False, context=context)
    try:
        async for output in stream:
            yield output.data() if hasattr(output, "data") else output
    finally:
        if hasattr(stream, "aclose"):
            await stream.aclose()


def routed_request(request: Mapping[str, Any], ttft_ms: float | None, itl_ms: float | None) -> RoutedRequest:
    """Return the properties of a request in tokens; the targets are the defaults for requests without them."""
    targets: dict[str, Any] = {}
    for given in (request.get("extra_args"), request.get("router")):
        if isinstance(given, Mapping):
            targets |= {name: given[name] for name in ("ttft_target", "itl_target") if is_finite(given.get(name))}
    routing = request.get("routing")
    priority = routing.get("priority") if isinstance(routing, Mapping) else None
    return RoutedRequest(
        tokens=token_ids_len(request.get("token_ids")),
        ttft_ms=targets.get("ttft_target", ttft_ms),
        itl_ms=targets.get("itl_target", itl_ms),
        priority=priority if isinstance(priority, int) else None,
    )


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
