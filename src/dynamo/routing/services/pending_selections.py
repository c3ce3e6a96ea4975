"""PendingSelections: selections that can still be reserved, bounded in time, number and bytes."""

from collections import OrderedDict
from dataclasses import dataclass

from dynamo.kv_router.router import RouteRequest
from dynamo.routing.services.indexed_models import Place

TTL_S, ENTRIES_MAX, BYTES_MAX = 120.0, 4096, 256 << 20  # Upstream's.
ENTRY_BYTES = 256
"""Bytes of a selection in addition to its block hashes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionCacheConfig:
    """Bounds of the selections that can still be reserved."""

    ttl_secs: float | None = None
    max_entries: int | None = None
    max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class PendingSelection:
    """Selection that can still be reserved, until `until` (seconds of the service's clock)."""

    route_request: RouteRequest
    rank: tuple[int, int]
    until: float

    @property
    def size(self) -> int:
        """Bytes counted against the limit."""
        return len(self.route_request.blocks) + ENTRY_BYTES


class PendingSelections:
    """Selections by id and model; the oldest are removed when a limit is reached."""

    def __init__(self, config: SelectionCacheConfig | None = None) -> None:
        config = config or SelectionCacheConfig()
        self._ttl_s = TTL_S if config.ttl_secs is None else config.ttl_secs
        self._entries_max = ENTRIES_MAX if config.max_entries is None else config.max_entries
        self._bytes_max = BYTES_MAX if config.max_bytes is None else config.max_bytes
        self._bytes = 0
        self._held: OrderedDict[tuple[str, Place], PendingSelection] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, selection_id: str, place: Place, rank: tuple[int, int], request: RouteRequest, now: float) -> None:
        """Store a selection in place of an earlier one of the same id."""
        self._expire(now)
        self.remove(selection_id, place)
        pending = PendingSelection(request, rank, now + self._ttl_s)
        self._held[selection_id, place] = pending
        self._bytes += pending.size
        while self._held and (len(self._held) > self._entries_max or self._bytes > self._bytes_max):
            self.remove(*next(iter(self._held)))

    def find(self, selection_id: str, place: Place, now: float) -> PendingSelection | None:
        """Return a selection that has not expired."""
        self._expire(now)
        return self._held.get((selection_id, place))

    def remove(self, selection_id: str, place: Place) -> None:
        """Remove a selection, if it is stored."""
        pending = self._held.pop((selection_id, place), None)
        if pending is not None:
            self._bytes -= pending.size

    def _expire(self, now: float) -> None:
        while self._held and next(iter(self._held.values())).until <= now:
            self.remove(*next(iter(self._held)))
