"""RecentRuns and RootRuns: the tables of an index's runs, in parts, because a large dictionary is resized in one go.

The resizing of a dictionary of a million entries takes 100 ms, in which a router serves nothing; that of a part takes less than
one. Pure; parts of `index`.
"""

from collections import deque
from collections.abc import Iterator

from dynamo.kv_router.runs import NO_RUNS, Run

SEGMENT_MAX = 1 << 13
"""Runs per segment, and about the runs per part of `RootRuns` in a full index of short prompts."""
MERGES = 4
"""Segments merged when a segment is full: more than are filled meanwhile, and a few milliseconds at most."""
PARTS = 256


class RecentRuns:
    """A set of runs in the order of their last use, in segments; each run refers to its own (`Run.used_with`)."""

    __slots__ = ("_last", "_segments")

    def __init__(self) -> None:
        self._last: dict[Run, None] = {}
        self._segments: deque[dict[Run, None]] = deque([self._last])

    def __len__(self) -> int:
        return sum(map(len, self._segments))

    def __iter__(self) -> Iterator[Run]:
        for segment in self._segments:
            yield from segment

    def __contains__(self, run: Run) -> bool:
        return run in run.used_with

    def add(self, run: Run) -> None:
        """Add a run as the most recently used."""
        last = self._last
        if len(last) >= SEGMENT_MAX:
            self._merge()
            last = self._last = {}
            self._segments.append(last)
        last[run] = None
        run.used_with = last

    def touch(self, run: Run) -> None:
        """Make a run of the set the most recently used."""
        del run.used_with[run]
        self.add(run)

    def remove(self, run: Run) -> None:
        """Remove a run of the set. Raises `KeyError` for another one."""
        del run.used_with[run]
        run.used_with = NO_RUNS

    def _merge(self) -> None:
        """Merge neighbouring segments that are small by now: a dictionary keeps the memory of removed entries."""
        kept: deque[dict[Run, None]] = deque()
        merges = MERGES
        for segment in self._segments:
            if merges and kept and len(kept[-1]) + len(segment) <= SEGMENT_MAX // 2:
                merges -= 1
                kept[-1] = {**kept[-1], **segment}
                for run in kept[-1]:
                    run.used_with = kept[-1]
            else:
                kept.append(segment)
        self._segments = kept

    def oldest(self) -> Run:
        """Return the least recently used run. Raises `StopIteration` if there is none."""
        while not self._segments[0] and len(self._segments) > 1:
            self._segments.popleft()
        return next(iter(self._segments[0]))


class RootRuns:
    """Runs by the first block of a prompt, in parts by the last bits of its hash."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[dict[bytes, Run]] = [{} for _ in range(PARTS)]

    def get(self, first: bytes) -> Run | None:
        """Return the run that begins with this block; None where there is none, or for an empty prompt."""
        return self._parts[first[-1]].get(first) if first else None

    def add(self, first: bytes, run: Run) -> None:
        """Add the run that begins with this block."""
        self._parts[first[-1]][first] = run

    def remove(self, first: bytes) -> None:
        """Remove the run that begins with this block. Raises `KeyError` if there is none."""
        del self._parts[first[-1]][first]
