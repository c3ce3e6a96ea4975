"""WorkerSlots: the workers of one set, and a slot for each of their ranks. Pure; a part of `router`.

A slot is the position of a rank in the router's arrays. The slot of a removed rank is given to the next rank that is added.
"""

import math
from array import array
from typing import TYPE_CHECKING

from dynamo.kv_router.decision import Rank, RouteRequest, WorkerFacts, ranks_of
from dynamo.kv_router.index import KvIndex

if TYPE_CHECKING:
    from dynamo.kv_router.rank_arrays import RankArrays


class WorkerSlots:
    """Workers by id, ranks by slot and slots by rank."""

    def __init__(self, index: KvIndex, many_ranks: int, *, limits_blocks: bool) -> None:
        """`many_ranks`: number of ranks from which `arrays` are kept. `limits_blocks`: whether capacities are finite."""
        self.workers: dict[int, WorkerFacts] = {}
        self.ranks: dict[int, Rank] = {}
        """By slot. A snapshot of a decision may refer to it, see `share_ranks`."""
        self.present: tuple[int, ...] = ()
        """The slots in `ranks`, in its order."""
        self.slots: dict[Rank, int] = {}
        self.capacity = array("d")
        """Cache capacity of each slot in blocks; infinite where it is unknown or not limited."""
        self.arrays: RankArrays | None = None
        """State by slot for decisions over many ranks; None until there are `many_ranks`."""
        self._index = index
        self._many_ranks = many_ranks
        self._limits_blocks = limits_blocks
        self._free: list[int] = []
        self._is_shared = False
        """Whether a snapshot refers to `ranks`, which is copied before the next change."""

    def removed_by(self, facts: WorkerFacts) -> list[Rank]:
        """Return the ranks that a worker no longer has once `facts` are set."""
        before = self.workers.get(facts.worker_id)
        if before is None:
            return []
        ranks = ranks_of(facts)
        return [rank for rank in ranks_of(before) if rank not in ranks]

    def set_worker(self, facts: WorkerFacts) -> list[int]:
        """Add a worker or update its facts; return its slots. The ranks of `removed_by` are removed first, by `release`."""
        self._copy_shared_ranks()
        self.workers[facts.worker_id] = facts
        capacity = (facts.kv_blocks if self._limits_blocks else None) or math.inf
        found: list[int] = []
        for rank in ranks_of(facts):
            slot = self.slots.get(rank)
            if slot is None:
                slot = self._free.pop() if self._free else len(self.ranks)
                self.slots[rank] = slot
                self.ranks[slot] = rank
                self.capacity.extend([math.inf] * (slot + 1 - len(self.capacity)))
            self.capacity[slot] = capacity
            found.append(slot)
        self._follow_ranks()
        return found

    def release(self, rank: Rank) -> None:
        """Remove a rank; its slot becomes free."""
        self._copy_shared_ranks()
        slot = self.slots.pop(rank)
        del self.ranks[slot]
        self._free.append(slot)
        self._follow_ranks()

    def share_ranks(self) -> dict[int, Rank]:
        """Return the ranks by slot, in a dictionary that does not change any more."""
        self._is_shared = True
        return self.ranks

    def _copy_shared_ranks(self) -> None:
        if self._is_shared:
            self.ranks, self._is_shared = self.ranks.copy(), False

    def _follow_ranks(self) -> None:
        """Update what depends on the ranks; keep arrays from many ranks on."""
        self.present = tuple(self.ranks)
        if self.arrays is None and len(self.ranks) >= self._many_ranks:
            from dynamo.kv_router.rank_arrays import RankArrays

            self.arrays = RankArrays(self.slots, self._index)
        if self.arrays is not None:
            self.arrays.changed(len(self.capacity))

    def slots_of(self, worker_id: int) -> list[int]:
        """Return the slots of a worker."""
        return [self.slots[rank] for rank in ranks_of(self.workers[worker_id])]

    def taints_of(self, slot: int) -> frozenset[str]:
        """Return the taints of a slot's worker."""
        return self.workers[self.ranks[slot][0]].taints

    def batch_tokens_of(self, slot: int) -> int | None:
        """Return the maximum prompt tokens per batch of a slot's worker; None if unknown."""
        return self.workers[self.ranks[slot][0]].batch_tokens

    def is_far(self, route_request: RouteRequest, slot: int) -> bool:
        """Return whether a slot is out of the transfer domain of the worker that computes the prompt."""
        near = route_request.near_taint
        return near is not None and near not in self.taints_of(slot)

    def validate(self) -> None:
        """Raise `AssertionError` if ranks, slots and workers disagree."""
        assert len(self.slots) == len(self.ranks), "a rank has two slots"
        assert self.present == tuple(self.ranks), "the present slots differ from the ranks"
        for rank, slot in self.slots.items():
            assert self.ranks[slot] == rank, "a slot belongs to another rank"
            assert rank[0] in self.workers, "a removed worker has a slot"
