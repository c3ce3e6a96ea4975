"""KvPushRouter: runtime shell of the KV router of one worker set: instances, cached blocks, placement of requests.

    choose(request, progress)  ──▶  Decision      the worker and rank; may wait while all workers are busy
    release(request id)                           the request ended or is sent elsewhere

`kv_router.router` makes the decisions. Work per token is avoided: the arrival of a request's first token is read from
its progress when the next decision needs it.
"""

import asyncio
import random
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.config import setting
from dynamo.core.errors import DynamoException, Overloaded
from dynamo.core.tasks import TaskOwner
from dynamo.kv_events.durable import DurableEvents
from dynamo.kv_events.forward_pass import PaceListener
from dynamo.kv_events.subscriber import KvView
from dynamo.kv_router.config import RoutingConfig
from dynamo.kv_router.policy import PolicyProfile
from dynamo.kv_router.queue import QUEUE_TIMEOUT_S
from dynamo.kv_router.router import Decision, Explanation, Rank, Router, RouteRequest, WorkerFacts
from dynamo.kv_router.runs import pack
from dynamo.kv_router.tracking import KEYED, TrackingKey, read_key
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.engine import PrefillResult, PreprocessedRequest
from dynamo.protocols.model_card import ModelDeploymentCard
from dynamo.routing.event_check import EventCheck
from dynamo.routing.kv_peers import hint_of, peers_of, with_hint
from dynamo.routing.metrics import KvRouterMetrics, SharedCacheMetrics
from dynamo.routing.remote_indexer import RemoteIndexer
from dynamo.routing.shared_cache import SharedCache
from dynamo.routing.sync.affinity_sync import AffinitySync
from dynamo.routing.sync.replica_sync import ReplicaSync
from dynamo.routing.topology import constraints_of, near_taint_of, taints_of
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.metric_labels import worker_labels
from dynamo.text.multimodal.routing_hashes import hashes_of, media_of
from dynamo.tokens.hashing import packed_block_hashes, packed_sequence_hashes, seed_of

POLICY_CLASS = "policy-class"
"""Context metadata key of a request's policy class (header `x-dynamo-meta-policy-class`)."""

POLL_S = 0.005  # Interval of admission checks while requests wait.
SYNC_POLL_S = 0.01  # With replica sync: maximum delay until other routers receive a first token.


class RequestProgress(Protocol):
    """Progress of a request."""

    tokens: int
    """Output tokens so far."""
    is_over: bool
    """Whether the caller no longer waits for the response."""


class KvPushRouter:
    """KV router of one worker set."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        endpoint: EndpointId,
        config: RoutingConfig,
        *,
        profile: PolicyProfile | None = None,
        rng: random.Random | None = None,
        clock: Clock | None = None,
        router_id: str = "",
        worker_type: str = "aggregated",
    ) -> None:
        """`router_id`: label of its metrics, the instance id by default; `worker_type`: see the workers' cards."""
        self.config = config
        self.endpoint = endpoint
        """Endpoint of the workers."""
        self.machine = Router(config, rng or random.Random(random.getrandbits(64)), profile)
        self.view: KvView | None = None
        self.durable: DurableEvents | None = None
        """Subscription to the workers' events on a persistent stream."""
        self.remote: RemoteIndexer | None = None
        """Indexer of another process that is queried instead of following KV events."""
        self.model_name = ""
        """Name of the served model."""
        self.is_eagle = False
        """Whether the workers' block hashes include the next token (`mm_routing.hashes_of`)."""
        if config.use_remote_indexer:
            self.remote = RemoteIndexer(runtime, endpoint, records=not config.use_kv_events)
        if config.use_kv_events and self.remote is None:
            self.view = KvView(runtime, endpoint, self.machine, is_durable=config.durable_kv_events)
            if config.durable_kv_events:
                self.durable = DurableEvents(
                    runtime,
                    endpoint,
                    self.view,
                    self.machine.index,
                    threshold=config.snapshot_threshold,
                    resets=config.reset_states,
                )
        self._clock = clock or SystemClock()
        self.sync = ReplicaSync(runtime, endpoint, self.machine, self._clock) if config.replica_sync else None
        """Exchange of active requests with router replicas."""
        self.bindings: AffinitySync | None = None
        """Exchange of session bindings with router replicas."""
        if self.machine.affinity is not None:
            self.bindings = AffinitySync(runtime, endpoint, self.machine, self._clock)
        self.key: TrackingKey | None = None
        """Key that makes the hashes of active requests private to routers with the same key."""
        if config.tracking_hash == KEYED:
            self.key = read_key(config.tracking_key_file or "", config.tracking_key_id or "")
        name = router_id or str(runtime.instance_id)
        shared_metrics = SharedCacheMetrics(runtime.metrics, name, worker_labels(endpoint, runtime.instance_id))
        self.shared: SharedCache | None = None
        """Index of a cache shared by all workers."""
        if config.shared_cache == "hicache":
            self.shared = SharedCache(config.block_size, shared_metrics, str(endpoint))
        self._completes = self.key is not None or self.shared is not None
        self.paces: PaceListener | None = None
        """Subscription to the workers' step times, if a cost model uses them."""
        if config.policy == "balanced" or self.machine.prefill_model is not None:
            self.paces = PaceListener(runtime, endpoint, self.machine.pace, self.machine.prefill_model)
        self._peers: dict[int, str] = {}
        """Addresses at which workers share their blocks."""
        self._lengths: dict[str, RequestProgress] = {}
        """With the latency-based cost function: requests whose output lengths are learned at their end."""
        self._tasks = TaskOwner(f"kv router of {endpoint}")
        self._metrics = KvRouterMetrics(runtime.metrics, name, endpoint, runtime.instance_id, self.machine, worker_type)
        self._prefilling: dict[str, RequestProgress] = {}
        self._refreshed_s = 0.0
        """Time at which the requests without first token were last looked at."""
        self._growing: dict[str, tuple[RequestProgress, int]] = {}
        """With output blocks tracked: progress and counted blocks by request."""
        self._waiting: dict[str, tuple[asyncio.Future[Decision], RequestProgress]] = {}
        self._poller: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._event_check = EventCheck(endpoint, self.machine, self.view, self._metrics.silent_workers, self._clock)
        self._is_prepared = False
        """Whether the code for many ranks is imported, or being imported."""
        self._queue_timeout_s = setting("DYN_ROUTER_QUEUE_TIMEOUT_SECS", QUEUE_TIMEOUT_S, float)

    async def start(self) -> None:
        """Subscribe to the workers' events."""
        if self.remote is not None:
            await self.remote.start()
        if self.view is not None:
            await self.view.start()
        if self.durable is not None:
            self.durable.start()
        for one in (self.sync, self.bindings, self.shared):
            if one is not None:
                await one.start()
        if self.paces is not None:
            await self.paces.start()

    async def close(self) -> None:
        """Stop; waiting requests fail."""
        waiting, self._waiting = self._waiting, {}
        for future, _ in waiting.values():
            if not future.done():
                future.set_exception(Overloaded("the router is shutting down"))
        await self._tasks.cancel_and_wait()
        self._metrics.close()
        if self.paces is not None:
            await self.paces.close()
        for one in (self.shared, self.bindings, self.sync):
            if one is not None:
                await one.close()
        if self.durable is not None:
            await self.durable.close()
        if self.view is not None:
            await self.view.close()
        if self.remote is not None:
            await self.remote.close()

    @property
    def is_sound(self) -> bool:
        """False while a subscription to cache state is interrupted."""
        return all(one is None or one.is_sound for one in (self.view, self.durable, self.sync, self.bindings))

    @property
    def is_guessing(self) -> bool:
        """Whether cache contents are predicted, by configuration or because workers publish no KV events."""
        if self.remote is not None:
            return False
        return self.view is None or self._event_check.is_predicting

    # Instances.

    def set_workers(self, cards: Mapping[int, ModelDeploymentCard]) -> None:
        """Replace the present workers and their cards."""
        self.apply_cards(cards.values())
        self._peers = peers_of(cards)
        self.set_facts([facts_of(worker_id, card) for worker_id, card in cards.items()])
        if self.config.use_kv_events:
            self._event_check.report(cards)

    def hinted(self, request: PreprocessedRequest, decision: Decision) -> PreprocessedRequest:
        """Return the request for the chosen worker, with a hint to a peer that has more of its blocks, if any."""
        if not self._peers or decision.overlap_blocks >= decision.blocks:
            return request
        holders = self.holders(decision.snapshot.route_request.blocks)
        return with_hint(request, hint_of(decision.worker_id, decision.overlap_blocks, holders, self._peers))

    def apply_cards(self, cards: Iterable[ModelDeploymentCard]) -> None:
        """Apply the card settings that are common to all workers."""
        known = list(cards)
        for card in known:
            self.model_name, self.is_eagle = card.display_name, card.runtime_config.enable_eagle
        if self.model_name:
            self._metrics.set_model(self.model_name, self.endpoint)
            if self.sync is not None:
                self.sync.set_model(self.model_name, self._metrics.worker_type)
        if self.shared is not None:
            self.shared.apply_cards(known)

    def set_facts(self, workers: Collection[WorkerFacts]) -> None:
        """Replace the present workers and their facts."""
        machine = self.machine
        self.keep({facts.worker_id for facts in workers})
        for facts in workers:
            if machine.workers.get(facts.worker_id) != facts:
                machine.set_worker(facts)
        if len(machine.ranks) > machine.many_ranks // 2 and not self._is_prepared:
            self._is_prepared = True  # Importing numpy takes a tenth of a second: not when the next worker joins.
            threading.Thread(target=import_module, args=["dynamo.kv_router.rank_arrays"], daemon=True).start()
        self._metrics.set_ranks(machine.ranks)

    def keep(self, present: Collection[int]) -> None:
        """Drop all other workers."""
        gone = self.machine.workers.keys() - present
        for worker_id in gone:
            self.machine.remove_worker(worker_id)
            if self.view is not None:
                self.view.drop_worker(worker_id)
        if gone:
            self._metrics.set_ranks(self.machine.ranks)

    # Requests.

    async def choose(
        self,
        request: PreprocessedRequest,
        request_id: str,
        progress: RequestProgress,
        *,
        avoid: Collection[int] = (),
        busy: Collection[int] = (),
        metadata: Mapping[str, str] | None = None,
        onward: Mapping[str, float] | None = None,
    ) -> Decision:
        """Choose the worker and rank for a request and count it there until `release`.

        `onward`: see `RouteRequest`. Raises the errors of `Router.place`, and `Overloaded` for a request that waited too long.
        """
        began = time.perf_counter()
        route_request = self.to_route_request(request, request_id, avoid=avoid, busy=busy, metadata=metadata)
        if onward:
            route_request.onward = onward
        return await self.place(route_request, progress, time.perf_counter() - began)

    async def place(self, route_request: RouteRequest, progress: RequestProgress, hashing_s: float = 0.0) -> Decision:
        """Choose as `choose` does, for a request in the router's own format."""
        began = time.perf_counter()
        if self.remote is not None:
            await self.know(route_request)
        self.refresh()
        self._event_check.check()
        self.prepare(route_request)
        now, lookup = self._clock.now(), time.perf_counter()
        self.machine.look_up(route_request, now)
        lookup_s = time.perf_counter() - lookup
        decision = self.machine.place(route_request, now)
        if decision is None:
            decision = await self._wait(route_request, progress)
            decision.waited_s = time.perf_counter() - began
        else:
            self._metrics.timed(hashing_s, lookup_s, hashing_s + time.perf_counter() - began)
        self._metrics.decided(decision)
        if self.remote is not None and not self.config.use_kv_events:
            rank = (decision.worker_id, decision.dp_rank)
            self._tasks.start(self.remote.record(self.model_name, rank, route_request.blocks), "routed prompt")
        if route_request.request_id in self.machine.active:
            self._prefilling[route_request.request_id] = progress
            if self.paces is not None:
                self._lengths[route_request.request_id] = progress
            if self.config.track_output_blocks:
                self._growing[route_request.request_id] = (progress, 0)
            if self.sync is not None:
                self._publish_placed(self.sync, route_request, decision)
            if self.bindings is not None and route_request.session is not None:
                self.bindings.bound(route_request.session, (decision.worker_id, decision.dp_rank))
        if self.shared is not None:
            beyond = decision.snapshot.prompt.shared_beyond
            slot = next(
                slot for slot, rank in decision.snapshot.ranks.items() if rank == (decision.worker_id, decision.dp_rank)
            )
            self.shared.used(
                sum(end - begin for begin, end in route_request.shared), decision.blocks, beyond.get(slot, 0)
            )
        return decision

    def peek(self, request: PreprocessedRequest, request_id: str = "", **more: Any) -> Decision:
        """Return the decision for a request without counting it. Raises the errors of `Router.place`."""
        return self.look(self.to_route_request(request, request_id, **more))

    def look(self, route_request: RouteRequest) -> Decision:
        """Decide as `peek` does, for a request in the router's own format."""
        self.refresh()
        self._event_check.check()
        self.prepare(route_request)
        decision = self.machine.place(route_request, self._clock.now(), book=False)
        assert decision is not None, "a decision without booking never waits"
        return decision

    async def know(self, route_request: RouteRequest) -> None:
        """Query the cached blocks of a prompt if another process holds the index."""
        if self.remote is not None and route_request.held is None:
            route_request.held = await self.remote.find(self.model_name, route_request.blocks)

    def prepare(self, route_request: RouteRequest) -> None:
        """Set the sequence hashes of a prompt if router replicas are synchronized."""
        if self.sync is not None and route_request.sequence is None:
            began = time.perf_counter()
            route_request.sequence = packed_sequence_hashes(route_request.blocks)
            self._metrics.overhead.seq_hashing.observe((time.perf_counter() - began) * 1e3)

    def prefilled(self, request_id: str) -> bool:
        """Record a first token that the caller observed. False for a request that is not counted."""
        self._prefilling.pop(request_id, None)
        if self.sync is not None:
            self.sync.prefilled(request_id)
        return self.machine.prefilled(request_id, self._clock.now())

    def release(self, request_id: str) -> None:
        """Stop counting a request that ended or is chosen for again."""
        self._prefilling.pop(request_id, None)
        if self._growing:
            self._growing.pop(request_id, None)
        if self._lengths:
            ended = self._lengths.pop(request_id, None)
            if ended is not None and ended.tokens:
                self.machine.pace.observe_output(ended.tokens)
        if self.sync is not None:
            self.sync.freed(request_id)
        if self.machine.finish(request_id, self._clock.now()) and self._waiting:
            self._admit()

    def to_route_request(
        self,
        request: PreprocessedRequest,
        request_id: str,
        *,
        avoid: Collection[int] = (),
        busy: Collection[int] = (),
        metadata: Mapping[str, str] | None = None,
    ) -> RouteRequest:
        """Return the routing request. Raises `InvalidArgument` for invalid routing fields."""
        routing = request.routing
        route_request = self._hashed(request, request_id)
        shown = request.mm_routing_info
        if isinstance(shown, dict) or self.is_eagle:
            route_request.blocks, route_request.tokens = self._shown(shown if isinstance(shown, dict) else {}, request)
        if self._completes:
            info = shown if isinstance(shown, dict) else {}
            self.complete(
                route_request,
                _tokens_of(info, request),
                lora_name=None if routing is None else routing.lora_name,
                cache_salt=None if routing is None else routing.cache_salt,
                block_mm_infos=info.get("block_mm_infos"),
            )
        context = request.agent_context
        if isinstance(context, dict) and isinstance(context.get("session_id"), str):
            route_request.session = context["session_id"]
            route_request.is_last = context.get("session_final") is True
        route_request.overrides = request.router_config_override
        route_request.is_computed = isinstance(request.prefill_result, PrefillResult)
        if route_request.preferred_taints:
            route_request.near_taint = near_taint_of(route_request.preferred_taints)
        if avoid or busy:
            route_request.avoid, route_request.busy = frozenset(avoid), frozenset(busy)
        if metadata:
            route_request.policy_class = metadata.get(POLICY_CLASS)
        return route_request

    def _hashed(self, request: PreprocessedRequest, request_id: str) -> RouteRequest:
        """Return the routing request of the token ids and the routing fields."""
        routing, tokens, block_size = request.routing, request.token_ids, self.config.block_size
        if routing is None:
            return RouteRequest(request_id, packed_block_hashes(tokens, block_size), len(tokens))
        seed = seed_of(routing.lora_name, routing.cache_salt)
        required, preferred = constraints_of(routing.routing_constraints)
        allowed = routing.allowed_worker_ids
        return RouteRequest(
            request_id,
            packed_block_hashes(tokens, block_size, seed),
            len(tokens),
            worker_id=routing.backend_instance_id or routing.decode_worker_id,
            dp_rank=routing.dp_rank,
            allowed=None if allowed is None else frozenset(allowed),
            required_taints=required,
            preferred_taints=preferred,
            expected_output_tokens=routing.expected_output_tokens,
            priority_jump=routing.priority_jump or 0.0,
            strict_priority=routing.strict_priority or 0,
        )

    def complete(
        self,
        route_request: RouteRequest,
        tokens: Sequence[int],
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        block_mm_infos: Any = None,
    ) -> None:
        """Set the fields computed from a prompt's tokens rather than its hashes, if configured."""
        if self.key is not None:
            size, is_eagle = self.config.block_size, self.is_eagle
            seeds = self.key.seeds(self.model_name, size, cache_salt=cache_salt, lora_name=lora_name, is_eagle=is_eagle)
            route_request.sequence = self.key.sequence(tokens, size, seeds, media_of(block_mm_infos), is_eagle=is_eagle)
        if self.shared is not None and not (lora_name or cache_salt or block_mm_infos):
            route_request.shared = self.shared.find(tokens)

    def _shown(self, info: Mapping[str, Any], request: PreprocessedRequest) -> tuple[bytes, int]:
        """Return blocks and token count of a prompt with images or for EAGLE engines. Raises `InvalidArgument`."""
        tokens, routing = _tokens_of(info, request), request.routing
        hashes = hashes_of(
            tokens,
            self.config.block_size,
            block_mm_infos=info.get("block_mm_infos"),
            lora_name=None if routing is None else routing.lora_name,
            cache_salt=None if routing is None else routing.cache_salt,
            is_eagle=self.is_eagle,
        )
        return pack(hashes), len(tokens)

    def refresh(self) -> None:
        """Update the load with the progress of the active requests."""
        machine = self.machine
        if self._prefilling:
            done = [request_id for request_id, progress in self._prefilling.items() if progress.tokens]
            now = self._clock.now()
            for request_id in done:
                del self._prefilling[request_id]
                machine.prefilled(request_id, now, now - self._refreshed_s)
                if self.sync is not None:
                    self.sync.prefilled(request_id)
            self._refreshed_s = now
        if self._growing:
            size = self.config.block_size
            for request_id, (progress, counted) in self._growing.items():
                full = progress.tokens // size
                for _ in range(full - counted):
                    machine.grow(request_id)
                self._growing[request_id] = (progress, full)

    def explain(self, request_id: str | None = None) -> Iterator[Explanation]:
        """Yield the last decisions, newest first, or those about one request, with every candidate."""
        for decision in reversed(self.machine.decisions):
            if request_id is None or decision.request_id == request_id:
                yield self.machine.explain(decision)

    def holders(self, blocks: bytes) -> dict[Rank, tuple[int, int, int]]:
        """Return the cached blocks of a prompt by rank and tier, according to the local index."""
        return self.machine.overlaps(blocks, self._clock.now())

    # Other routers.

    def _publish_placed(self, sync: ReplicaSync, route_request: RouteRequest, decision: Decision) -> None:
        """Publish a placed request, and its first token once a poll observes it."""
        uncached = self.machine.active.prefill_of(route_request.request_id)
        sync.added(
            route_request.request_id,
            (decision.worker_id, decision.dp_rank),
            route_request.sequence if self.config.track_active_blocks else None,
            uncached,
            tracks_prefill=decision.snapshot.weights.track_prefill_tokens,
            expected_output_tokens=route_request.expected_output_tokens,
            prefill_s=self.machine.prefill_s(route_request, uncached),
        )
        if self._watcher is None or self._watcher.done():
            self._watcher = self._tasks.start(self._watch_prefills(), "first tokens")

    async def _watch_prefills(self) -> None:
        while self._prefilling:
            await self._clock.sleep(SYNC_POLL_S)
            self.refresh()

    # Queue.

    async def _wait(self, route_request: RouteRequest, progress: RequestProgress) -> Decision:
        future: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._waiting[route_request.request_id] = (future, progress)
        if self._poller is None or self._poller.done():
            self._poller = self._tasks.start(self._poll(), "admission")
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                return await future
        except TimeoutError:
            self.machine.withdraw(route_request.request_id, is_late=True)
            raise Overloaded(
                f"no worker had capacity within {self._queue_timeout_s:g} s (DYN_ROUTER_QUEUE_TIMEOUT_SECS)"
            ) from None
        finally:
            self._waiting.pop(route_request.request_id, None)
            if not (future.done() and not future.cancelled() and future.exception() is None):
                self.machine.withdraw(route_request.request_id)

    async def _poll(self) -> None:
        """Admit waiting requests as capacity becomes available, until none is left."""
        while self._waiting:
            await self._clock.sleep(POLL_S)
            self.refresh()
            self._admit()

    def _admit(self) -> None:
        for request_id, (future, progress) in list(self._waiting.items()):
            if progress.is_over and not future.done():
                self.machine.withdraw(request_id)
                future.set_exception(DynamoException("the caller no longer waits for the request"))
        for route_request, found in self.machine.admit(self._clock.now()):
            entry = self._waiting.get(route_request.request_id)
            if entry is None or entry[0].done():
                if isinstance(found, Decision):
                    self.machine.finish(route_request.request_id)
                continue
            future = entry[0]
            if isinstance(found, Decision):
                future.set_result(found)
            else:
                future.set_exception(found)


def facts_of(worker_id: int, card: ModelDeploymentCard) -> WorkerFacts:
    """Return the facts of a worker that the router needs, from its card."""
    runtime = card.runtime_config
    return WorkerFacts(
        worker_id,
        dp_start=runtime.data_parallel_start_rank,
        dp_size=max(1, runtime.data_parallel_size),
        kv_blocks=runtime.total_kv_blocks,
        batch_tokens=runtime.max_num_batched_tokens,
        taints=taints_of(runtime),
    )


def _tokens_of(info: Mapping[str, Any], request: PreprocessedRequest) -> Sequence[int]:
    """Return the tokens by which a prompt is routed: with image placeholder tokens if the request has them."""
    tokens = info.get("routing_token_ids")
    return tokens if isinstance(tokens, list) and tokens else request.token_ids
