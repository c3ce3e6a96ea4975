"""Fleet: the workers of one pool through their lifecycle, and the placement that chooses among them.

    starting ── start-up time ──▶ in service ── drain ──▶ leaving ── its last request ends ──▶ gone
                                      └──────────── fail ────────────────────────────────────▶ gone

The placement considers only workers in service. A place is a worker's number on the page and in `--fail`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dynamo.core.errors import NotReady
from dynamo.mocker.simulation.blocks import Change
from dynamo.protocols.kv_events import KvEvent
from dynamo.replay.gaps import GapHistogram
from dynamo.replay.outcome import Flight
from dynamo.replay.placement import DEVICE, HOST, Caches, PlacementPolicy, PlacementRequest, RankId
from dynamo.replay.plan import PoolPlan, Role
from dynamo.replay.worker import SimulatedWorker


class DelayedCacheEvents(NamedTuple):
    """A cache event of a rank, to be delivered immediately or after the lag."""

    role: Role
    rank_id: RankId
    tier: str
    events: Sequence[Change | KvEvent]


Ranks = tuple[SimulatedWorker, ...]


@dataclass(slots=True)
class Fleet:
    """One pool of workers."""

    plan: PoolPlan
    placement: PlacementPolicy
    seed: int
    gaps: GapHistogram = field(default_factory=GapHistogram)
    """Times between tokens, of all workers."""
    serving: dict[int, Ranks] = field(init=False, default_factory=dict)
    """Workers in service by id, oldest first."""
    leaving: dict[int, Ranks] = field(init=False, default_factory=dict)
    starting: dict[int, int] = field(init=False, default_factory=dict)
    """Starting workers: id → place."""

    def start(self, worker_id: int, slot: int) -> None:
        """Add a starting worker."""
        self.starting[worker_id] = slot

    def join(self, worker_id: int, now_ms: float) -> Ranks:
        """Put a started worker into service and return its ranks."""
        slot = self.starting.pop(worker_id)
        plan, limits = self.plan, self.plan.limits
        ranks = tuple(
            SimulatedWorker(
                worker_id,
                rank,
                slot,
                limits,
                plan.timing_at(slot),
                self._seed_of(worker_id, rank),
                self.gaps,
                self.placement.counts_answers,
            )
            for rank in range(plan.ranks)
        )
        for rank in ranks:
            rank.noted_ms = now_ms
        self.serving[worker_id] = ranks
        self.placement.join(worker_id, plan.ranks, limits.num_blocks, limits.max_num_batched_tokens)
        return ranks

    def _seed_of(self, worker_id: int, rank: int) -> int:
        return self.seed * 1_000_003 + worker_id + rank * 1_000_000_007

    def drain(self, worker_id: int) -> Ranks:
        """Take a worker out of service; it finishes its requests."""
        self.leaving[worker_id] = ranks = self.serving.pop(worker_id)
        self.placement.leave(worker_id)
        return ranks

    def fail(self, worker_id: int, now_ms: float) -> list[Flight]:
        """Remove a failed worker and return its requests."""
        if worker_id in self.serving:
            ranks = self.serving.pop(worker_id)
            self.placement.leave(worker_id)
        else:
            ranks = self.leaving.pop(worker_id)
        return [flight for rank in ranks for flight in rank.fail(now_ms)]

    def at(self, slot: int) -> int | None:
        """Return the id of the worker at a place."""
        found = (ranks[0] for ranks in [*self.serving.values(), *self.leaving.values()])
        return next((rank.worker_id for rank in found if rank.slot == slot), None)

    def rank(self, rank_id: RankId) -> SimulatedWorker:
        """Return the simulated rank of a worker and rank number."""
        return self.serving[rank_id[0]][rank_id[1]]

    def all_ranks(self) -> Iterator[SimulatedWorker]:
        """Yield the ranks in service, then those of leaving workers."""
        for ranks in (*self.serving.values(), *self.leaving.values()):
            yield from ranks

    def has(self, worker_id: int) -> bool:
        """Return whether a worker is in service or leaving."""
        return worker_id in self.serving or worker_id in self.leaving

    def ranks_of(self, worker_id: int) -> Ranks:
        """Return the ranks of a worker that is in service or leaving."""
        return self.serving.get(worker_id) or self.leaving[worker_id]

    @property
    def expected(self) -> int:
        """Return the number of workers in service and starting."""
        return len(self.serving) + len(self.starting)

    def is_serving(self, worker_id: int) -> bool:
        """Return whether a worker is in service."""
        return worker_id in self.serving

    def place(self, request: PlacementRequest, now_ms: float) -> tuple[RankId | None, bool]:
        """Return the rank for a request (None: queued or no worker), and whether any worker is in service.

        Raise `Overloaded` if the router refuses the request.
        """
        try:
            return self.placement.place(request, now_ms / 1000), True
        except NotReady:
            return None, False

    def apply(self, change: DelayedCacheEvents) -> None:
        """Deliver a cache event to the placement if the worker is in service."""
        if change.rank_id[0] in self.serving:
            for event in change.events:
                self.placement.apply(change.rank_id, event, change.tier)

    def validate(self) -> None:
        """Raise `AssertionError` if blocks are held or the placement's state is wrong. Call only when idle."""
        caching = self.plan.limits.enable_prefix_caching
        caches: Caches = {}
        for worker in self.all_ranks():
            worker.simulation.validate()
            assert worker.is_quiet, "a worker has work left"
            assert worker.simulation.pool.used == 0, "blocks are held without a request"
            if worker.worker_id in self.serving:
                host = worker.simulation.host
                readable = worker.simulation.pool.inactive if caching else ()
                caches[*worker.rank_id, DEVICE] = {block_hash for block_hash in readable if block_hash >= 0}
                caches[*worker.rank_id, HOST] = set() if host is None else set(host.held)
        assert not self.leaving, "a draining worker was not removed"
        self.placement.validate(caches)
