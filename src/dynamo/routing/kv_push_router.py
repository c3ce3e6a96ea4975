"""KvPushRouter: the KV router of one worker set, acting: who is there, what they hold, where a request goes.

    choose(request, progress)  ──▶  Decision      the worker and rank; may wait while all are busy
    release(request id)                           the request ended, or goes elsewhere

The deciding is `kv_router.router`'s. What costs something for each token is avoided: whether a request has its first
token is read off its progress when the next decision needs to know.
"""

import asyncio
import logging
import random
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.config import setting
from dynamo.core.errors import DynamoException, InvalidArgument, Overloaded
from dynamo.core.tasks import TaskOwner
from dynamo.kv_events.durable import DurableEvents
from dynamo.kv_events.forward_pass_listener import PaceListener
from dynamo.kv_events.subscriber import KvView
from dynamo.kv_router.config import RouterConfig
from dynamo.kv_router.policy import PolicyProfile
from dynamo.kv_router.predicted import Predicted
from dynamo.kv_router.router import Ask, Decision, Explanation, Rank, Router, WorkerFacts
from dynamo.kv_router.runs import pack, unpack
from dynamo.kv_router.tracking import KEYED, TrackingKey, read_key
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.protocols.model_card import ModelDeploymentCard
from dynamo.routing.kv_peers import hint_of, peers_of, with_hint
from dynamo.routing.metrics import KvRouterMetrics
from dynamo.routing.remote_indexer import RemoteIndexer
from dynamo.routing.shared_cache import SharedCache
from dynamo.routing.sync.affinity_sync import AffinitySync
from dynamo.routing.sync.replica_sync import ReplicaSync
from dynamo.routing.topology import taints_of
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.text.multimodal.routing_hashes import hashes_of, media_of
from dynamo.tokens.hashing import packed_block_hashes, seed_of, sequence_hashes

logger = logging.getLogger(__name__)

POLICY_CLASS = "policy-class"
"""The context metadata that names a request's class (header `x-dynamo-meta-policy-class`)."""

POLL_S = 0.005  # While requests wait: how soon a first token elsewhere lets the next one go.
SYNC_POLL_S = 0.01  # With replica sync: how late others hear of a first token.
QUEUE_TIMEOUT_S = 120.0  # Longer than any prompt takes to compute; who waited so long is told to come back.
SILENT_S = 10.0  # A worker that publishes its holdings has said so long before.


class Progress(Protocol):
    """How far a request is."""

    tokens: int
    """Output tokens so far."""
    is_over: bool
    """Whether nobody waits for it any more."""


class KvPushRouter:
    """One worker set's KV router."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        endpoint: EndpointId,
        config: RouterConfig,
        *,
        profile: PolicyProfile | None = None,
        chance: random.Random | None = None,
        clock: Clock | None = None,
        router_id: str = "",
    ) -> None:
        self.config = config
        self.machine = Router(config, chance or random.Random(random.getrandbits(64)), profile)
        self.view: KvView | None = None
        self.durable: DurableEvents | None = None
        """Follows the workers' events where a server keeps them."""
        self.remote = RemoteIndexer(runtime, endpoint) if config.use_remote_indexer else None
        """Who is asked what workers hold, in place of following their events."""
        self.model_name = ""
        """What the workers serve."""
        self.is_eagle = False
        """Whether they look a token ahead, and hash their blocks with it (`mm_routing.hashes_of`)."""
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
        """What other routers do."""
        self.bindings: AffinitySync | None = None
        """Where their sessions go."""
        if self.machine.affinity is not None:
            self.bindings = AffinitySync(runtime, endpoint, self.machine, self._clock)
        self.key: TrackingKey | None = None
        """What makes the hashes of requests under way ours and nobody else's."""
        if config.tracking_hash == KEYED:
            self.key = read_key(config.tracking_key_file or "", config.tracking_key_id or "")
        name = router_id or f"{runtime.instance_id:x}"
        self.shared: SharedCache | None = None
        """What a cache that all workers read has."""
        if config.shared_cache == "hicache":
            self.shared = SharedCache(config.block_size, runtime.metrics, name, str(endpoint))
        self._completes = self.key is not None or self.shared is not None
        self.paces: PaceListener | None = None
        """Hears how fast workers are, for those who want to know."""
        if config.policy == "balanced" or self.machine.prefill_model is not None:
            self.paces = PaceListener(runtime, endpoint, self.machine.pace, self.machine.prefill_model)
        self._peers: dict[int, str] = {}
        """Where workers lend their blocks to each other."""
        self._lengths: dict[str, Progress] = {}
        """With that cost function: whose lengths are learned when they end."""
        self._tasks = TaskOwner(f"kv router of {endpoint}")
        self._metrics = KvRouterMetrics(runtime.metrics, name, endpoint)
        self._prefilling: dict[str, Progress] = {}
        self._growing: dict[str, tuple[Progress, int]] = {}
        """With output blocks tracked: how many were counted."""
        self._waiting: dict[str, tuple[asyncio.Future[Decision], Progress]] = {}
        self._poller: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._alone_since: float | None = None
        self._configured = self.machine.predicted
        self._queue_timeout_s = setting("DYN_ROUTER_QUEUE_TIMEOUT_SECS", QUEUE_TIMEOUT_S, float)

    async def start(self) -> None:
        """Begins to follow the workers' events."""
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
        """Ends; who waits is told so."""
        waiting, self._waiting = self._waiting, {}
        for future, _ in waiting.values():
            if not future.done():
                future.set_exception(Overloaded("the router is shutting down"))
        await self._tasks.cancel_and_wait()
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
        """False while its picture of the caches is not followed."""
        return all(one is None or one.is_sound for one in (self.view, self.durable, self.sync, self.bindings))

    @property
    def is_guessing(self) -> bool:
        """Whether caches are guessed: because that is wanted, or because workers tell nothing of them."""
        if self.remote is not None:
            return False
        return self.view is None or self.machine.predicted is not self._configured

    # Who is there.

    def set_workers(self, cards: Mapping[int, ModelDeploymentCard]) -> None:
        """The workers that are present, with their cards."""
        self.hear_cards(cards.values())
        self._peers = peers_of(cards)
        self.set_facts([facts_of(worker_id, card) for worker_id, card in cards.items()])

    def hinted(self, request: PreprocessedRequest, decision: Decision) -> PreprocessedRequest:
        """The request as the chosen worker gets it: with the name of who holds more of its prompt, where somebody lends."""
        if not self._peers or decision.overlap_blocks >= decision.blocks:
            return request
        holders = self.holders(decision.snapshot.ask.blocks)
        return with_hint(request, hint_of(decision.worker_id, decision.overlap_blocks, holders, self._peers))

    def hear_cards(self, cards: Iterable[ModelDeploymentCard]) -> None:
        """What the workers' cards say of all of them."""
        heard = list(cards)
        for card in heard:
            self.model_name, self.is_eagle = card.display_name, card.runtime_config.enable_eagle
        if self.shared is not None:
            self.shared.hear_cards(heard)

    def set_facts(self, workers: Collection[WorkerFacts]) -> None:
        """The workers that are present, with what is known of them."""
        machine = self.machine
        present = {facts.worker_id for facts in workers}
        for worker_id in [worker_id for worker_id in machine.workers if worker_id not in present]:
            machine.remove_worker(worker_id)
            if self.view is not None:
                self.view.drop_worker(worker_id)
        for facts in workers:
            if machine.workers.get(facts.worker_id) != facts:
                machine.set_worker(facts)

    # Requests.

    async def choose(
        self,
        request: PreprocessedRequest,
        request_id: str,
        progress: Progress,
        *,
        avoid: Collection[int] = (),
        busy: Collection[int] = (),
        metadata: Mapping[str, str] | None = None,
    ) -> Decision:
        """The worker and rank for a request, which is counted as theirs until `release`.

        Raises what `Router.place` raises, and `Overloaded` for one that waited too long.
        """
        began = time.perf_counter()
        ask = self.ask(request, request_id, avoid=avoid, busy=busy, metadata=metadata)
        return await self.place(ask, progress, time.perf_counter() - began)

    async def place(self, ask: Ask, progress: Progress, hashing_s: float = 0.0) -> Decision:
        """The same for a request in the router's own words; raises the same."""
        began = time.perf_counter()
        if self.remote is not None:
            await self.know(ask)
        self.refresh()
        self._check_sources()
        self.prepare(ask)
        decision = self.machine.place(ask, self._clock.now())
        if decision is None:
            decision = await self._wait(ask, progress)
        else:
            self._metrics.decided(decision, hashing_s, time.perf_counter() - began)
        if ask.request_id in self.machine.active:
            self._prefilling[ask.request_id] = progress
            if self.paces is not None:
                self._lengths[ask.request_id] = progress
            if self.config.track_output_blocks:
                self._growing[ask.request_id] = (progress, 0)
            if self.sync is not None:
                self._tell_placed(self.sync, ask, decision)
            if self.bindings is not None and ask.session is not None:
                self.bindings.bound(ask.session, (decision.worker_id, decision.dp_rank))
        if self.shared is not None:
            beyond = decision.snapshot.prompt.shared_beyond
            seat = next(
                seat for seat, rank in decision.snapshot.ranks.items() if rank == (decision.worker_id, decision.dp_rank)
            )
            self.shared.used(sum(end - begin for begin, end in ask.shared), decision.blocks, beyond.get(seat, 0))
        return decision

    def peek(self, request: PreprocessedRequest, request_id: str = "", **more: Any) -> Decision:
        """Where a request would go now; nothing is counted. Raises what `Router.place` raises."""
        return self.look(self.ask(request, request_id, **more))

    def look(self, ask: Ask) -> Decision:
        """The same for a request in the router's own words."""
        self.refresh()
        self._check_sources()
        self.prepare(ask)
        decision = self.machine.place(ask, self._clock.now(), book=False)
        assert decision is not None, "who only asks does not wait"
        return decision

    async def know(self, ask: Ask) -> None:
        """Asks who holds what of a prompt, where another process knows it."""
        if self.remote is not None and ask.held is None:
            ask.held = await self.remote.find(self.model_name, ask.blocks)

    def prepare(self, ask: Ask) -> None:
        """Names a prompt's blocks as other routers do, where they are heard."""
        if self.sync is not None and ask.sequence is None:
            ask.sequence = pack(sequence_hashes(unpack(ask.blocks)))

    def prefilled(self, request_id: str) -> bool:
        """Its first token came, as somebody says who sees it. False for a request that is not counted."""
        self._prefilling.pop(request_id, None)
        if self.sync is not None:
            self.sync.prefilled(request_id)
        return self.machine.prefilled(request_id, self._clock.now())

    def release(self, request_id: str) -> None:
        """The request ended, or is to be chosen for anew."""
        self._prefilling.pop(request_id, None)
        self._growing.pop(request_id, None)
        ended = self._lengths.pop(request_id, None)
        if ended is not None and ended.tokens:
            self.machine.pace.observe_output(ended.tokens)
        if self.sync is not None:
            self.sync.freed(request_id)
        if self.machine.finish(request_id, self._clock.now()) and self._waiting:
            self._admit()

    def ask(
        self,
        request: PreprocessedRequest,
        request_id: str,
        *,
        avoid: Collection[int] = (),
        busy: Collection[int] = (),
        metadata: Mapping[str, str] | None = None,
    ) -> Ask:
        """What the router needs to know of a request. Raises `InvalidArgument` for routing that cannot be read."""
        routing = request.routing
        tokens = request.token_ids
        if routing is None:
            blocks = packed_block_hashes(tokens, self.config.block_size)
            asked = Ask(request_id, blocks, len(tokens))
        else:
            seed = seed_of(routing.lora_name, routing.cache_salt)
            required, preferred = constraints_of(routing.routing_constraints)
            allowed = routing.allowed_worker_ids
            asked = Ask(
                request_id,
                packed_block_hashes(tokens, self.config.block_size, seed),
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
        shown = request.mm_routing_info
        if isinstance(shown, dict) or self.is_eagle:
            asked.blocks, asked.tokens = self._shown(shown if isinstance(shown, dict) else {}, request)
        if self._completes:
            info = shown if isinstance(shown, dict) else {}
            self.complete(
                asked,
                _tokens_of(info, request),
                lora_name=None if routing is None else routing.lora_name,
                cache_salt=None if routing is None else routing.cache_salt,
                block_mm_infos=info.get("block_mm_infos"),
            )
        context = request.agent_context
        if isinstance(context, dict) and isinstance(context.get("session_id"), str):
            asked.session = context["session_id"]
            asked.is_last = context.get("session_final") is True
        asked.overrides = request.router_config_override
        asked.avoid = frozenset(avoid)
        asked.busy = frozenset(busy)
        if metadata:
            asked.policy_class = metadata.get(POLICY_CLASS)
        return asked

    def complete(
        self,
        ask: Ask,
        tokens: Sequence[int],
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        block_mm_infos: Any = None,
    ) -> None:
        """What follows from a prompt's tokens and not from its hashes, where it is asked for."""
        if self.key is not None:
            size, is_eagle = self.config.block_size, self.is_eagle
            seeds = self.key.seeds(self.model_name, size, cache_salt=cache_salt, lora_name=lora_name, is_eagle=is_eagle)
            ask.sequence = self.key.sequence(tokens, size, seeds, media_of(block_mm_infos), is_eagle=is_eagle)
        if self.shared is not None and not (lora_name or cache_salt or block_mm_infos):
            ask.shared = self.shared.find(tokens)

    def _shown(self, info: Mapping[str, Any], request: PreprocessedRequest) -> tuple[bytes, int]:
        """Blocks and tokens of a prompt with images, or for engines that look ahead. Raises `InvalidArgument`."""
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
        """Brings the load up to date with what became of the requests under way."""
        machine = self.machine
        if self._prefilling:
            done = [request_id for request_id, progress in self._prefilling.items() if progress.tokens]
            now = self._clock.now() if done else None
            for request_id in done:
                del self._prefilling[request_id]
                machine.prefilled(request_id, now)
                if self.sync is not None:
                    self.sync.prefilled(request_id)
        if self._growing:
            size = self.config.block_size
            for request_id, (progress, counted) in self._growing.items():
                full = progress.tokens // size
                for _ in range(full - counted):
                    machine.grow(request_id)
                self._growing[request_id] = (progress, full)

    def explain(self, request_id: str | None = None) -> Iterator[Explanation]:
        """The last decisions, newest first, or those about one request, with every candidate."""
        for decision in reversed(self.machine.decisions):
            if request_id is None or decision.request_id == request_id:
                yield self.machine.explain(decision)

    def holders(self, blocks: bytes) -> dict[Rank, tuple[int, int, int]]:
        """Who holds what of a prompt now, by tier, as far as it is known here."""
        return self.machine.overlaps(blocks, self._clock.now())

    # Other routers.

    def _tell_placed(self, sync: ReplicaSync, ask: Ask, decision: Decision) -> None:
        """Others hear of a request, and as soon of its first token as a poll sees it."""
        uncached = self.machine.active.prefill_of(ask.request_id)
        sync.added(
            ask.request_id,
            (decision.worker_id, decision.dp_rank),
            ask.sequence if self.config.track_active_blocks else None,
            uncached,
            tracks_prefill=decision.snapshot.weights.track_prefill_tokens,
            expected_output_tokens=ask.expected_output_tokens,
            prefill_s=self.machine.prefill_s(ask, uncached),
        )
        if self._watcher is None or self._watcher.done():
            self._watcher = self._tasks.start(self._watch_prefills(), "first tokens")

    async def _watch_prefills(self) -> None:
        while self._prefilling:
            await self._clock.sleep(SYNC_POLL_S)
            self.refresh()

    # Waiting.

    async def _wait(self, ask: Ask, progress: Progress) -> Decision:
        future: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._waiting[ask.request_id] = (future, progress)
        if self._poller is None or self._poller.done():
            self._poller = self._tasks.start(self._poll(), "admission")
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                return await future
        except TimeoutError:
            raise Overloaded(
                f"no worker had room within {self._queue_timeout_s:g} s (DYN_ROUTER_QUEUE_TIMEOUT_SECS)"
            ) from None
        finally:
            self._waiting.pop(ask.request_id, None)
            if not (future.done() and not future.cancelled() and future.exception() is None):
                self.machine.withdraw(ask.request_id)

    async def _poll(self) -> None:
        """Lets those go for whom there is room, as long as somebody waits."""
        while self._waiting:
            await self._clock.sleep(POLL_S)
            self.refresh()
            self._admit()

    def _admit(self) -> None:
        for request_id, (future, progress) in list(self._waiting.items()):
            if progress.is_over and not future.done():
                self.machine.withdraw(request_id)
                future.set_exception(DynamoException("nobody waits for the request any more"))
        for ask, found in self.machine.admit(self._clock.now()):
            entry = self._waiting.get(ask.request_id)
            if entry is None or entry[0].done():
                if isinstance(found, Decision):
                    self.machine.finish(ask.request_id)
                continue
            future = entry[0]
            if isinstance(found, Decision):
                future.set_result(found)
            else:
                future.set_exception(found)

    # Who tells nothing.

    def _check_sources(self) -> None:
        """Where events are expected and none come, caches are guessed, and it is said so."""
        if self.view is None:
            return
        if self.view.has_sources or not self.machine.workers:
            if self._alone_since is not None and self.machine.predicted is not self._configured:
                logger.warning("workers tell what they hold now: their caches are guessed no longer")
                self.machine.predicted = self._configured
            self._alone_since = None
            self._metrics.silent_workers.set(0)
            return
        now = self._clock.now()
        if self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since > SILENT_S and self.machine.predicted is self._configured:
            count = len(self.machine.workers)
            logger.warning(
                "none of %d worker(s) of %s tells what its cache holds: it is guessed from what they are given. "
                "Start them with KV events, or the router with --no-router-kv-events",
                count,
                self.view.endpoint,
            )
            self.machine.predicted = Predicted(ttl_s=self.config.approximate_ttl_s)
            self._metrics.silent_workers.set(count)


def facts_of(worker_id: int, card: ModelDeploymentCard) -> WorkerFacts:
    """What the router needs to know of a card."""
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
    """The tokens by which a prompt is routed: with those that stand for its images, where somebody knows them."""
    tokens = info.get("routing_token_ids")
    return tokens if isinstance(tokens, list) and tokens else request.token_ids


def constraints_of(given: dict[str, Any] | None) -> tuple[frozenset[str], dict[str, float]]:
    """Required and preferred taints of `routing_constraints`. Raises `InvalidArgument`."""
    if not given:
        return frozenset(), {}
    required, preferred = given.get("required_taints") or [], given.get("preferred_taints") or {}
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise InvalidArgument(
            f"routing_constraints.required_taints is {required!r}: expected a list of names", param="nvext"
        )
    if not isinstance(preferred, dict) or not all(isinstance(one, int | float) for one in preferred.values()):
        raise InvalidArgument(
            f"routing_constraints.preferred_taints is {preferred!r}: expected a weight for each name", param="nvext"
        )
    return frozenset(required), preferred
