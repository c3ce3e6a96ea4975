"""RouterService: the endpoints that a standalone router serves.

<namespace>.router.generate             forwards a request to the worker chosen for it
<namespace>.router.best_worker_id       returns the id of the best worker for tokens
<namespace>.router.get_overlap_scores   returns the cached blocks of tokens on every rank
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any

from dynamo.core.errors import InvalidArgument
from dynamo.kv_router.router import Ask
from dynamo.routing.endpoint_router import EndpointRouter
from dynamo.routing.remote_indexer import IndexerServer
from dynamo.runtime.component import Serving
from dynamo.runtime.context import Context
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.streams import GeneratorHandler

COMPONENT = "router"


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

    def _route_request(self, request: Any) -> Ask:
        """Parse a list of tokens, or an object with `token_ids`. Raises `InvalidArgument`."""
        given: Mapping[str, Any] = request if isinstance(request, Mapping) else {"token_ids": request}
        tokens = given.get("token_ids")
        if not isinstance(tokens, list):
            raise InvalidArgument(f"token_ids {tokens!r}: must be a list of numbers", param="token_ids")
        route_request = self._router.ask(
            tokens,
            block_mm_infos=given.get("block_mm_infos"),
            lora_name=given.get("lora_name"),
            cache_salt=given.get("cache_namespace"),
        )
        route_request.overrides = given.get("router_config_override")
        return route_request
