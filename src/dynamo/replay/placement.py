"""Placement: who decides which worker a request goes to: the production router, or a simple mode.

All are told the same: who is there, what was sent, what came of it, what caches hold, how long steps took.
"""

import itertools
import random
from dataclasses import dataclass
from typing import Protocol

from dynamo.core.errors import NotReady
from dynamo.kv_router.config import RouterConfig
from dynamo.kv_router.index import KvIndex
from dynamo.kv_router.router import Ask, Decision, Router, WorkerFacts
from dynamo.kv_router.runs import TIERS
from dynamo.protocols.kv_events import Cleared, KvEvent, KvEventData, NumberedKvEvent, Stored, WorkerKvEvent
from dynamo.protocols.load import ForwardPass
from dynamo.runtime.push_router import PushRouter, RouterMode

Seat = tuple[int, int]
"""A worker, and one of its ranks."""
DEVICE, HOST = "device", "host_pinned"
Caches = dict[tuple[int, int, str], set[int]]
"""By worker, rank and tier: the blocks that are there."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, as far as a router may know it."""

    request_id: str
    tokens: int
    packed: bytes
    """Tokens hashes of its complete blocks."""
    session: str | None = None
    """The session that it is a turn of, if it has others."""
    priority: float = 0.0
    strict_priority: int = 0
    is_remote: bool = False
    """Whether another worker computed the prompt."""


DECODE_LEG = {"overlap_score_credit": 0.0, "assume_kv_reuse": False, "track_prefill_tokens": False}
"""How a worker is chosen for a prompt that is computed (serving-plane.md §4.11)."""


class Placement(Protocol):
    """Chooses workers."""

    @property
    def waiting(self) -> int:
        """How many requests it holds back."""
        ...

    def place(self, asked: Asked, now_s: float) -> Seat | None:
        """The seat of a request; None: it waits (`admit`). Raises `NotReady` where there is none."""
        ...

    def admit(self, now_s: float) -> list[tuple[str, Seat | None]]:
        """Requests that waited and may go, and where to; None: there is nobody any more."""
        ...

    def prefilled(self, request_id: str) -> None:
        """Its first token came."""
        ...

    def finish(self, request_id: str, output_tokens: int, now_s: float) -> None:
        """It was answered."""
        ...

    def apply(self, seat: Seat, event: KvEvent, tier: str = DEVICE) -> None:
        """A cache changed."""
        ...

    def observe(self, seat: Seat, passed: ForwardPass) -> None:
        """A step was made."""
        ...

    def join(self, worker: int, ranks: int, blocks: int, batch_tokens: int) -> None:
        """A worker is there."""
        ...

    def leave(self, worker: int) -> None:
        """It is not any more; what it had is placed again under the same id."""
        ...

    def deepest(self, packed: bytes, now_s: float) -> int:
        """How many of a prompt's blocks some worker holds, as far as it knows."""
        ...

    def validate(self, caches: Caches) -> None:
        """Raises `AssertionError` where it believes in other caches than there are, or in requests that are over."""
        ...


def told(seat: Seat, number: int, event: KvEvent, tier: str = DEVICE) -> WorkerKvEvent:
    """An event as routers hear it."""
    worker, rank = seat
    if isinstance(event, Cleared):
        return WorkerKvEvent(worker, tier, "worker", NumberedKvEvent(number, "cleared", rank))
    data = KvEventData(stored=event) if isinstance(event, Stored) else KvEventData(removed=event)
    return WorkerKvEvent(worker, tier, "worker", NumberedKvEvent(number, data, rank))


def held(index: KvIndex) -> Caches:
    """The keys that an index believes each cache to hold."""
    found: Caches = {}
    for worker_id, rank, tier, change in index.dump():
        believed = found.setdefault((worker_id, rank, TIERS[tier]), set())
        if isinstance(change, Stored):
            believed.update(block.block_hash for block in change.blocks)
        else:
            believed.difference_update(change.block_hashes)
    return found


def check_caches(index: KvIndex, caches: Caches) -> None:
    """Raises `AssertionError` where the index believes in other caches than there are.

    Of the host's memory it may know less: that tier gives up what was used least recently, and what follows a block that
    is gone is not found.
    """
    believed = held(index)
    for (worker, rank, tier), cache in caches.items():
        known = believed.pop((worker, rank, tier), set())
        is_right = known == cache if tier == DEVICE else known <= cache
        assert is_right, f"the index is wrong about worker {worker}, rank {rank}, {tier}"
    assert not any(believed.values()), "the index knows caches that are not there"


class KvPlacement:
    """The production router."""

    def __init__(self, config: RouterConfig, seed: int) -> None:
        self.router = Router(config, random.Random(seed))
        self._numbers = itertools.count(1)

    @property
    def waiting(self) -> int:
        return len(self.router.waiting)

    def place(self, asked: Asked, now_s: float) -> Seat | None:
        ask = Ask(
            asked.request_id,
            asked.packed,
            asked.tokens,
            session=asked.session,
            overrides=DECODE_LEG if asked.is_remote else None,
            priority_jump=asked.priority,
            strict_priority=asked.strict_priority,
        )
        decision = self.router.place(ask, now_s)
        return None if decision is None else (decision.worker_id, decision.dp_rank)

    def admit(self, now_s: float) -> list[tuple[str, Seat | None]]:
        return [
            (ask.request_id, (way.worker_id, way.dp_rank) if isinstance(way, Decision) else None)
            for ask, way in self.router.admit(now_s)
        ]

    def prefilled(self, request_id: str) -> None:
        self.router.prefilled(request_id)

    def finish(self, request_id: str, output_tokens: int, now_s: float) -> None:
        self.router.finish(request_id, now_s)
        self.router.pace.observe_output(output_tokens)

    def apply(self, seat: Seat, event: KvEvent, tier: str = DEVICE) -> None:
        self.router.apply(told(seat, next(self._numbers), event, tier))

    def observe(self, seat: Seat, passed: ForwardPass) -> None:
        step = passed.scheduled_requests
        self.router.pace.observe(
            step.sum_prefill_tokens, step.num_decode_requests, step.sum_decode_kv_tokens, passed.wall_time
        )

    def join(self, worker: int, ranks: int, blocks: int, batch_tokens: int) -> None:
        self.router.set_worker(WorkerFacts(worker, dp_size=ranks, kv_blocks=blocks, batch_tokens=batch_tokens))

    def leave(self, worker: int) -> None:
        self.router.remove_worker(worker)

    def deepest(self, packed: bytes, now_s: float) -> int:
        return max((sum(tiers) for tiers in self.router.overlaps(packed, now_s).values()), default=0)

    def validate(self, caches: Caches) -> None:
        self.router.validate()
        assert not len(self.router.active), "the router counts requests that are over"
        if self.router.config.use_kv_events:
            check_caches(self.router.index, caches)


class SimplePlacement:
    """The modes that do not look at caches, as the frontend has them."""

    def __init__(self, mode: RouterMode, seed: int) -> None:
        self._router = PushRouter(mode, seed=seed)
        self._workers: list[int] = []
        self._where: dict[str, Seat] = {}
        self._busy: dict[int, list[int]] = {}
        """Requests of each rank: a worker that is given no rank takes the least busy one."""

    @property
    def waiting(self) -> int:
        return 0

    def place(self, asked: Asked, now_s: float) -> Seat | None:
        worker = self._router.pick(now_s)
        if worker is None:
            raise NotReady("no worker is there")
        self._router.begin(worker)
        busy = self._busy[worker]
        rank = busy.index(min(busy))
        busy[rank] += 1
        self._where[asked.request_id] = seat = worker, rank
        return seat

    def admit(self, now_s: float) -> list[tuple[str, Seat | None]]:
        return []

    def prefilled(self, request_id: str) -> None:
        pass

    def finish(self, request_id: str, output_tokens: int, now_s: float) -> None:
        worker, rank = self._where.pop(request_id)
        self._busy[worker][rank] -= 1
        self._router.end(worker)

    def apply(self, seat: Seat, event: KvEvent, tier: str = DEVICE) -> None:
        pass

    def observe(self, seat: Seat, passed: ForwardPass) -> None:
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
        assert not self._where, "requests are counted that are over"
