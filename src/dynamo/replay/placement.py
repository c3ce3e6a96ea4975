"""PlacementPolicy: choose workers for requests, by the production router or a simple mode.

All implementations receive the same events: workers, sent and finished requests, cache events, and steps.
"""

import random
from typing import NamedTuple, Protocol

from dynamo.core.errors import NotReady
from dynamo.kv_router.config import BLOCKS_MAX, RoutingConfig
from dynamo.kv_router.index import KvIndex
from dynamo.kv_router.router import Decision, Router, RouteRequest, WorkerFacts
from dynamo.kv_router.runs import TIERS
from dynamo.mocker.simulation.blocks import Change, StoredRun
from dynamo.protocols.kv_events import KvEvent, Removed, Stored
from dynamo.protocols.load import ForwardPass
from dynamo.replay.router_settings import RefusalRules
from dynamo.routing.busy import BusyWorkers, Capacity
from dynamo.runtime.push_router import PushRouter, RouterMode
from dynamo.tokens.hashing import packed_hashes

RankId = tuple[int, int]
"""Worker id and rank."""
DEVICE, HOST = "device", "host_pinned"
TIER_NUMBERS = {name: number for number, name in enumerate(TIERS)}
NO_REFUSALS = RefusalRules()
Caches = dict[tuple[int, int, str], set[int]]
"""Cached blocks by worker, rank and tier."""


class PlacementRequest(NamedTuple):
    """A request with the properties that a router may use."""

    request_id: str
    tokens: int
    packed: bytes
    """Token hashes of the complete blocks."""
    session: str | None = None
    """Id of the session if it has several turns."""
    priority: float = 0.0
    strict_priority: int = 0
    is_remote: bool = False
    """Whether another worker computed the prompt."""


DECODE_OVERRIDES = {"overlap_score_credit": 0.0, "assume_kv_reuse": False, "track_prefill_tokens": False}
"""Router settings for choosing the decode worker of a computed prompt."""


class PlacementPolicy(Protocol):
    """A policy that chooses workers."""

    @property
    def learns(self) -> bool:
        """Return whether `observe` has an effect."""
        ...

    @property
    def follows_caches(self) -> bool:
        """Return whether `apply` has an effect."""
        ...

    @property
    def counts_answers(self) -> bool:
        """Return whether `apply` has an effect also for the blocks of answers, which are in no other prompt."""
        ...

    @property
    def waiting(self) -> int:
        """Return the number of queued requests."""
        ...

    @property
    def queued(self) -> tuple[int, int]:
        """Return the number of queued requests, and their uncached prompt tokens."""
        ...

    def place(self, request: PlacementRequest, now_s: float) -> RankId | None:
        """Return the rank of a request, or None if it is queued (see `admit`).

        Raise `NotReady` without workers, `Overloaded` if the router refuses the request.
        """
        ...

    def admit(self, now_s: float) -> list[tuple[str, RankId | Exception]]:
        """Return queued requests that can be sent, with their rank; or the reason for which none can take it now."""
        ...

    def withdraw(self, request_id: str) -> None:
        """Remove a queued request that waited too long."""
        ...

    def prefilled(self, request_id: str, now_s: float) -> None:
        """Record the first token of a request."""
        ...

    def finish(self, request_id: str, output_tokens: int | None, now_s: float) -> None:
        """Record the end of a request on its worker. `output_tokens`: None if it ends there without an answer."""
        ...

    def apply(self, rank_id: RankId, event: Change | KvEvent, tier: str = DEVICE) -> None:
        """Apply a cache event."""
        ...

    def observe(self, rank_id: RankId, passed: ForwardPass) -> None:
        """Record a completed step."""
        ...

    def join(self, worker: int, ranks: int, blocks: int, batch_tokens: int) -> None:
        """Add a worker."""
        ...

    def leave(self, worker: int) -> None:
        """Remove a worker; its requests are placed again under the same ids."""
        ...

    def deepest(self, packed: bytes, now_s: float) -> int:
        """Return the longest cached prefix of a prompt on any worker, in blocks."""
        ...

    def validate(self, caches: Caches) -> None:
        """Raise `AssertionError` if the index differs from `caches` or finished requests are still counted."""
        ...


def apply_change(index: KvIndex, rank_id: RankId, change: Change | KvEvent, tier: str = DEVICE) -> None:
    """Apply a cache event of a simulated rank, which misses none, to an index."""
    worker, rank = rank_id
    if isinstance(change, StoredRun):
        index.store(worker, rank, change.parent, change.hashes, change.packed, TIER_NUMBERS[tier])
    elif isinstance(change, Removed):
        index.remove(worker, rank, change.block_hashes, TIER_NUMBERS[tier])
    elif isinstance(change, Stored):
        keys = [block.block_hash for block in change.blocks]
        packed = packed_hashes([block.tokens_hash for block in change.blocks])
        index.store(worker, rank, change.parent_hash, keys, packed, TIER_NUMBERS[tier])
    elif tier == DEVICE:
        index.clear(worker, rank)


def held(index: KvIndex) -> Caches:
    """Return the blocks of each cache according to an index."""
    found: Caches = {}
    for worker_id, rank, tier, change in index.dump():
        believed = found.setdefault((worker_id, rank, TIERS[tier]), set())
        if isinstance(change, Stored):
            believed.update(block.block_hash for block in change.blocks)
        else:
            believed.difference_update(change.block_hashes)
    return found


def check_caches(index: KvIndex, caches: Caches) -> None:
    """Raise `AssertionError` if the index differs from the caches.

    In the host tier the index may have fewer blocks: that tier evicts the least recently used block, and blocks after
    an evicted one cannot be found.
    """
    believed = held(index)
    for (worker, rank, tier), cache in caches.items():
        known = believed.pop((worker, rank, tier), set())
        is_right = known == cache if tier == DEVICE else known <= cache
        assert is_right, f"the index differs from the cache of worker {worker}, rank {rank}, {tier}"
    assert not any(believed.values()), "the index has entries of removed caches"


class KvPlacement:
    """Placement by the production router."""

    def __init__(self, config: RoutingConfig, seed: int, rules: RefusalRules = NO_REFUSALS) -> None:
        self.router = Router(config, random.Random(seed), rules.profile(config))
        self._busy = BusyWorkers(rules.thresholds(), Capacity(None, None))
        self.learns = self.router.learns  # An attribute: it is read with each event, and does not change.

    @property
    def follows_caches(self) -> bool:
        return True

    @property
    def counts_answers(self) -> bool:
        config = self.router.config  # `balanced` uses the number of cached blocks; a bounded index drops blocks.
        return config.policy == "balanced" or config.blocks_max != BLOCKS_MAX

    @property
    def waiting(self) -> int:
        return len(self.router.waiting)

    @property
    def queued(self) -> tuple[int, int]:
        return self.router.queued()

    def place(self, request: PlacementRequest, now_s: float) -> RankId | None:
        queued = RouteRequest(
            request.request_id,
            request.packed,
            request.tokens,
            session=request.session,
            overrides=DECODE_OVERRIDES if request.is_remote else None,
            priority_jump=request.priority,
            strict_priority=request.strict_priority,
            busy=self._busy_workers(),
        )
        decision = self.router.place(queued, now_s)
        return None if decision is None else (decision.worker_id, decision.dp_rank)

    def _busy_workers(self) -> frozenset[int]:
        """Return the workers above a busy threshold."""
        if not self._busy.thresholds.is_set:
            return frozenset()
        self._busy.book(self.router.loads(), self.router.queued()[1])
        return self._busy.busy(self.router.workers)

    def admit(self, now_s: float) -> list[tuple[str, RankId | Exception]]:
        return [
            (queued.request_id, (way.worker_id, way.dp_rank) if isinstance(way, Decision) else way)
            for queued, way in self.router.admit(now_s)
        ]

    def withdraw(self, request_id: str) -> None:
        self.router.withdraw(request_id, is_late=True)

    def prefilled(self, request_id: str, now_s: float) -> None:
        self.router.prefilled(request_id, now_s)

    def finish(self, request_id: str, output_tokens: int | None, now_s: float) -> None:
        self.router.finish(request_id, now_s)
        if output_tokens is not None:
            self.router.pace.observe_output(output_tokens)

    def apply(self, rank_id: RankId, event: Change | KvEvent, tier: str = DEVICE) -> None:
        apply_change(self.router.index, rank_id, event, tier)

    def observe(self, rank_id: RankId, passed: ForwardPass) -> None:
        step = passed.scheduled_requests
        self.router.pace.observe(
            step.sum_prefill_tokens, step.num_decode_requests, step.sum_decode_kv_tokens, passed.wall_time, rank_id
        )

    def join(self, worker: int, ranks: int, blocks: int, batch_tokens: int) -> None:
        self._busy.capacity = Capacity(blocks, batch_tokens)
        self.router.set_worker(WorkerFacts(worker, dp_size=ranks, kv_blocks=blocks, batch_tokens=batch_tokens))

    def leave(self, worker: int) -> None:
        self.router.remove_worker(worker)

    def deepest(self, packed: bytes, now_s: float) -> int:
        return max((sum(tiers) for tiers in self.router.overlaps(packed, now_s).values()), default=0)

    def validate(self, caches: Caches) -> None:
        self.router.validate()
        assert not len(self.router.active), "the router counts finished requests"
        if self.router.config.use_kv_events:
            check_caches(self.router.index, caches)


class SimplePlacement:
    """Placement by the frontend's router modes that ignore caches."""

    def __init__(self, mode: RouterMode, seed: int) -> None:
        self._router = PushRouter(mode, seed=seed)
        self._workers: list[int] = []
        self._where: dict[str, RankId] = {}
        self._busy: dict[int, list[int]] = {}
        """Active requests of each rank; a worker chosen without a rank uses its least busy one."""

    @property
    def learns(self) -> bool:
        return False

    @property
    def follows_caches(self) -> bool:
        return False

    @property
    def counts_answers(self) -> bool:
        return False

    @property
    def waiting(self) -> int:
        return 0

    @property
    def queued(self) -> tuple[int, int]:
        return 0, 0

    def place(self, request: PlacementRequest, now_s: float) -> RankId | None:
        worker = self._router.pick(now_s)
        if worker is None:
            raise NotReady("no worker in service")
        self._router.begin(worker)
        busy = self._busy[worker]
        rank = busy.index(min(busy))
        busy[rank] += 1
        self._where[request.request_id] = rank_id = worker, rank
        return rank_id

    def admit(self, now_s: float) -> list[tuple[str, RankId | Exception]]:
        return []

    def withdraw(self, request_id: str) -> None:
        pass

    def prefilled(self, request_id: str, now_s: float) -> None:
        pass

    def finish(self, request_id: str, output_tokens: int | None, now_s: float) -> None:
        worker, rank = self._where.pop(request_id)
        self._busy[worker][rank] -= 1
        self._router.end(worker)

    def apply(self, rank_id: RankId, event: Change | KvEvent, tier: str = DEVICE) -> None:
        pass

    def observe(self, rank_id: RankId, passed: ForwardPass) -> None:
        pass

    def join(self, worker: int, ranks: int, blocks: int, batch_tokens: int) -> None:
        self._workers.append(worker)
        self._busy[worker] = [0] * ranks
        self._router.update(self._workers)

    def leave(self, worker: int) -> None:
        self._workers.remove(worker)
        self._router.update(self._workers)
        del self._busy[worker]
        for request_id in [request_id for request_id, at in self._where.items() if at[0] == worker]:
            del self._where[request_id]
            self._router.end(worker)

    def deepest(self, packed: bytes, now_s: float) -> int:
        return 0

    def validate(self, caches: Caches) -> None:
        self._router.validate()
        assert not self._where, "finished requests are counted"
