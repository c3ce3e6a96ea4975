"""Router: the state of one worker set and the routing decision.

    apply(event)   apply a worker's KV event
    place(ask)     route a request; None: it is queued
    prefilled(id), grow(id), finish(id)   update a routed request
    admit()        route queued requests that can be admitted now

Pure: time is an argument, random numbers come from the given generator, no task is started. Each decision keeps the numbers on
which it was based, so that `explain` can show later why a worker was chosen (docs/routing.md).
"""

import random
from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence

from dynamo.core.errors import InvalidArgument, NotReady, Overloaded
from dynamo.kv_router import events
from dynamo.kv_router.active import ActiveLoad
from dynamo.kv_router.affinity import Affinity, Version
from dynamo.kv_router.config import CostWeights, RoutingConfig
from dynamo.kv_router.cost import Prompt, RankLoads, choose
from dynamo.kv_router.decision import Decision, Rank, RouteRequest, Snapshot, WorkerFacts, ranks_of
from dynamo.kv_router.eligibility import eligible_slots, eligible_slots_of_session
from dynamo.kv_router.explain import Explanation, explained
from dynamo.kv_router.index import KvIndex
from dynamo.kv_router.policy import PolicyProfile
from dynamo.kv_router.predicted import Predicted
from dynamo.kv_router.prefill_decay import PrefillDecay
from dynamo.kv_router.prefill_model import PrefillModel
from dynamo.kv_router.prompt_lookup import PromptLookup
from dynamo.kv_router.queue import PolicyClass, QueuedRequest, WaitingQueue
from dynamo.kv_router.session_prefixes import SessionPrefixes
from dynamo.kv_router.slot_costs import SlotCosts
from dynamo.kv_router.worker_slots import WorkerSlots
from dynamo.protocols.kv_events import WorkerKvEvent

__all__ = ["Decision", "Explanation", "Rank", "RouteRequest", "Router", "WorkerFacts"]

MANY_RANKS = {"dynamo": 48, "balanced": 32}
"""By policy, the number of ranks from which arrays are faster than dictionaries and lists."""
DECISIONS_MAX = 256  # Recent decisions that can be explained; each keeps about 60 bytes for each rank.


class Router:
    """The router of one worker set."""

    def __init__(
        self,
        config: RoutingConfig,
        rng: random.Random,
        profile: PolicyProfile | None = None,
        *,
        index: KvIndex | None = None,
        many_ranks: int | None = None,
    ) -> None:
        """`index`: an index that something else updates; by default the router's own.

        `many_ranks`: number of ranks from which decisions are made on arrays (`rank_arrays`); None: `MANY_RANKS`.
        """
        self.config = config
        self.index = KvIndex(config.blocks_max) if index is None else index
        self.active = ActiveLoad(
            shares_blocks=config.weights.assume_kv_reuse,
            expiry_s=config.expiry_s,
            counts_recent=config.policy == "balanced",
        )
        self.predicted: Predicted | None = None
        """Cached blocks predicted from routed requests, where workers publish no events or until they do."""
        if not config.use_kv_events:
            self.predicted = Predicted(ttl_s=config.approximate_ttl_s if config.approximate_policy == "ttl" else None)
        elif config.predicted_ttl_s is not None:
            self.predicted = Predicted(ttl_s=config.predicted_ttl_s)
        self.affinity = None if config.affinity_ttl_s is None else Affinity(config.affinity_ttl_s, config.affinity_mode)
        """Sessions and their workers."""
        self.prefill_model: PrefillModel | None = None
        """Duration of prefills, where their progress is estimated."""
        if config.prefill_load_model == "ais":
            self.prefill_model = PrefillModel(*config.prefill_estimate)
            self.active.decay = PrefillDecay()
        self.sessions = SessionPrefixes() if config.session_prefixes else None
        """Prompts of each session."""
        self.profile = profile or PolicyProfile(policy_classes=[self._default_class()])
        self.waiting: WaitingQueue[RouteRequest] = WaitingQueue(self.profile.policy_classes)
        self.decisions: deque[Decision] = deque(maxlen=DECISIONS_MAX)
        self.received: Counter[str] = Counter()
        """Number of requests to be placed, by policy class."""
        self._rng = rng
        self.many_ranks = MANY_RANKS[config.policy] if many_ranks is None else many_ranks
        """Number of ranks from which decisions are made on arrays."""
        self._workers = WorkerSlots(self.index, self.many_ranks, limits_blocks=config.track_active_blocks)
        self._costs = SlotCosts(config, self._workers, self.index)
        self.pace = self._costs.pace
        """Measured speed of the workers (policy `balanced`)."""
        self._lookup = PromptLookup(config, self.index, self.active, self._workers)
        self._may_wait = any(self._limits_prefill(policy) for policy in self.profile.policy_classes)
        self._only_class = self.profile.only_class()
        """Class of every request, if there is only one."""

    # Workers.

    @property
    def workers(self) -> Mapping[int, WorkerFacts]:
        """Return the workers by id."""
        return self._workers.workers

    @property
    def learns(self) -> bool:
        """Return whether decisions depend on the measured speed of the workers (`pace`)."""
        return self.config.policy == "balanced" or self._may_wait

    @property
    def ranks(self) -> Collection[Rank]:
        """Return the ranks of all workers."""
        return self._workers.slots.keys()

    def set_worker(self, facts: WorkerFacts) -> None:
        """Add a worker or update its facts."""
        for rank in self._workers.removed_by(facts):
            self._release_rank(rank)
        for slot in self._workers.set_worker(facts):
            self.active.reach(slot)

    def remove_worker(self, worker_id: int) -> list[str]:
        """Remove a worker; return the ids of its active requests."""
        facts = self._workers.workers.pop(worker_id, None)
        self.index.remove_worker(worker_id)
        if facts is None:
            return []
        return [request_id for rank in ranks_of(facts) for request_id in self._release_rank(rank)]

    def _release_rank(self, rank: Rank) -> list[str]:
        """Remove a rank; return the ids of its active requests."""
        slot = self._workers.slots[rank]
        self.pace.forget(rank)
        lost = self.active.drop(slot)
        for request_id in lost:
            self.pace.movement.drop(request_id)
        if self.affinity is not None:
            for request_id in lost:
                self.affinity.finish(request_id, 0.0)
        if self.predicted is not None:
            self.predicted.drop(slot)
        self._workers.release(rank)
        return lost

    # Worker events.

    def apply(self, event: WorkerKvEvent) -> bool:
        """Apply a KV event. Return False if it refers to an unknown block: an event was missed."""
        return events.apply(self.index, event)

    def forget(self, worker_id: int, dp_rank: int) -> None:
        """Drop a rank's blocks before a full dump is applied."""
        self.index.clear(worker_id, dp_rank)

    # Requests.

    def look_up(self, route_request: RouteRequest, now: float) -> None:
        """Look up the cached blocks of a prompt for the `place` that follows immediately, so that both can be timed."""
        route_request.prompt = self._prompt(route_request, now)

    def place(self, route_request: RouteRequest, now: float, *, book: bool = True) -> Decision | None:
        """Route a request; return None if it is queued until a worker has capacity (`admit`).

        `book=False` returns the decision without recording it. Raises `NotReady` if no worker is eligible, `Overloaded` if
        all eligible workers are busy, `RouterQueueLimitExceeded` if the queue is full, `InvalidArgument` for an unknown
        worker or rank.
        """
        if self.affinity is None:
            slots, filtered = eligible_slots(self._workers, route_request)
        else:
            slots, filtered = eligible_slots_of_session(self._workers, self.affinity, route_request, now)
        prompt, route_request.prompt = route_request.prompt or self._prompt(route_request, now), None
        policy = self._only_class
        if policy is None:
            uncached = route_request.tokens - self.config.block_size * prompt.deepest()
            policy = self.profile.class_of(route_request.policy_class, max(0, uncached))
        self.expire(now)
        if book:
            self.received[policy.name] += 1
        if book and self._may_wait and not self._has_capacity(policy, slots, now):
            cached = self.config.block_size * prompt.deepest(slots)
            waiting = QueuedRequest(
                item=route_request,
                prompt_tokens=route_request.tokens,
                cached_tokens=min(cached, route_request.tokens),
                arrived_s=now,
                priority_jump=route_request.priority_jump,
                strict_priority=route_request.strict_priority,
                prefill_s=self.pace.prefill_token_s * max(0, route_request.tokens - cached),
            )
            self.waiting.push(policy.name, waiting, len(self.workers), route_request.worker_id)
            return None
        decision = self._decide(route_request, slots, filtered, prompt, now)
        if book:
            self._book(route_request, decision, now)
        return decision

    def commit(self, route_request: RouteRequest, decision: Decision, now: float) -> None:
        """Record a decision that was made with `book=False`."""
        self._book(route_request, decision, now)

    def admit(self, now: float) -> list[tuple[RouteRequest, Decision | Exception]]:
        """Return queued requests that can be routed now; an exception where no worker can take one any more."""
        self.expire(now)
        found: list[tuple[RouteRequest, Decision | Exception]] = []
        while (waiting := self.waiting.pop(lambda policy, one: self._may_go(policy, one, now))) is not None:
            route_request = waiting.item
            try:
                slots, filtered = eligible_slots_of_session(self._workers, self.affinity, route_request, now)
            except (NotReady, Overloaded, InvalidArgument) as error:
                found.append((route_request, error))
                continue
            decision = self._decide(route_request, slots, filtered, self._prompt(route_request, now), now)
            self._book(route_request, decision, now)
            found.append((route_request, decision))
        return found

    def expire(self, now: float) -> list[str]:
        """Drop requests and sessions that exceeded their idle time; return the requests' ids."""
        lost = self.active.expire(now)
        for request_id in lost:
            self.pace.movement.drop(request_id)
        if self.affinity is not None:
            for request_id in lost:
                self.affinity.finish(request_id, now)
            self.affinity.expire(now)
        return lost

    def withdraw(self, request_id: str, *, is_late: bool = False) -> bool:
        """Remove a queued request, counted as expired if it `is_late`. Return False if it is not queued."""
        return bool(self.waiting.remove(lambda one: one.request_id == request_id, is_late=is_late))

    def prefilled(self, request_id: str, now: float | None = None, error_s: float = 0.0) -> bool:
        """Record the first token of a request, which arrived up to `error_s` seconds before `now`."""
        if now is not None:
            self.pace.movement.first_token(request_id, now, error_s)
        return self.active.prefilled(request_id, now)

    def grow(self, request_id: str, weight: float | None = None) -> bool:
        """Record a completed output block (`--router-track-output-blocks`)."""
        return self.config.track_output_blocks and self.active.grow(request_id, weight)

    def finish(self, request_id: str, now: float = 0.0) -> bool:
        """Remove a finished request. Return False if it is unknown, for example because it had ended before."""
        if self.affinity is not None:
            self.affinity.finish(request_id, now)
        self.pace.movement.drop(request_id)
        return self.active.finish(request_id, now or None)

    def book(self, request_id: str, rank: Rank, route_request: RouteRequest, now: float) -> bool:
        """Record a request routed elsewhere, by a replica or by the client. Return False for an unknown rank."""
        slot = self._workers.slots.get(rank)
        if slot is None:
            return False
        self._book_slot(request_id, slot, route_request, self._prompt(route_request, now), now)
        return True

    def rank_of(self, request_id: str) -> Rank | None:
        """Return the rank at which a request is booked."""
        slot = self.active.slot_of(request_id)
        return None if slot is None else self._workers.ranks[slot]

    def has_rank(self, rank: Rank) -> bool:
        """Return whether the rank exists."""
        return rank in self._workers.slots

    def share(
        self,
        request_id: str,
        rank: Rank,
        sequence: bytes,
        prefill_tokens: int,
        now: float,
        prefill_s: float | None = None,
    ) -> bool:
        """Record a request routed by a replica (`--router-replica-sync`). Return False for an unknown rank."""
        slot = self._workers.slots.get(rank)
        if slot is None:
            return False
        tracks = self.config.track_active_blocks
        if self.prefill_model is not None and prefill_s is None:
            prefill_s = self.prefill_model.seconds(prefill_tokens)
        self.active.book(
            request_id,
            slot,
            sequence,
            prefill_tokens=prefill_tokens,
            now=now,
            tracks_blocks=tracks,
            prefill_s=prefill_s,
        )
        self.note_sent(rank, sequence, now)
        return True

    def bind(self, session: str, rank: Rank, version: Version, now: float) -> bool:
        """Apply a session binding from a replica. Return False for an unknown rank or if a newer binding exists."""
        if self.affinity is None:
            return False
        if rank not in self._workers.slots:
            self.affinity.observe(version)
            return False
        return self.affinity.apply(session, rank, version, now)

    def is_active(self, request_id: str) -> bool:
        """Return whether a request is booked at a worker."""
        return request_id in self.active

    def loads(self) -> dict[Rank, tuple[float, float, int]]:
        """Return active prefill tokens, active blocks and requests of each rank."""
        active = self.active
        return {
            rank: (active.prefill_tokens[slot], active.blocks[slot], active.requests[slot])
            for slot, rank in self._workers.ranks.items()
        }

    def queued(self) -> tuple[int, int]:
        """Return the number of queued requests, and their uncached prompt tokens."""
        found = [self.waiting.pending(name) for name in self.waiting.names] if len(self.waiting) else []
        return sum(requests for requests, _, _ in found), sum(tokens - cached for _, tokens, cached in found)

    def load_of(self, rank: Rank) -> tuple[float, float]:
        """Return the active prefill tokens and the active blocks of a rank; zeros for an unknown one."""
        slot = self._workers.slots.get(rank)
        return (0, 0) if slot is None else (self.active.prefill_tokens[slot], self.active.blocks[slot])

    def explain(self, decision: Decision) -> Explanation:
        """Return the explanation of a decision."""
        return explained(decision, self.config.policy)

    def overlaps(
        self,
        blocks: bytes,
        now: float,
        held: Mapping[Rank, tuple[int, int, int]] | None = None,
        sequence: bytes | None = None,
    ) -> dict[Rank, tuple[int, int, int]]:
        """Return a prompt's cached blocks per rank: on the device, then beyond that on the host, then on disk.

        Predicted blocks are found by the prompt's `sequence` hashes, where routed requests have any.
        """
        prompt = self._prompt(RouteRequest("", blocks, 0, held=held, sequence=sequence), now)
        return {
            rank: (prompt.device.get(slot, 0), prompt.host.get(slot, 0), prompt.disk.get(slot, 0))
            for slot, rank in self._workers.ranks.items()
            if slot in prompt.device or slot in prompt.host or slot in prompt.disk
        }

    def potential(self, route_request: RouteRequest, now: float) -> dict[Rank, tuple[float, float, int]]:
        """Return each rank's load with this prompt added: prefill tokens, blocks, and its current number of requests."""
        prompt, active = self._prompt(route_request, now), self.active
        found: dict[Rank, tuple[float, float, int]] = {}
        for slot, rank in self._workers.ranks.items():
            prefill = active.prefill_tokens[slot] + self._costs.uncached_tokens(prompt, slot, self.config.weights)
            decode = active.blocks[slot] + prompt.blocks - prompt.active.get(slot, 0)
            found[rank] = (prefill, decode, active.requests[slot])
        return found

    def note_sent(self, rank: Rank, blocks: bytes, now: float) -> bool:
        """Predict a sent prompt as cached. Return False where caches are not predicted, or for an unknown rank."""
        slot = self._workers.slots.get(rank)
        if self.predicted is None or slot is None:
            return False
        capacity = None
        if not self.config.use_kv_events and self.config.approximate_policy == "lru":
            capacity = self._workers.workers[rank[0]].kv_blocks
        self.predicted.place(slot, blocks, now, capacity)
        return True

    def predicted_blocks(self, now: float) -> Iterator[tuple[Rank, bytes, bytes]]:
        """Yield rank, blocks and the blocks before them, for each stretch of blocks that is predicted to be cached."""
        if self.predicted is not None:
            for slot, blocks, before in self.predicted.held(now):
                yield self._workers.ranks[slot], blocks, before

    def validate(self) -> None:
        """Raise `AssertionError` if the parts disagree."""
        self.index.validate()
        self.active.validate()
        if self.predicted is not None:
            self.predicted.validate()
        self._workers.validate()

    # Implementation.

    def _default_class(self) -> PolicyClass:
        return PolicyClass(
            queue_policy=self.config.queue_policy, prefill_busy_threshold_frac=self.config.queue_threshold
        )

    @staticmethod
    def _limits_prefill(policy: PolicyClass) -> bool:
        return policy.prefill_busy_threshold is not None or policy.prefill_busy_threshold_frac is not None

    def _prompt(self, route_request: RouteRequest, now: float) -> Prompt:
        """Return the ranks' cached blocks of the prompt."""
        return self._lookup.find(route_request, self.predicted, now)

    def _decide(
        self, route_request: RouteRequest, slots: Sequence[int], filtered: Mapping[int, str], prompt: Prompt, now: float
    ) -> Decision:
        config, active, overrides = self.config, self.active, route_request.overrides
        weights = config.weights.overridden(overrides) if overrides else config.weights
        tokens: array[int] | array[float] = active.prefill_tokens[:]
        if active.decay is not None:
            tokens = active.prefill_tokens_at(now)
        load = RankLoads(tokens, active.blocks[:], active.requests[:])
        if config.policy == "balanced":
            load.contexts = active.contexts[:]
            load.recent, load.recent_scale = active.recent[:], active.recent_scale(len(self._workers.ranks))
        found = self._costs.of(route_request, slots, load, prompt, weights)
        arrays = self._workers.arrays
        pick = choose if arrays is None else arrays.choose
        place = pick(found, weights.router_temperature, self._rng)
        slot = int(slots[place])
        device, host, disk = prompt.device, prompt.host, prompt.disk
        worker_id, dp_rank = self._workers.ranks[slot]
        snapshot = Snapshot(
            now,
            route_request,
            slots,
            self._workers.share_ranks(),
            load,
            prompt,
            weights,
            found,
            filtered,
            config.block_size,
        )
        return Decision(
            route_request.request_id,
            worker_id,
            dp_rank,
            device.get(slot, 0) if device else 0,
            host.get(slot, 0) if host else 0,
            disk.get(slot, 0) if disk else 0,
            prompt.blocks,
            float(found[place]),
            snapshot,
            queue_depth=len(self.waiting),
            tokens_ahead=tokens[slot],
        )

    def _book(self, route_request: RouteRequest, decision: Decision, now: float) -> None:
        self.decisions.append(decision)
        if self.affinity is not None and route_request.session is not None:
            if route_request.is_last:
                self.affinity.end(route_request.session)
            else:
                rank = (decision.worker_id, decision.dp_rank)
                self.affinity.bind(route_request.session, route_request.request_id, rank, now)
        if self.sessions is not None and route_request.session is not None:
            if route_request.is_last:
                self.sessions.end(route_request.session)
            else:
                self.sessions.note(route_request.session, route_request.blocks)
        slot = self._workers.slots[(decision.worker_id, decision.dp_rank)]
        if self.config.policy == "balanced":
            self._costs.learn_from(route_request, slot, decision, now)
        self._book_slot(
            route_request.request_id, slot, route_request, decision.snapshot.prompt, now, decision.snapshot.weights
        )

    def _book_slot(
        self,
        request_id: str,
        slot: int,
        route_request: RouteRequest,
        prompt: Prompt,
        now: float,
        weights: CostWeights | None = None,
    ) -> None:
        weights = weights or self.config.weights
        uncached = self._costs.uncached_tokens(prompt, slot, weights) if weights.track_prefill_tokens else 0
        sequence = route_request.sequence or route_request.blocks
        self.active.book(
            request_id,
            slot,
            sequence,
            prefill_tokens=uncached,
            now=now,
            tracks_blocks=self.config.track_active_blocks,
            shares_blocks=weights.assume_kv_reuse,
            prefill_s=None if self.prefill_model is None else self.prefill_s(route_request, uncached),
        )
        if self.predicted is not None:
            self.note_sent(self._workers.ranks[slot], sequence, now)

    def prefill_s(self, route_request: RouteRequest, uncached: int) -> float | None:
        """Return the expected duration of a prefill of `uncached` tokens; None where it is not estimated."""
        if self.prefill_model is None:
            return None
        return self.prefill_model.seconds(uncached, max(0, route_request.tokens - uncached))

    def effective_tokens(self, decision: Decision) -> int:
        """Return the tokens to be computed where the request was sent."""
        slot = self._workers.slots[(decision.worker_id, decision.dp_rank)]
        return self._costs.uncached_tokens(decision.snapshot.prompt, slot, decision.snapshot.weights)

    def _may_go(self, policy: PolicyClass, waiting: QueuedRequest[RouteRequest], now: float) -> bool:
        try:
            slots, _ = eligible_slots(self._workers, waiting.item)
        except (NotReady, Overloaded, InvalidArgument):
            return True  # Admit it: routing raises the error that the client receives.
        return self._has_capacity(policy, slots, now)

    def _has_capacity(self, policy: PolicyClass, slots: Sequence[int], now: float) -> bool:
        active = self.active
        tokens = active.prefill_tokens if active.decay is None else active.prefill_tokens_at(now)
        workers = self._workers
        if workers.arrays is not None:
            return workers.arrays.has_capacity(policy, slots, tokens, workers.batch_tokens_of)
        return any(tokens[slot] <= policy.limit(workers.batch_tokens_of(slot)) for slot in slots)
