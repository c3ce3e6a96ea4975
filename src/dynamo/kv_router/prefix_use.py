"""PrefixUse: how many of the recent requests have the same cached beginning. Pure; a part of the policy `balanced`.

A beginning is identified by the last block that some worker has, and by its place. Requests with parts of their own behind it, such as the
turns of a session, count for the longest beginning that is cached.
"""

from math import exp, expm1

Beginning = tuple[int, bytes]
"""Number of blocks, and hash of the last one."""

BEGINNINGS_MAX = 8192
"""Beginnings that are counted; the least recently used is dropped."""
RANK_REQUESTS = 25.0
"""Requests for each rank that the count covers: an older one weighs 1/e of a new one."""


class PrefixUse:
    """Decaying counts of requests by their cached beginning."""

    def __init__(self) -> None:
        self._counts: dict[Beginning, tuple[float, int]] = {}
        """By beginning, least recently used first: the count at its last request, and the number of that request."""
        self._requests = 0

    def note(self, beginning: Beginning | None, ranks: int) -> None:
        """Count a request; None if no block of it is cached."""
        self._requests += 1
        if beginning is None:
            return
        self._counts[beginning] = self._count(beginning, ranks, forget=True) + 1.0, self._requests
        if len(self._counts) > BEGINNINGS_MAX:
            del self._counts[next(iter(self._counts))]

    def share(self, beginning: Beginning, ranks: int) -> float:
        """Return the share of recent requests that have the beginning, from 0 to 1."""
        count = self._count(beginning, ranks)
        if not count:
            return 0.0
        memory = RANK_REQUESTS * ranks
        return (
            count * expm1(-1.0 / memory) / expm1(-self._requests / memory)
        )  # All requests together count a geometric series.

    def _count(self, beginning: Beginning, ranks: int, *, forget: bool = False) -> float:
        found = self._counts.pop(beginning, None) if forget else self._counts.get(beginning)
        if found is None:
            return 0.0
        count, at = found
        return count * exp((at - self._requests) / (RANK_REQUESTS * ranks))
