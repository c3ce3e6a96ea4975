"""Timeline: activity of each place of the cluster, aggregated over intervals."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

LEVELS = ("running", "waiting", "used_blocks")
"""Levels, reported as means over time."""
COUNTS = ("admitted_tokens", "reused_tokens", "output_tokens", "prefill_tokens")
"""Event counts, reported as sums."""


@dataclass(slots=True)
class Track:
    """The values of one place."""

    levels: list[list[float]] = field(default_factory=lambda: [[] for _ in LEVELS])
    counts: list[list[int]] = field(default_factory=lambda: [[] for _ in COUNTS])


@dataclass(slots=True)
class Timeline:
    """The values of all places."""

    interval_ms: float
    tracks: list[Track] = field(init=False, default_factory=list)

    @property
    def places(self) -> int:
        """Return the number of places with values."""
        return len(self.tracks)

    def _track(self, place: int) -> Track:
        tracks = self.tracks
        while len(tracks) <= place:
            tracks.append(Track())
        return tracks[place]

    def hold(self, place: int, running: float, waiting: float, used: float, from_ms: float, to_ms: float) -> None:
        """Add levels that were constant between two times."""
        interval, tracks = self.interval_ms, self.tracks
        levels = tracks[place].levels if place < len(tracks) else self._track(place).levels
        first, last = int(from_ms // interval), int(to_ms // interval)
        if len(levels[0]) <= last:
            for track in levels:
                track.extend([0.0] * (last + 1 - len(track)))
        if first == last:  # Most calls: no loop.
            part = (to_ms - from_ms) / interval
            levels[0][first] += running * part
            if waiting:
                levels[1][first] += waiting * part
            levels[2][first] += used * part
            return
        for at in range(first, last + 1):
            part = (min(to_ms, (at + 1) * interval) - max(from_ms, at * interval)) / interval
            for track, level in zip(levels, (running, waiting, used), strict=True):
                track[at] += level * part

    def count(self, place: int, counts: tuple[int, int, int, int], at_ms: float) -> None:
        """Add counts at a time."""
        tracks = self._track(place).counts
        at = int(at_ms // self.interval_ms)
        admitted, reused, output, prefill = tracks
        if len(admitted) <= at:
            for track in tracks:
                track.extend([0] * (at + 1 - len(track)))
        admitted[at] += counts[0]
        reused[at] += counts[1]
        output[at] += counts[2]
        prefill[at] += counts[3]

    def count_steps(self, place: int, tokens: int, ends: Sequence[float]) -> None:
        """Add the output tokens of steps that each generate `tokens` and end at these times, in order."""
        first, last = int(ends[0] // self.interval_ms), int(ends[-1] // self.interval_ms)
        done = 0
        for at in range(first, last):
            until = bisect_left(ends, (at + 1) * self.interval_ms)
            self.count(place, (0, 0, (until - done) * tokens, 0), at * self.interval_ms)
            done = until
        self.count(place, (0, 0, (len(ends) - done) * tokens, 0), ends[-1])

    @property
    def length(self) -> int:
        """Return the number of intervals."""
        return max((max(len(track.levels[0]), len(track.counts[0])) for track in self.tracks), default=0)

    def level(self, name: str, place: int) -> list[float]:
        """Return a level of a place by interval."""
        found = self._track(place).levels[LEVELS.index(name)]
        return found + [0.0] * (self.length - len(found))

    def counted(self, name: str, place: int) -> list[int]:
        """Return a count of a place by interval."""
        found = self._track(place).counts[COUNTS.index(name)]
        return found + [0] * (self.length - len(found))
