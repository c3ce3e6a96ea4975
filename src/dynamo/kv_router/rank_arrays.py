"""RankArrays: the routing decision over many ranks, on one array element for each slot. Pure; a part of `router`.

A decision over a few ranks is fastest on dictionaries and lists. From `MANY_RANKS` on the same formulas (`cost.terms`,
`balanced.added_s`) are evaluated on arrays, in a few vector operations whatever the number of ranks. The load is kept in
`array.array`, of which numpy sees the memory, so that nothing is converted.

Import this module only for many ranks: numpy takes a tenth of a second to import, and 20 MB.
"""

import random
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dynamo.kv_router.balanced import Pace, added_s
from dynamo.kv_router.config import CostWeights
from dynamo.kv_router.cost import NEVER, Prompt, RankLoads, terms
from dynamo.kv_router.decision import Rank
from dynamo.kv_router.hicache import Runs, held_from
from dynamo.kv_router.index import KvIndex
from dynamo.kv_router.queue import PolicyClass
from dynamo.kv_router.runs import slots_of

Floats = npt.NDArray[np.float64]
Slots = npt.NDArray[np.intp]

ALL = cast(int, slice(None))
"""All slots, as the `slot` of a formula."""
FEW = 8
"""Ranks of a set up to which its bits are visited one by one."""


class BlockCounts(Mapping[int, int]):
    """Blocks by slot, as an array; a slot with 0 is omitted from the mapping."""

    __slots__ = ("counts",)

    def __init__(self, counts: Floats) -> None:
        self.counts = counts

    def get(self, slot: int, default: Any = 0) -> Any:
        """Return the blocks of a slot; for `ALL`, the array."""
        found = self.counts[slot]
        return int(found) if isinstance(slot, int) else found

    def __getitem__(self, slot: int) -> int:
        return int(self.counts[slot])

    def __iter__(self) -> Iterator[int]:
        return iter(self.counts.nonzero()[0].tolist())

    def __len__(self) -> int:
        return int(np.count_nonzero(self.counts))


class NoBlocks(Mapping[int, int]):
    """No blocks on any slot."""

    __slots__ = ()

    def get(self, slot: int, default: Any = 0) -> Any:
        """Return 0, also for `ALL`."""
        return 0

    def __getitem__(self, slot: int) -> int:
        raise KeyError(slot)

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 0


NO_BLOCKS = NoBlocks()


class ArrayPrompt(Prompt):
    """A prompt with its overlaps in arrays."""

    def deepest(self, slots: Sequence[int] | None = None) -> int:
        """Return the most blocks on the device of one of the slots, by default of all."""
        if not isinstance(self.device, BlockCounts):
            return 0
        counts = self.device.counts
        return int((counts if slots is None else counts[np.asarray(slots, np.intp)]).max(initial=0))


class RankArrays:
    """Arrays by slot that follow the router's ranks and its index."""

    def __init__(self, slots: Mapping[Rank, int], index: KvIndex) -> None:
        """`slots`: the slot of each rank, maintained by the router, which calls `changed` after each change."""
        self._slots = slots
        self._index = index
        self._joined = -1
        self._index_slots: Slots = np.empty(0, np.intp)
        """Index slot of each slot, or one without blocks."""
        self._size = 0
        """Number of slots, including free ones."""
        self._present: Slots | None = None
        self._is_in_order = False
        """Whether the present slots are 0, 1, 2 and so on."""
        self._limits: dict[str, Floats] = {}
        """Active prefill tokens above which each slot is busy, by policy class."""
        self._taints: dict[frozenset[str], list[int]] = {}
        """Slots by the taints of their workers."""

    def changed(self, size: int) -> None:
        """Note that ranks came or left, or changed; there are now `size` slots."""
        self._size = size
        self._present = None
        self._joined = -1
        self._limits.clear()
        self._taints.clear()

    @property
    def present(self) -> Sequence[int]:
        """Return the slots of all ranks, in the order in which the router visits them."""
        if self._present is None:
            self._present = np.fromiter(self._slots.values(), np.intp, len(self._slots))
            self._present.flags.writeable = False  # Shared by the snapshots of many decisions.
            self._is_in_order = bool((self._present == np.arange(len(self._present))).all())
        return cast(Sequence[int], self._present)

    def without(self, filtered: Mapping[int, str]) -> Sequence[int]:
        """Return the slots of all ranks but these."""
        present = np.asarray(self.present)
        return cast(
            Sequence[int], present[np.isin(present, np.fromiter(filtered, np.intp, len(filtered)), invert=True)]
        )

    def has_capacity(
        self, policy: PolicyClass, slots: Sequence[int], tokens: "array[Any]", batch_tokens: Callable[[int], int | None]
    ) -> bool:
        """Return whether one of the slots is not busy; `tokens`: active prefill tokens, `batch_tokens`: of a slot."""
        limits = self._limits.get(policy.name)
        if limits is None:
            limits = self._limits[policy.name] = np.full(len(tokens), NEVER)
            for slot in self._slots.values():
                limits[slot] = policy.limit(batch_tokens(slot))
        return bool((np.asarray(tokens) <= limits)[slots].any())

    # Overlaps.

    def cached(self, depths: Sequence[tuple[int, int]]) -> "BlockCounts":
        """Return the blocks by slot of pairs (blocks, index slots as bits)."""
        width = len(self._index.rank_keys)
        if self._joined != self._index.joined:
            self._follow_index(width)
        found = _spread(depths, width + 1)
        return BlockCounts(found[self._index_slots])

    def _follow_index(self, empty: int) -> None:
        """Look up the index slot of each slot; `empty`, which has no blocks, where the index does not have the rank."""
        found = np.full(self._size, empty, np.intp)
        slot_of = self._index.slots()
        for rank, slot in self._slots.items():
            found[slot] = slot_of.get(rank, empty)
        self._index_slots, self._joined = found, self._index.joined

    def counts(self, held: Mapping[int, int]) -> "BlockCounts":
        """Return the same blocks by slot."""
        found = np.zeros(self._size)
        for slot, blocks in held.items():
            found[slot] = blocks
        return BlockCounts(found)

    def prompt(
        self,
        tokens: int,
        blocks: int,
        device: "BlockCounts",
        host: Mapping[int, int],
        disk: Mapping[int, int],
        shared: Runs,
        expected: Sequence[tuple[int, int]],
        active: Sequence[tuple[int, int]],
        *,
        predicts_active: bool,
    ) -> Prompt:
        """Return a prompt; `expected` and `active` are pairs (blocks, slots as bits), `shared` runs of the shared cache."""
        occupied = _spread(active, self._size) if active else None
        on_device = device.counts
        if expected:
            np.maximum(on_device, _spread(expected, self._size), out=on_device)
        if occupied is not None and predicts_active:
            np.maximum(on_device, occupied, out=on_device)
        on_host = self.counts(host) if host else NO_BLOCKS
        on_disk = self.counts(disk) if disk else NO_BLOCKS
        beyond: Mapping[int, int] = NO_BLOCKS
        if shared:
            levels, places = np.unique(on_device + on_host.get(ALL) + on_disk.get(ALL), return_inverse=True)
            beyond = BlockCounts(np.array([held_from(shared, int(level)) for level in levels], np.float64)[places])
        return ArrayPrompt(
            tokens,
            blocks,
            device,
            on_host,
            on_disk,
            beyond,
            NO_BLOCKS if occupied is None else BlockCounts(occupied),
        )

    # Costs.

    def costs(
        self, slots: Sequence[int], load: RankLoads, prompt: Prompt, weights: CostWeights, block_size: int
    ) -> list[float]:
        """Return what `cost.costs` returns."""
        loads = _as_arrays(load)
        tokens = np.asarray(loads.prefill_tokens)
        least = float(tokens[slots].min()) if weights.overlap_score_credit_decay else 0.0
        return self._at(slots, terms(ALL, loads, prompt, weights, block_size, least).cost)

    def balanced_costs(
        self,
        slots: Sequence[int],
        load: RankLoads,
        prompt: Prompt,
        weights: CostWeights,
        pace: Pace,
        block_size: int,
        expected_output_tokens: int | None,
        capacity: Sequence[float],
        slowness: Sequence[float] | None = None,
        far: Sequence[float] | None = None,
    ) -> list[float]:
        """Return what `balanced.balanced_costs` returns."""
        limits, output = cast(Sequence[float], np.asarray(capacity)), pace.output_of(expected_output_tokens)
        outside = None if far is None else cast(Sequence[float], np.asarray(far))
        found: Any = added_s(ALL, _as_arrays(load), prompt, weights, pace, block_size, output, limits, outside)
        return self._at(slots, found if slowness is None else found * np.asarray(slowness))

    def scaled(
        self,
        slots: Sequence[int],
        found: Sequence[float],
        factor: Callable[[frozenset[str]], float],
        taints_of: Callable[[int], frozenset[str]],
    ) -> Sequence[float]:
        """Return the costs of the slots times the factor of their taints."""
        if not self._taints:
            for slot in self._slots.values():
                self._taints.setdefault(taints_of(slot), []).append(slot)
        factors = np.ones(self._size)
        for taints, members in self._taints.items():
            factors[members] = factor(taints)
        return cast(Sequence[float], np.asarray(found) * factors[slots])

    def computing(self, tokens: Sequence[float]) -> int:
        """Return the number of slots with active prefill tokens."""
        return int(np.count_nonzero(np.asarray(tokens) > 0))

    def choose(self, found: Sequence[float], temperature: float, rng: random.Random) -> int:
        """Choose as `cost.choose` does."""
        costs = np.asarray(found)
        best = costs.min()
        if best == NEVER:
            raise ValueError("no eligible rank")
        if temperature <= 0.0:
            ties = (costs == best).nonzero()[0]
            return int(ties[0] if len(ties) == 1 else rng.choice(ties))
        finite = costs != NEVER
        worst = costs[finite].max()
        if worst == best:
            return int(rng.choice(finite.nonzero()[0]))
        odds = np.exp(-(costs - best) / (worst - best) / temperature).cumsum()
        return min(int(odds.searchsorted(rng.random() * odds[-1], "right")), len(costs) - 1)

    def _at(self, slots: Sequence[int], found: Any) -> list[float]:
        """Return the elements of the slots. An array, which serves the router as a list does."""
        is_whole = cast(Any, slots) is self._present and self._is_in_order and len(slots) == len(found)
        return cast(list[float], found if is_whole else found[slots])


def _as_arrays(load: RankLoads) -> RankLoads:
    """Return the same loads as arrays, on the same memory."""
    loads = (load.prefill_tokens, load.blocks, load.requests, load.contexts, load.recent)
    found = RankLoads(*(cast(Any, np.asarray(one)) for one in loads))
    found.recent_scale = load.recent_scale
    return found


def _spread(depths: Sequence[tuple[int, int]], size: int) -> Floats:
    """Return an array of `size` with the blocks of each pair (blocks, places as bits) at its places."""
    found = np.zeros(size)
    rows: list[bytes] = []
    levels: list[int] = []
    width = -(-size // 8)
    for depth, places in depths:
        if places.bit_count() <= FEW:
            for place in slots_of(places):
                found[place] = depth
        else:
            rows.append(places.to_bytes(width, "little"))
            levels.append(depth)
    if rows:  # Each place is in one row at most, so that the sum over the rows is its level.
        bits = np.unpackbits(np.frombuffer(b"".join(rows), np.uint8), bitorder="little").reshape(len(rows), width * 8)
        found += np.einsum("i,ij->j", np.array(levels, np.int32), bits)[:size]
    return found
