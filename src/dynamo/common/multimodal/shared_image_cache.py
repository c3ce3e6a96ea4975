"""SharedImageCache: encoded images in a Redis cluster, for all workers; a failure of the cluster fails no request."""

import hashlib
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from typing import Any

from dynamo.core.config import read_bool, setting
from dynamo.core.errors import ConfigError

try:
    from redis.asyncio.cluster import RedisCluster
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisClusterException, RedisError

    ERRORS: tuple[type[Exception], ...] = (OSError, RedisError, RedisClusterException)
except ImportError:  # Checked where it is used: few deployments have this cache.
    RedisCluster, ERRORS = None, (OSError,)

logger = logging.getLogger(__name__)

_ENABLED_ENV = "DYN_MM_SHARED_IMAGE_CACHE_ENABLED"
_URL_ENV = "DYN_MM_SHARED_IMAGE_CACHE_URL"
_TTL_ENV = "DYN_MM_SHARED_IMAGE_CACHE_TTL_SECS"
_CONNECT_TIMEOUT_ENV = "DYN_MM_SHARED_IMAGE_CACHE_CONNECT_TIMEOUT_SECS"
_IO_TIMEOUT_ENV = "DYN_MM_SHARED_IMAGE_CACHE_IO_TIMEOUT_SECS"
TTL_S = 3600
CONNECT_TIMEOUT_S = 0.5  # A miss costs one download; a wait for a lost cluster must cost less.
IO_TIMEOUT_S = 2.0
KEY_PREFIX = "dynamo:image:"
DURATIONS_MAX = 10_000  # Durations that are kept until the next scrape.
WARNING_INTERVAL_S = 60.0
KIB, MIB = 1 << 10, 1 << 20
SIZES = {"le_64kib": 64 * KIB, "le_256kib": 256 * KIB, "le_1mib": MIB, "le_4mib": 4 * MIB, "le_32mib": 32 * MIB}


def _size_bucket(size_bytes: int | None) -> str:
    """Return the label of a size."""
    if size_bytes is None:
        return "unknown"
    return next((label for label, limit in SIZES.items() if size_bytes <= limit), "gt_32mib")


class SharedImageCacheStats:
    """Durations of operations until the next scrape, by operation, outcome and size. Used by one event loop and scrapes."""

    def __init__(self) -> None:
        self._durations: dict[tuple[str, str, str], list[float]] = defaultdict(list)
        self._kept = 0

    def record(self, operation: str, outcome: str, size_bucket: str, duration_s: float) -> None:
        """Add a duration; dropped if nothing scrapes them."""
        if self._kept < DURATIONS_MAX:
            self._kept += 1
            self._durations[operation, outcome, size_bucket].append(duration_s)

    def snapshot_and_drain(self) -> dict[tuple[str, str, str], list[float]]:
        """Return the durations and forget them."""
        taken, self._durations, self._kept = self._durations, defaultdict(list), 0
        return dict(taken)


class _RateLimitedErrorWarnings:
    """Decision which error is logged as a warning: the first, and one per interval with the number since the last."""

    def __init__(self, interval_seconds: float) -> None:
        self._interval_s = interval_seconds
        self._next = float("-inf")
        self._count = 0

    def record(self, now: float) -> int | None:
        """Count an error at a time. Return the number of errors to warn about; None for no warning."""
        self._count += 1
        if now < self._next:
            return None
        errors, self._count, self._next = self._count, 0, now + self._interval_s
        return errors


class SharedImageCache:
    """Encoded images by the identity of their URL, with a time to live."""

    def __init__(self, client: Any, ttl_seconds: int) -> None:
        self._client = client
        self._ttl_s = ttl_seconds
        self._warnings = _RateLimitedErrorWarnings(WARNING_INTERVAL_S)
        self.stats = SharedImageCacheStats()

    @staticmethod
    def from_env() -> "SharedImageCache | None":
        """Return the cache of the environment; None if it is not enabled. Raise `ConfigError`."""
        if not setting(_ENABLED_ENV, False, read_bool):
            return None
        url = setting(_URL_ENV, "", str)
        if not url:
            raise ConfigError(f"{_ENABLED_ENV} requires {_URL_ENV}, the URL of a Redis cluster")
        if RedisCluster is None:
            raise ImportError(f"{_ENABLED_ENV} requires redis: pip install redis")
        client = RedisCluster.from_url(
            url,
            decode_responses=False,
            socket_connect_timeout=setting(_CONNECT_TIMEOUT_ENV, CONNECT_TIMEOUT_S, float),
            socket_timeout=setting(_IO_TIMEOUT_ENV, IO_TIMEOUT_S, float),
            dynamic_startup_nodes=False,
            retry=Retry(NoBackoff(), 0),
        )
        return SharedImageCache(client, setting(_TTL_ENV, TTL_S, int))

    async def get(self, cache_identity: str) -> bytes | None:
        """Return an encoded image; None if there is none, and if the cluster does not respond."""
        found = await self._timed("get", self._client.get(self._key(cache_identity)), ("hit", "miss"), None)
        return None if found is None else bytes(found)

    async def put(self, cache_identity: str, content: bytes) -> None:
        """Store an encoded image."""
        writing = self._client.set(self._key(cache_identity), content, ex=self._ttl_s)
        await self._timed("set", writing, ("success", "success"), len(content))

    async def delete(self, cache_identity: str) -> None:
        """Remove an image."""
        await self._timed("delete", self._client.delete(self._key(cache_identity)), None, None)

    @staticmethod
    def _key(cache_identity: str) -> str:
        """Return the key of an identity, which may contain credentials and be long."""
        return KEY_PREFIX + hashlib.sha256(cache_identity.encode("utf-8", "surrogatepass")).hexdigest()

    async def _timed(
        self, operation: str, call: Awaitable[Any], outcomes: Sequence[str] | None, size: int | None
    ) -> Any:
        """Return the result of a call; None after an error. `outcomes` are those of a result and of None."""
        begun, outcome, result = time.perf_counter(), "error", None
        try:
            result = await call
            outcome = (outcomes or ("", ""))[result is None]
        except ERRORS as error:
            self._log_operation_error(operation, error)
        if outcomes:
            bucket = _size_bucket(len(result) if isinstance(result, bytes) else size)
            self.stats.record(operation, outcome, bucket, time.perf_counter() - begun)
        return result

    def _log_operation_error(self, operation: str, exc: Exception) -> None:
        what = {"get": "read", "set": "write"}.get(operation, operation)
        logger.debug("shared image cache: %s failed: %s", what, exc)
        errors = self._warnings.record(time.monotonic())
        if errors is not None:
            logger.warning("%d shared image cache errors. Requests continue without the shared cache: %s", errors, exc)
