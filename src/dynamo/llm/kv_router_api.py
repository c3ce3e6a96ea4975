"""KvRouter: upstream's Python API of the KV router, which routes to one endpoint's workers from the caller's process.

router = KvRouter(runtime.endpoint("dynamo.backend.generate"), 16, KvRouterConfig())
worker_id, dp_rank, overlap_blocks = await router.best_worker(token_ids)
async for output in await router.generate(token_ids, model="m", stop_conditions={"max_tokens": 16}): ...
"""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.codec import json_encode
from dynamo.core.errors import InvalidArgument
from dynamo.core.loops import ForeignStream, is_foreign
from dynamo.kv_events.publisher import compute_block_hash_for_seq
from dynamo.kv_events.subscriber import KvView
from dynamo.kv_router import events
from dynamo.kv_router.index import KvIndex
from dynamo.kv_router.predicted import Predicted
from dynamo.kv_router.router import RouteRequest
from dynamo.kv_router.runs import pack, slots_of
from dynamo.llm.radix_tree import OverlapScores, scores_of
from dynamo.protocols.kv_events import WorkerKvEvent
from dynamo.routing.busy import Thresholds
from dynamo.routing.endpoint_router import CountedProgress, EndpointRouter, min_initial_workers
from dynamo.routing.python_config import KvRouterConfig
from dynamo.routing.remote_indexer import IndexerServer
from dynamo.routing.topology import constraints_of
from dynamo.runtime.component import Endpoint
from dynamo.runtime.context import Context
from dynamo.runtime.streams import ResponseStream


@dataclass(slots=True)
class RoutingConstraints:
    """Taints that workers must have (`required_taints`) and that are preferred (`preferred_taints`, with weights)."""

    required_taints: set[str] = field(default_factory=set)
    preferred_taints: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.required_taints = set(self.required_taints or ())
        self.preferred_taints = dict(self.preferred_taints or {})

    def shown(self) -> dict[str, Any]:
        """Return the constraints in the form of a request."""
        return {"required_taints": sorted(self.required_taints), "preferred_taints": self.preferred_taints}


@dataclass(kw_only=True)
class LoadThresholdConfig:
    """Load thresholds above which a worker receives no more requests; all off by default."""

    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | None = None

    def meaning(self) -> Thresholds:
        """Return the thresholds. Raise `ValueError` for a value out of range."""
        try:
            return Thresholds(
                active_decode_blocks_threshold=self.active_decode_blocks_threshold,
                active_prefill_tokens_threshold=self.active_prefill_tokens_threshold,
                active_prefill_tokens_threshold_frac=self.active_prefill_tokens_threshold_frac,
            ).check()
        except InvalidArgument as error:
            raise ValueError(str(error)) from None


CREATED_S = 1.0  # A loop that takes longer may be one whose thread waits for the thread that creates the router.

P = ParamSpec("P")
R = TypeVar("R")


def _on_own_loop(
    method: Callable[Concatenate["KvRouter", P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate["KvRouter", P], Coroutine[Any, Any, R]]:
    """Run the method on the loop of the router's runtime, from whichever loop it is called."""

    @functools.wraps(method)
    async def run(router: "KvRouter", /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await router.thread.run(method(router, *args, **kwargs))

    return run


class KvRouter:
    """Choose workers of one endpoint by their cached blocks. Raise `ValueError` for a setting out of range.

    It can be created and used in any thread and on any event loop. With `DYN_ROUTER_MIN_INITIAL_WORKERS` the constructor
    returns when as many workers have registered; on the loop of the runtime, which it must not block, the calls wait.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        block_size: int,
        kv_router_config: KvRouterConfig,
        ais_perf_config: Any = None,
        session_affinity_ttl_secs: int | None = None,
        *,
        load_threshold_config: LoadThresholdConfig | None = None,
        session_affinity_mode: str = "hard",
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size {block_size}: expected 1 or more")
        if session_affinity_mode not in ("hard", "soft"):
            raise ValueError(f"session_affinity_mode {session_affinity_mode!r}: expected hard or soft")
        self._made: EndpointRouter | None = None
        config = kv_router_config.meaning(block_size, session_affinity_ttl_secs, session_affinity_mode, ais_perf_config)
        self._clock = SystemClock()
        self._server: IndexerServer | None = None
        self.thread = endpoint.runtime.thread
        """Runs the loop of the runtime, to which the router belongs."""

        profile = kv_router_config.profile()
        thresholds = None if load_threshold_config is None else load_threshold_config.meaning()
        workers_min = min_initial_workers()  # Read here: the router may be made when the variable is set no longer.

        def make() -> EndpointRouter:
            router = EndpointRouter(
                endpoint,
                config,
                profile=profile,
                thresholds=thresholds,
                workers_min=workers_min,
            )
            if kv_router_config.serve_indexer:
                self._server = IndexerServer(endpoint, router.kv.machine, router.models)
            self._starting = endpoint.runtime.tasks.start(self._start(router), f"kv router of {endpoint}")
            return router

        self._make = make
        self.thread.offer(lambda: self.core, CREATED_S)
        if workers_min:
            self.thread.wait(self.ready, CREATED_S)

    @property
    def core(self) -> EndpointRouter:
        """Return the underlying router, created at the first call. To be called on the loop of the runtime."""
        if self._made is None:
            self._made = self._make()
        return self._made

    @_on_own_loop
    async def ready(self) -> EndpointRouter:
        """Wait until the existing workers are known. Raise the error that prevented it."""
        router = self.core
        await asyncio.shield(self._starting)
        return router

    @_on_own_loop
    async def close(self) -> None:
        """Stop the router before its runtime does."""
        router = self.core
        self._starting.cancel()
        if self._server is not None:
            await self._server.close()
        await router.close()

    async def _start(self, router: EndpointRouter) -> None:
        await router.start()
        if self._server is not None:
            await self._server.start()

    async def generate(
        self,
        token_ids: list[int],
        model: str,
        stop_conditions: Any = None,
        sampling_options: Any = None,
        output_options: Any = None,
        router_config_override: Any = None,
        worker_id: int | None = None,
        dp_rank: int | None = None,
        extra_args: Any = None,
        block_mm_infos: Sequence[Any] | None = None,
        multi_modal_data: Any = None,
        mm_routing_info: Any = None,
        routing_constraints: RoutingConstraints | None = None,
        response_buffer_size: int = 100,
    ) -> ResponseStream | ForeignStream:
        """Send a prompt to the chosen worker; iterate over the returned stream."""
        request: dict[str, Any] = {"model": model, "token_ids": token_ids}
        routing: dict[str, Any] = {}
        if worker_id is not None:
            routing["backend_instance_id"] = worker_id
        if dp_rank is not None:
            routing["dp_rank"] = dp_rank
        if routing_constraints is not None:
            routing["routing_constraints"] = routing_constraints.shown()
        if block_mm_infos is not None and mm_routing_info is None:
            mm_routing_info = {"routing_token_ids": token_ids, "block_mm_infos": list(block_mm_infos)}
        given = {
            "stop_conditions": stop_conditions,
            "sampling_options": sampling_options,
            "output_options": output_options,
            "router_config_override": router_config_override,
            "extra_args": extra_args,
            "multi_modal_data": multi_modal_data,
            "mm_routing_info": mm_routing_info,
            "routing": routing or None,
        }
        request |= {name: value for name, value in given.items() if value is not None}
        return await self.generate_from_request(request, response_buffer_size)

    async def generate_from_request(
        self, request: Mapping[str, Any], response_buffer_size: int = 100, *, context: Context | None = None
    ) -> ResponseStream | ForeignStream:
        """Send a request in upstream's wire format; see `generate`.

        With a `response_buffer_size` of 0 the router counts tokens and the end of the response when they are read, else
        when they arrive. Other sizes have no effect: the buffer of a stream is always bounded.
        """
        if response_buffer_size < 0:
            raise ValueError(f"response_buffer_size {response_buffer_size}: expected 0 or more")
        loop = self.thread.loop
        if not is_foreign(loop):
            return await self._generate(request, context, response_buffer_size == 0)
        shadow = None if context is None else context.shadow(loop)
        return ForeignStream(await self._generate(request, shadow, response_buffer_size == 0), loop)

    @_on_own_loop
    async def _generate(
        self, request: Mapping[str, Any], context: Context | None, follows_reader: bool
    ) -> ResponseStream:
        return await (await self.ready()).generate(request, context=context, follows_reader=follows_reader)

    @_on_own_loop
    async def best_worker(
        self,
        token_ids: list[int],
        router_config_override: Any = None,
        request_id: str | None = None,
        update_indexer: bool = False,
        block_mm_infos: Sequence[Any] | None = None,
        lora_name: str | None = None,
        routing_constraints: RoutingConstraints | None = None,
        strict_priority: int = 0,
        policy_class: str | None = None,
        cache_namespace: str | None = None,
    ) -> tuple[int, int, int]:
        """Return worker, rank, and the number of prompt blocks in its cache.

        With `request_id` the request is booked on that worker until `free`; without, nothing is booked.
        `update_indexer` records the prompt as cached there, for approximate indexes.
        """
        router = await self.ready()
        route_request = router.to_route_request(
            token_ids,
            request_id or "",
            block_mm_infos=block_mm_infos,
            lora_name=lora_name,
            cache_salt=cache_namespace,
        )
        route_request.overrides, route_request.strict_priority, route_request.policy_class = (
            router_config_override,
            strict_priority,
            policy_class,
        )
        if routing_constraints is not None:
            route_request.required_taints, route_request.preferred_taints = constraints_of(routing_constraints.shown())
        await router.kv.know(route_request)
        if request_id is None:
            decision = router.kv.look(route_request)
        elif request_id in router.kv.machine.active:
            raise InvalidArgument(f"request {request_id} is already booked on a worker", param="request_id")
        else:
            decision = await router.place(route_request, CountedProgress())
        rank = (decision.worker_id, decision.dp_rank)
        if update_indexer:
            router.kv.machine.note_sent(rank, route_request.sequence or route_request.blocks, self._clock.now())
        return *rank, decision.overlap_blocks

    @_on_own_loop
    async def get_potential_loads(
        self,
        token_ids: list[int],
        block_mm_infos: Sequence[Any] | None = None,
        lora_name: str | None = None,
        cache_namespace: str | None = None,
    ) -> list[dict[str, int]]:
        """Return the load that each rank would have with this prompt added."""
        router, route_request = await self._make_route_request(token_ids, block_mm_infos, lora_name, cache_namespace)
        return router.potential_loads(route_request)

    @_on_own_loop
    async def get_overlap_scores(
        self,
        token_ids: list[int],
        router_config_override: Any = None,
        block_mm_infos: Sequence[Any] | None = None,
        lora_name: str | None = None,
        include_shared: bool = True,
        cache_namespace: str | None = None,
    ) -> dict[str, Any]:
        """Return the number of prompt blocks cached by each rank, by tier; a slower tier's count includes the faster
        tiers.

        `router_config_override` and `include_shared` have no effect: this router has no shared cache.
        """
        router, route_request = await self._make_route_request(token_ids, block_mm_infos, lora_name, cache_namespace)
        return router.overlap_scores(route_request)

    @_on_own_loop
    async def dump_events(self) -> str:
        """Return JSON events that recreate the index of cached blocks; without KV events that of predicted blocks."""
        router = await self.ready()
        machine = router.kv.machine
        if machine.config.use_kv_events:
            return json_encode(events.dump(machine.index)).decode()
        return json_encode(events.dump_predicted(machine.predicted_blocks(self._clock.now()))).decode()

    @_on_own_loop
    async def mark_prefill_complete(self, request_id: str) -> None:
        """Record the first token of a request. Raise `InvalidArgument` for an unknown request."""
        router = await self.ready()
        if not router.kv.prefilled(request_id):
            raise InvalidArgument(f"Request {request_id} not found", param="request_id")

    @_on_own_loop
    async def free(self, request_id: str) -> None:
        """Record the end of a request. Raise `InvalidArgument` for an unknown request."""
        router = await self.ready()
        if request_id not in router.kv.machine.active:
            raise InvalidArgument(f"Request {request_id} not found", param="request_id")
        router.kv.release(request_id)

    async def _make_route_request(
        self,
        token_ids: list[int],
        block_mm_infos: Sequence[Any] | None,
        lora_name: str | None,
        cache_namespace: str | None,
    ) -> tuple[EndpointRouter, RouteRequest]:
        router = await self.ready()
        route_request = router.to_route_request(
            token_ids, block_mm_infos=block_mm_infos, lora_name=lora_name, cache_salt=cache_namespace
        )
        await router.kv.know(route_request)
        return router, route_request


class KvIndexer:
    """Index of cached blocks, built from the events of one endpoint's workers."""

    def __init__(self, endpoint: Endpoint, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size {block_size}: expected 1 or more")
        self._block_size = block_size
        self._index = KvIndex()
        self._view = KvView(endpoint.runtime, endpoint.id, self)
        self._starting = endpoint.runtime.tasks.start(self._view.start(), f"indexer of {endpoint}")

    def find_matches(self, sequence: Sequence[int]) -> OverlapScores:
        """Return the number of these blocks that each rank holds, given their tokens hashes."""
        return OverlapScores(scores_of(self._index, sequence))

    def find_matches_for_request(
        self, token_ids: Sequence[int], lora_name: str | None = None, is_eagle: bool | None = None
    ) -> OverlapScores:
        """Return the number of blocks of a prompt that each rank holds."""
        return self.find_matches(
            compute_block_hash_for_seq(token_ids, self._block_size, lora_name=lora_name, is_eagle=is_eagle)
        )

    def block_size(self) -> int:
        return self._block_size

    async def ready(self) -> None:
        """Wait until the subscription to events is active."""
        await asyncio.shield(self._starting)

    async def close(self) -> None:
        """Stop the index before its runtime does."""
        self._starting.cancel()
        await self._view.close()

    def apply(self, kv_event: WorkerKvEvent) -> bool:
        """Apply a change of a worker's cache (`kv_events.subscriber.Listener`)."""
        return events.apply(self._index, kv_event)

    def forget(self, worker_id: int, dp_rank: int) -> None:
        """Remove a rank's blocks (`kv_events.subscriber.Listener`)."""
        self._index.clear(worker_id, dp_rank)


class ApproxKvIndexer:
    """Approximate index of cached blocks, predicted from the requests sent to each rank."""

    def __init__(
        self, endpoint: Endpoint, kv_block_size: int, router_ttl_secs: float = 120.0, *, clock: Clock | None = None
    ) -> None:
        if kv_block_size < 1:
            raise ValueError(f"kv_block_size {kv_block_size}: expected 1 or more")
        self._block_size = kv_block_size
        self._clock: Clock = SystemClock() if clock is None else clock
        self._predicted = Predicted(ttl_s=router_ttl_secs)
        self._slots: dict[tuple[int, int], int] = {}
        self._ranks: list[tuple[int, int]] = []

    def find_matches_for_request(
        self, token_ids: Sequence[int], lora_name: str | None = None, is_eagle: bool | None = None
    ) -> OverlapScores:
        """Return the predicted number of blocks of a prompt that each rank holds."""
        hashes = compute_block_hash_for_seq(token_ids, self._block_size, lora_name=lora_name, is_eagle=is_eagle)
        scores: dict[tuple[int, int], int] = {}
        for depth, slots in self._predicted.overlap(pack(hashes), self._clock.now()):
            scores |= {self._ranks[slot]: depth for slot in slots_of(slots)}
        return OverlapScores(scores)

    def block_size(self) -> int:
        return self._block_size

    async def process_routing_decision_for_request(
        self, tokens: Sequence[int], worker_id: int, dp_rank: int = 0
    ) -> None:
        """Record that a prompt was sent to a rank."""
        rank = (worker_id, dp_rank)
        slot = self._slots.get(rank)
        if slot is None:
            slot = self._slots[rank] = len(self._ranks)
            self._ranks.append(rank)
        hashes = compute_block_hash_for_seq(tokens, self._block_size)
        self._predicted.place(slot, pack(hashes), self._clock.now())
