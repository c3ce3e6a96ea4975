"""AsyncEncoderCache: encoder outputs, each computed once for all concurrent requests."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from dynamo.common.memory.multimodal_embedding_cache_manager import CachedEmbedding, MultimodalEmbeddingCacheManager


class AsyncEncoderCache:
    """Cache whose missing entries are computed; concurrent requests for one key share the computation."""

    def __init__(self, cache: MultimodalEmbeddingCacheManager) -> None:
        self._cache = cache
        self._in_flight: dict[str, asyncio.Future[CachedEmbedding]] = {}

    def get(self, key: str) -> CachedEmbedding | None:
        """Return an entry; None if it is not in the cache."""
        return self._cache.get(key)

    async def get_or_compute(self, key: str, compute_fn: Callable[[], Awaitable[CachedEmbedding]]) -> CachedEmbedding:
        """Return an entry, computed if it is not in the cache. A failure is raised to all that wait for it."""
        entry = self._cache.get(key)
        if entry is None:
            if key not in self._in_flight:
                self._in_flight[key] = asyncio.ensure_future(self._compute(key, compute_fn))
            # The computation outlives a cancelled request: others may wait for it.
            entry = await asyncio.shield(self._in_flight[key])
        return entry

    async def _compute(self, key: str, compute_fn: Callable[[], Awaitable[CachedEmbedding]]) -> CachedEmbedding:
        try:
            entry = await compute_fn()
            self._cache.set(key, entry)
            return entry
        finally:
            del self._in_flight[key]

    @property
    def stats(self) -> dict[str, Any]:
        """Statistics of the cache, and the number of computations in progress."""
        return {**self._cache.stats, "in_flight": len(self._in_flight)}
