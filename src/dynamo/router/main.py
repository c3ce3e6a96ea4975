"""Standalone KV router: `python -m dynamo.router`, its options and endpoints.

<namespace>.router.generate             forwards a request to the worker chosen for it
<namespace>.router.best_worker_id       returns the id of the best worker for tokens
<namespace>.router.get_overlap_scores   returns the cached blocks of tokens on every rank
"""

import logging
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from dynamo.core.config import option
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.core.unsupported_flags import load
from dynamo.kv_router.config import RoutingConfig
from dynamo.kv_router.policy import PolicyProfile
from dynamo.kv_router.router import RouteRequest
from dynamo.protocols.discovery import EndpointId
from dynamo.routing.endpoint_router import EndpointRouter, min_initial_workers
from dynamo.routing.policy_file import RouterPolicy
from dynamo.routing.remote_indexer import IndexerServer
from dynamo.routing.settings import DisaggregationOptions, KvRouterOptions, as_unsupported, check_files, router_config
from dynamo.runtime.component import Serving
from dynamo.runtime.config import RuntimeOptions
from dynamo.runtime.context import Context
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.run_service import open_runtime, run_service
from dynamo.runtime.streams import GeneratorHandler

logger = logging.getLogger(__name__)

DEFAULT_BLOCK_SIZE = 128  # Upstream's default.
UNSUPPORTED = tuple(as_unsupported(one) for one in fields(DisaggregationOptions) if one.name != "enforce_disagg")
"""Upstream's flags of routers that route to workers of two types; this one routes to one endpoint."""
COMPONENT = "router"
DRAIN_S = 30.0  # As workers: a long response may be in progress.


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions(RuntimeOptions, KvRouterOptions):
    """Standalone KV router: routes to the workers of any endpoint, for callers other than frontends."""

    COMMON: ClassVar = (
        "--endpoint",
        "--router-block-size",
        "--router-policy",
        "--router-kv-overlap-score-credit",
        "--router-temperature",
        "--discovery-backend",
        "--request-plane",
    )
    endpoint: str | None = option(
        None, "--endpoint", "DYN_ROUTER_ENDPOINT", "Endpoint of the workers: namespace.component.endpoint"
    )
    block_size: int = option(
        DEFAULT_BLOCK_SIZE,
        "--router-block-size",
        "DYN_ROUTER_BLOCK_SIZE",
        "Tokens of a KV block; must equal the workers' block size",
        aliases=["--block-size"],
    )

    def __post_init__(self) -> None:
        if self.endpoint is None:
            raise ConfigError("--endpoint is missing: expected namespace.component.endpoint (DYN_ROUTER_ENDPOINT)")
        try:
            EndpointId.parse(self.endpoint)
        except InvalidArgument as error:
            raise ConfigError(f"--endpoint {self.endpoint}: {error}") from None
        if self.block_size < 1:
            raise ConfigError(f"--router-block-size {self.block_size}: must be at least 1")
        check_files(self.meaning()[0])

    def target(self) -> EndpointId:
        """Return the workers' endpoint."""
        assert self.endpoint is not None, "checked by __post_init__"
        return EndpointId.parse(self.endpoint)

    def meaning(self) -> tuple[RoutingConfig, PolicyProfile | None]:
        """Return the router configuration of the flags, and the policy file's. Raises `ConfigError`."""
        config = router_config(self, self.block_size)
        if self.router_policy_config is None:
            return config, None
        policy = RouterPolicy.read(self.router_policy_config)
        return policy.applied(config), policy.profile("")


class RouterService:
    """Endpoints of one router."""

    def __init__(self, runtime: DistributedRuntime, router: EndpointRouter, *, serves_indexer: bool = False) -> None:
        self._runtime = runtime
        self._router = router
        self._indexer = IndexerServer(router.endpoint, router.kv.machine, router.models) if serves_indexer else None
        self._servings: list[Serving] = []

    async def start(self) -> None:
        """Follow the workers, then register the endpoints."""
        await self._router.start()
        if self._indexer is not None:
            await self._indexer.start()
        namespace = self._router.endpoint.id.namespace
        for name, handler in (
            ("generate", self.generate),
            ("best_worker_id", self.best_worker_id),
            ("get_overlap_scores", self.get_overlap_scores),
        ):
            endpoint = self._runtime.endpoint(f"{namespace}.{COMPONENT}.{name}")
            self._servings.append(await endpoint.serve(GeneratorHandler(handler, self._runtime.tasks)))

    async def close(self, drain_s: float) -> None:
        """Unregister, wait up to `drain_s` for active requests, and stop following the workers."""
        if self._indexer is not None:
            await self._indexer.close()
        for serving in self._servings:
            await serving.unregister()
        for serving in self._servings:
            await serving.close(drain_s)
        await self._router.close()

    async def generate(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """Forward a request to the chosen worker and stream its response."""
        if not isinstance(request, Mapping):
            raise InvalidArgument(f"the request is {type(request).__name__}: expected a request in tokens")
        stream = await self._router.generate(request, context=context)
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    async def best_worker_id(self, request: Any) -> AsyncIterator[int]:
        """Return the worker that would be chosen for a request now; no load is recorded."""
        route_request = self._route_request(request)
        await self._router.kv.know(route_request)
        yield self._router.kv.look(route_request).worker_id

    async def get_overlap_scores(self, request: Any) -> AsyncIterator[dict[str, Any]]:
        """Return the cached blocks of a prompt on every rank, by tier."""
        route_request = self._route_request(request)
        await self._router.kv.know(route_request)
        yield self._router.overlap_scores(route_request)

    def _route_request(self, request: Any) -> RouteRequest:
        """Parse a list of tokens, or an object with `token_ids`. Raises `InvalidArgument`."""
        given: Mapping[str, Any] = request if isinstance(request, Mapping) else {"token_ids": request}
        tokens = given.get("token_ids")
        if not isinstance(tokens, list):
            raise InvalidArgument(f"token_ids {tokens!r}: must be a list of numbers", param="token_ids")
        route_request = self._router.to_route_request(
            tokens,
            block_mm_infos=given.get("block_mm_infos"),
            lora_name=given.get("lora_name"),
            cache_salt=given.get("cache_namespace"),
        )
        route_request.overrides = given.get("router_config_override")
        return route_request


def main() -> int:
    """Run the router until it is stopped. Raises `ConfigError`."""
    options = load(RouterOptions, sys.argv[1:], UNSUPPORTED, prog="python -m dynamo.router")
    return run_service("router", serve(options))


@asynccontextmanager
async def serve(options: RouterOptions) -> AsyncIterator[None]:
    """Follow the workers and serve the endpoints; drain at the end of the block."""
    config, profile = options.meaning()
    async with open_runtime(options) as runtime:
        router = EndpointRouter(
            runtime.endpoint(str(options.target())), config, profile=profile, workers_min=min_initial_workers()
        )
        service = RouterService(runtime, router, serves_indexer=options.serve_indexer)
        runtime.health.checks.append(lambda: router.is_sound)
        await service.start()
        logger.info("router ready: %s, blocks of %d tokens", options.target(), config.block_size)
        yield
        logger.info("draining")
        await service.close(DRAIN_S)
