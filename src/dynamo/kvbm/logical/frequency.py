"""Frequency: approximate request counts of blocks in bounded memory. Pure."""

ROWS = 4
COUNT_MAX = 15  # The 4-bit counters of TinyLFU; higher counts add no information.
AGE_AFTER = 10  # Observations per column after which all counts are halved, so that old popularity fades.
_MIX = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
_HALVES = bytes(value // 2 for value in range(256))


class Sketch:
    """Count-min sketch of TinyLFU: apart from aging, estimates are never too low."""

    def __init__(self, blocks: int) -> None:
        self._bits = max(6, blocks.bit_length())
        self._rows = [bytearray(1 << self._bits) for _ in range(ROWS)]
        self._left = AGE_AFTER << self._bits

    def observe(self, sequence_hash: int) -> None:
        """Count one request for a block."""
        for row, place in zip(self._rows, self._places(sequence_hash), strict=True):
            if row[place] < COUNT_MAX:
                row[place] += 1
        self._left -= 1
        if self._left == 0:
            self._left = AGE_AFTER << self._bits
            self._rows = [row.translate(_HALVES) for row in self._rows]

    def estimate(self, sequence_hash: int) -> int:
        """Return the recent number of requests for a block."""
        return min(row[place] for row, place in zip(self._rows, self._places(sequence_hash), strict=True))

    def _places(self, sequence_hash: int) -> list[int]:
        shift = 64 - self._bits
        return [(sequence_hash * factor & (1 << 64) - 1) >> shift for factor in _MIX]


class RepeatFilter:
    """Filter that passes blocks seen at least twice recently: disks wear, and most blocks are never requested again.

    A count begins at 1, doubles with each repetition and loses 1 with each `decay`.
    """

    ENOUGH = 2
    ENTRIES_MAX = 1 << 18  # About 20 MB; beyond it, counts decay faster.

    def __init__(self, decay_s: float = 60.0, entries_max: int = ENTRIES_MAX) -> None:
        self._counts: dict[int, int] = {}
        self._decay_s = decay_s
        self._entries_max = entries_max
        self._decayed_at: float | None = None

    def __len__(self) -> int:
        return len(self._counts)

    def passes(self, sequence_hash: int, now: float) -> bool:
        """Count one more request to keep the block; return False for its first request."""
        if self._decayed_at is None:
            self._decayed_at = now
        elif now - self._decayed_at >= self._decay_s:
            self._decayed_at = now
            self.decay()
        while len(self._counts) >= self._entries_max and sequence_hash not in self._counts:
            self.decay()
        count = self._counts.get(sequence_hash, 0)
        count = min(count * 2, 1 << 20) if count else 1
        self._counts[sequence_hash] = count
        return count >= self.ENOUGH

    def decay(self) -> None:
        """Decrease all counts by one."""
        self._counts = {one: count - 1 for one, count in self._counts.items() if count > 1}
