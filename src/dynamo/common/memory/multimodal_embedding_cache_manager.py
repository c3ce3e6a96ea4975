"""MultimodalEmbeddingCacheManager: encoder outputs by content, least recently used first out."""

import logging
from collections import Counter, OrderedDict
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)


class CachedEmbedding(NamedTuple):
    """Encoder output of one image or video, a contiguous torch tensor, and the positions of its patches."""

    tensor: Any
    image_grid_thw: list[Any] | None = None
    video_grid_thw: list[Any] | None = None
    second_per_grid_ts: float | None = None
    video_timestamps: list[float] | None = None


class CacheMutation(NamedTuple):
    """Effect of a write: whether the entry is stored, and the keys that appeared and disappeared."""

    stored: bool
    added_keys: list[str]
    removed_keys: list[str]


class CacheReservation(NamedTuple):
    """Effect of a reservation: whether an entry of that size fits, and the keys that were removed for it."""

    admitted: bool
    removed_keys: list[str]


class MultimodalEmbeddingCacheManager:
    """LRU cache of embeddings, bounded in bytes. Not safe for several threads."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._entries: OrderedDict[str, CachedEmbedding] = OrderedDict()
        self._used = 0
        self._counts: Counter[str] = Counter()

    @property
    def stats(self) -> dict[str, Any]:
        """Entries, bytes, hits and misses since the start."""
        counts = {name: self._counts[name] for name in ("hits", "misses", "evictions")}
        return {
            **counts,
            "entries": len(self._entries),
            "current_bytes": self._used,
            "capacity_bytes": self._capacity,
            "utilization": self._used / self._capacity if self._capacity > 0 else 0,
            "hit_rate": counts["hits"] / max(1, counts["hits"] + counts["misses"]),
        }

    def get(self, key: str) -> CachedEmbedding | None:
        """Return an entry, which becomes the most recently used."""
        found = key in self._entries
        self._counts["hits" if found else "misses"] += 1
        if found:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def keys(self) -> list[str]:
        """Return the keys, the least recently used one first."""
        return list(self._entries)

    def make_room_for(self, key: str, size_bytes: int) -> CacheReservation:
        """Remove the entry of `key`, and the least recently used ones until `size_bytes` are free."""
        admitted = size_bytes <= self._capacity
        if not admitted:
            logger.warning("embedding of %d bytes exceeds the cache of %d bytes", size_bytes, self._capacity)
            return CacheReservation(admitted, [])
        self._remove(key)
        removed = []
        for oldest in self.keys():
            if self._used <= self._capacity - size_bytes:
                break
            self._remove(oldest)
            removed.append(oldest)
        self._counts["evictions"] += len(removed)
        return CacheReservation(admitted, removed)

    def set(self, key: str, entry: CachedEmbedding) -> bool:
        """Store an entry. Return whether it fits."""
        return self.set_with_delta(key, entry).stored

    def set_with_delta(self, key: str, entry: CachedEmbedding) -> CacheMutation:
        """Store an entry. Return whether it fits, and the keys that appeared and disappeared."""
        size = _size(entry)
        is_new = key not in self._entries
        reservation = self.make_room_for(key, size)
        if not reservation.admitted:
            return CacheMutation(False, [], [])
        self._entries[key] = entry
        self._used += size
        return CacheMutation(True, [key] if is_new else [], reservation.removed_keys)

    def _remove(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._used -= _size(entry)


def _size(entry: CachedEmbedding) -> int:
    assert entry.tensor.is_contiguous(), "Tensor must be contiguous: its size is that of its memory"
    return int(entry.tensor.element_size() * entry.tensor.numel())
