"""IndexDump: events that rebuild a rank's blocks from empty. Pure; a part of `index`."""

import itertools
from collections.abc import Callable, Iterator

from dynamo.kv_router.ranks import IndexedRank
from dynamo.kv_router.runs import TIERS, WIDTH, Key, Run, held_bits, unpack
from dynamo.protocols.kv_events import Removed, Stored, StoredBlock

Find = Callable[[Key], tuple[Run | None, int]]
"""Maps a rank's key to the run and position of its block; no run where the rank holds no such block."""


def dump_rank(rank: IndexedRank, find: Find) -> Iterator[tuple[int, Stored | Removed]]:
    """Yield tier and event, for all tiers."""
    names = _Names(rank, find)
    for tier in range(len(TIERS)):
        for event in _dump_tier(rank, tier, names):
            yield tier, event


class _Names:
    """A rank's block keys; blocks that it does not hold receive a key that it uses for nothing else."""

    def __init__(self, rank: IndexedRank, find: Find) -> None:
        self._rank = rank
        self._find = find
        self._odd = {(run, at): key for key, at in rank.odd.items() if (run := rank.find(key)) is not None}
        self._spare = (key for key in itertools.count(1) if find(key)[0] is None)

    def of(self, run: Run, count: int, held: int) -> list[Key]:
        """Return the first `count` keys of a run, of which the positions in `held` are held."""
        if run.is_common and held == (1 << count) - 1 and run not in self._rank.named:
            return run.keys[:count]
        return [self._one(run, at) for at in range(count)]

    def _one(self, run: Run, at: int) -> Key:
        key = self._odd.get((run, at))
        if key is not None:
            return key
        key = run.keys[at]
        return key if self._find(key) == (run, at) else next(self._spare)


def _dump_tier(rank: IndexedRank, tier: int, names: _Names) -> Iterator[Stored | Removed]:
    needed: dict[Run, int] = {}
    for run in rank.runs:
        until = held_bits(run, rank.slot, tier).bit_length()
        above: Run | None = run
        while above is not None and needed.get(above, 0) < until:
            needed[above] = until
            until, above = above.anchor + 1, above.parent
    missing: list[Key] = []
    emitted: dict[Run, list[Key]] = {}
    for run in needed:
        chain: list[Run] = []
        above = run
        while above is not None and above not in emitted:
            chain.append(above)
            above = above.parent
        for one in reversed(chain):
            held = held_bits(one, rank.slot, tier)
            keys = emitted[one] = names.of(one, needed[one], held)
            if held != (1 << len(keys)) - 1:
                missing += [key for at, key in enumerate(keys) if not held >> at & 1]
            parent = None if one.parent is None else emitted[one.parent][one.anchor]
            hashes = unpack(one.blocks[: len(keys) * WIDTH])
            yield Stored(parent, None, [StoredBlock(*pair) for pair in zip(keys, hashes, strict=True)])
    if missing:
        yield Removed(missing)
