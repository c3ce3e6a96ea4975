"""RouterService: the endpoints that a standalone router serves.

<namespace>.router.generate             a request, relayed to the worker that is chosen for it
<namespace>.router.best_worker_id       tokens in, a worker's id out
<namespace>.router.get_overlap_scores   tokens in, what every rank holds of them out
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
    """Answers by one endpoint's router."""

    def __init__(self, runtime: DistributedRuntime, router: EndpointRouter, *, serves_indexer: bool = False) -> None:
        self._runtime = runtime
        self._router = router
        self._indexer = IndexerServer(router.endpoint, router.kv.machine, router.models) if serves_indexer else None
        self._servings: list[Serving] = []

    async def start(self) -> None:
        """Follows the workers, then lets callers find the router."""
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
        """Leaves the registry, lets what runs end within the time, and stops following the workers."""
        if self._indexer is not None:
            await self._indexer.close()
        for serving in self._servings:
            await serving.unregister()
        for serving in self._servings:
            await serving.close(drain_s)
        await self._router.close()

    async def generate(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """What the chosen worker answers."""
        if not isinstance(request, Mapping):
            raise InvalidArgument(f"the request is {type(request).__name__}: expected a request in tokens")
        stream = await self._router.generate(request, context=context)
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    async def best_worker_id(self, request: Any) -> AsyncIterator[int]:
        """The worker that a request would go to now; nothing is counted as its."""
        asked = self._asked(request)
        await self._router.kv.know(asked)
        yield self._router.kv.look(asked).worker_id

    async def get_overlap_scores(self, request: Any) -> AsyncIterator[dict[str, Any]]:
        """What every rank holds of a prompt, by tier."""
        asked = self._asked(request)
        await self._router.kv.know(asked)
        yield self._router.overlap_scores(asked)

    def _asked(self, request: Any) -> Ask:
        """Tokens alone, or an object with `token_ids`. Raises `InvalidArgument`."""
        given: Mapping[str, Any] = request if isinstance(request, Mapping) else {"token_ids": request}
        tokens = given.get("token_ids")
        if not isinstance(tokens, list):
            raise InvalidArgument(f"token_ids is {tokens!r}: expected a list of numbers", param="token_ids")
        asked = self._router.ask(
            tokens,
            block_mm_infos=given.get("block_mm_infos"),
            lora_name=given.get("lora_name"),
            cache_salt=given.get("cache_namespace"),
        )
        asked.overrides = given.get("router_config_override")
        return asked
