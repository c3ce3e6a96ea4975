"""IndexedRank: one rank's part of the index; a worker without data parallelism has rank 0 only. Pure; a part of `index`."""

from collections.abc import Iterable, Sequence
from itertools import repeat

from dynamo.kv_router.runs import Key, Run

SEGMENT_MAX = 1 << 17  # Keys per dictionary: resizing a larger one takes more than 5 ms.


class IndexedRank:
    """The runs that a rank holds, and the block keys that are its own."""

    __slots__ = ("bit", "count", "dp_rank", "has_lower", "named", "odd", "runs", "segments", "slot", "worker_id")

    def __init__(self, worker_id: int, dp_rank: int, slot: int) -> None:
        self.worker_id = worker_id
        self.dp_rank = dp_rank
        self.slot = slot
        self.bit = 1 << slot
        self.count = 0
        """Number of blocks it holds, in all tiers."""
        self.runs: dict[Run, None] = {}
        """Runs of which it holds at least one block."""
        self.named: dict[Run, int] = {}
        """Positions, as bits, of each run's blocks with a key of the rank's own; the others use the common key."""
        self.segments: list[dict[Key, Run]] = []
        """The rank's own keys and their runs; the last segment takes new ones."""
        self.odd: dict[Key, int] = {}
        """Positions of own keys that differ from the run's."""
        self.has_lower = False

    def find(self, key: Key) -> Run | None:
        """Return the run of a block named by an own key; None for any other key."""
        for segment in reversed(self.segments):
            run = segment.get(key)
            if run is not None:
                return run
        return None

    def knows_any(self, keys: Sequence[Key]) -> bool:
        """Return whether one of the keys is an own key."""
        return not all(segment.keys().isdisjoint(keys) for segment in self.segments)

    def learn(self, keys: Sequence[Key], run: Run, at: int) -> None:
        """Record own keys of consecutive blocks from position `at` of a run."""
        if not self.segments or len(self.segments[-1]) + len(keys) > SEGMENT_MAX:
            self.segments = [segment for segment in self.segments if segment] + [{}]
        self.segments[-1].update(zip(keys, repeat(run)))
        known = run.keys[at : at + len(keys)]
        if known != keys:
            pairs = enumerate(zip(keys, known, strict=True), at)
            self.odd.update((key, place) for place, (key, own) in pairs if key != own)
        self.named[run] = self.named.get(run, 0) | ((1 << len(keys)) - 1) << at

    def forget(self, run: Run, at: int, keys: Iterable[Key]) -> None:
        """Drop own keys of consecutive blocks from position `at` of a run."""
        gone = 0
        for key in keys:
            for segment in self.segments:
                if segment.pop(key, None) is not None:
                    break
            self.odd.pop(key, None)
            gone += 1
        left = self.named[run] & ~(((1 << gone) - 1) << at)
        if left:
            self.named[run] = left
        else:
            del self.named[run]
        if not self.named:
            self.segments = []

    def place(self, run: Run, key: Key) -> int:
        """Return the position in its run of the block named by an own key."""
        at = self.odd.get(key) if self.odd else None
        return run.place(key) if at is None else at

    def own_keys(self, run: Run) -> dict[int, Key]:
        """Return the own keys of a run by position. Scans all odd keys."""
        odd = {at: key for key, at in self.odd.items() if self.find(key) is run}
        named = self.named.get(run, 0)
        return {at: odd.get(at, key) for at, key in enumerate(run.keys) if named >> at & 1}
