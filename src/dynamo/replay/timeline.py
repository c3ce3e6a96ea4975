"""Timeline: activity of each place of the cluster, aggregated over intervals."""

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

    def hold(self, place: int, levels: tuple[float, float, float], from_ms: float, to_ms: float) -> None:
        """Add levels that were constant between two times."""
        tracks, interval = self._track(place).levels, self.interval_ms
        first, last = int(from_ms // interval), int(to_ms // interval)
        running, waiting, used = tracks
        if len(running) <= last:
            for track in tracks:
                track.extend([0.0] * (last + 1 - len(track)))
        if first == last:  # Most calls: no loop.
            part = (to_ms - from_ms) / interval
            running[first] += levels[0] * part
            waiting[first] += levels[1] * part
            used[first] += levels[2] * part
            return
        for at in range(first, last + 1):
            part = (min(to_ms, (at + 1) * interval) - max(from_ms, at * interval)) / interval
            for track, level in zip(tracks, levels, strict=True):
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
