"""Fleet: the workers of one pool, who come, go, and fail; and the placement that chooses among them.

    starting ── start-up time ──▶ in service ── drain ──▶ leaving ── its last request ends ──▶ gone
                                      └──────────── fail ────────────────────────────────────▶ gone

Only those in service are known to the placement. A place is where a worker stands: on the page, and in `--fail`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dynamo.core.errors import NotReady
from dynamo.protocols.kv_events import KvEvent
from dynamo.replay.outcome import Flight
from dynamo.replay.placement import DEVICE, HOST, Asked, Caches, Placement, Seat
from dynamo.replay.plan import PoolPlan, Role
from dynamo.replay.worker import SimulatedWorker


class Told(NamedTuple):
    """What the owner of a cache says of it, now or later."""

    role: Role
    seat: Seat
    tier: str
    events: list[KvEvent]


Ranks = tuple[SimulatedWorker, ...]


@dataclass(slots=True)
class Fleet:
    """One pool."""

    plan: PoolPlan
    placement: Placement
    seed: int
    serving: dict[int, Ranks] = field(init=False, default_factory=dict)
    """By worker id, the oldest first."""
    leaving: dict[int, Ranks] = field(init=False, default_factory=dict)
    starting: dict[int, int] = field(init=False, default_factory=dict)
    """Worker id → its place."""

    def start(self, worker_id: int, slot: int) -> None:
        """A worker is on its way."""
        self.starting[worker_id] = slot

    def join(self, worker_id: int, now_ms: float) -> Ranks:
        """It is there."""
        slot = self.starting.pop(worker_id)
        plan, limits = self.plan, self.plan.limits
        ranks = tuple(
            SimulatedWorker(worker_id, rank, slot, limits, plan.timing, self._seed_of(worker_id, rank))
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
        """It gets no more requests and ends those that it has."""
        self.leaving[worker_id] = ranks = self.serving.pop(worker_id)
        self.placement.leave(worker_id)
        return ranks

    def fail(self, worker_id: int, now_ms: float) -> list[Flight]:
        """It is gone; returns the requests that it had."""
        if worker_id in self.serving:
            ranks = self.serving.pop(worker_id)
            self.placement.leave(worker_id)
        else:
            ranks = self.leaving.pop(worker_id)
        return [flight for rank in ranks for flight in rank.fail(now_ms)]

    def at(self, slot: int) -> int | None:
        """The worker that stands at a place."""
        found = (ranks[0] for ranks in [*self.serving.values(), *self.leaving.values()])
        return next((rank.worker_id for rank in found if rank.slot == slot), None)

    def rank(self, seat: Seat) -> SimulatedWorker:
        """The engine of a seat."""
        return self.serving[seat[0]][seat[1]]

    def all_ranks(self) -> Iterator[SimulatedWorker]:
        """Those in service, then those that leave."""
        for ranks in (*self.serving.values(), *self.leaving.values()):
            yield from ranks

    def has(self, worker_id: int) -> bool:
        """Whether it is there: in service, or leaving."""
        return worker_id in self.serving or worker_id in self.leaving

    def ranks_of(self, worker_id: int) -> Ranks:
        """The engines of a worker that is there."""
        return self.serving.get(worker_id) or self.leaving[worker_id]

    @property
    def expected(self) -> int:
        """How many there will be, if nothing happens."""
        return len(self.serving) + len(self.starting)

    def is_serving(self, worker_id: int) -> bool:
        """Whether the placement knows it."""
        return worker_id in self.serving

    def place(self, asked: Asked, now_ms: float) -> tuple[Seat | None, bool]:
        """The seat of a request, and whether there is anybody at all; no seat where the placement holds it back."""
        try:
            return self.placement.place(asked, now_ms / 1000), True
        except NotReady:
            return None, False

    def tell(self, told: Told) -> None:
        """Changes of a cache, for the placement where it knows the worker."""
        if told.seat[0] in self.serving:
            for event in told.events:
                self.placement.apply(told.seat, event, told.tier)

    def validate(self) -> None:
        """Raises `AssertionError` where something is held, or believed wrongly. For when all is quiet."""
        caching = self.plan.limits.enable_prefix_caching
        caches: Caches = {}
        for worker in self.all_ranks():
            worker.simulation.validate()
            assert worker.is_quiet, "a worker has work left"
            assert worker.simulation.pool.used == 0, "blocks are held by nobody"
            if worker.worker_id in self.serving:
                host = worker.simulation.host
                caches[*worker.seat, DEVICE] = set(worker.simulation.pool.inactive) if caching else set()
                caches[*worker.seat, HOST] = set() if host is None else set(host.held)
        assert not self.leaving, "a worker that should leave has not left"
        self.placement.validate(caches)
