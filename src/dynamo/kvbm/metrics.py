"""KvbmMetrics: content of the tiers and traffic between them, under upstream's metric names."""

import asyncio
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dynamo.core.http_server import HttpServer, ServerLimits, metrics_response
from dynamo.core.listening import bind
from dynamo.core.metrics import MetricsRegistry
from dynamo.core.metrics_page import MetricsPage
from dynamo.kvbm.logical.blocks import Tier
from dynamo.kvbm.logical.pool import Pool, PoolCounts
from dynamo.kvbm.manager import BlockManager

T = TypeVar("T")

CLOSE_S = 2.0
SCRAPE_LIMITS = ServerLimits(connections=16, idle_s=5.0)  # Few scrapers, which send their request at once.


def show(registry: MetricsRegistry, manager: BlockManager, block_tokens: int) -> None:
    """Add the manager's metric families to a registry. Values are read at scrape time."""

    def counter(name: str, what: str, value: Callable[[], float]) -> None:
        registry.counter(f"kvbm_{name}", what).labels().follow(value)

    def gauge(name: str, what: str, value: Callable[[], float]) -> None:
        registry.gauge(f"kvbm_{name}", what).labels().follow(value)

    counts, traffic, book = manager.book.counts, manager.traffic, manager.book
    has_host = book.host.is_keeping

    def on_host_way(is_wanted: bool) -> Callable[[], float]:
        """Return a reader of the blocks copied to disk if a host tier exists as `is_wanted` requires, else of zero."""
        return (lambda: counts.offloaded[Tier.DISK]) if has_host == is_wanted else (lambda: 0)

    def rate(tier: Tier) -> Callable[[], float]:
        return lambda: counts.found[tier] / counts.looked_up[tier] if counts.looked_up[tier] else 0.0

    counter("matched_tokens", "Prompt tokens found below the device", lambda: counts.found[Tier.HOST] * block_tokens)
    counter(
        "offload_blocks_d2h",
        "Blocks copied from device to host",
        lambda: counts.offloaded[Tier.HOST] if has_host else 0,
    )
    counter("offload_blocks_h2d", "Blocks copied from host to disk", on_host_way(is_wanted=True))
    counter("offload_blocks_d2d", "Blocks copied from device to disk without a host tier", on_host_way(is_wanted=False))
    counter("offload_blocks_d2o", "Blocks copied to the object store", lambda: counts.offloaded[Tier.OBJECT])
    counter("onboard_blocks_h2d", "Blocks copied from host to device", lambda: counts.onboarded[Tier.HOST])
    counter("onboard_blocks_d2d", "Blocks copied from disk for the device", lambda: counts.onboarded[Tier.DISK])
    counter("onboard_blocks_o2d", "Blocks copied from the object store", lambda: counts.onboarded[Tier.OBJECT])
    counter("offload_bytes_object", "Bytes written to the object store", lambda: traffic.object_bytes_out)
    counter("onboard_bytes_object", "Bytes read from the object store", lambda: traffic.object_bytes_in)
    counter("object_read_failures", "Failed reads of objects", lambda: traffic.object_read_failures)
    counter("object_write_failures", "Failed writes of objects", lambda: traffic.object_write_failures)
    for name, tier in (("host", Tier.HOST), ("disk", Tier.DISK), ("object", Tier.OBJECT)):
        gauge(f"{name}_cache_hit_rate", f"Hit rate of block lookups in the {name} tier", rate(tier))
    # Not in upstream: detection of a failing tier.
    counter(
        "disk_read_failures",
        "Blocks on disk that were torn, corrupt or unreadable",
        lambda: traffic.disk_read_failures,
    )
    counter("disk_write_failures", "Failed writes to the disk tier", lambda: traffic.disk_write_failures)
    counter("offload_blocks_dropped", "Blocks not copied for lack of space", lambda: counts.dropped)
    counter("onboard_timeouts", "Prompts computed because their blocks arrived too late", lambda: traffic.tickets_late)
    counter("onboard_blocks_p2d", "Blocks copied from other workers", lambda: counts.onboarded[Tier.PEER])
    counter("peer_failures", "Failed copies of prefixes from other workers", lambda: traffic.peer_failures)
    gauge("tiers_paused", "Tiers with writes paused", lambda: len(book.paused))
    _show_pools(registry, manager)


def _show_pools(registry: MetricsRegistry, manager: BlockManager) -> None:
    pools = {"host": manager.book.host}
    pools |= {tier.name.lower(): pool for tier, pool in manager.book.lower.items()}
    counters: dict[str, tuple[str, Callable[[PoolCounts], int]]] = {
        "allocations": ("Slots allocated", lambda counts: counts.allocations),
        "allocations_from_reset": ("Slots allocated that were empty", lambda counts: counts.allocations_from_reset),
        "evictions": ("Blocks evicted", lambda counts: counts.evictions),
        "registrations": ("Blocks registered", lambda counts: counts.registrations),
        "duplicate_blocks": ("Blocks registered that were already present", lambda counts: counts.duplicate_blocks),
        "stagings": ("Blocks completely written", lambda counts: counts.stagings),
        "match_requests": ("Prefix lookups", lambda counts: counts.match_requests),
        "match_blocks": ("Blocks looked up", lambda counts: counts.match_blocks),
        "match_hits": ("Blocks found by lookups", lambda counts: counts.match_hits),
    }
    for name, (what, of_counts) in counters.items():
        family = registry.counter(f"kvbm_{name}_total", what, ("pool",))
        for label, pool in pools.items():
            family.labels(pool=label).follow(partial(_read, of_counts, pool.counts))
    gauges: dict[str, tuple[str, Callable[[Pool], int]]] = {
        "inflight": ("Slots held", Pool.held),
        "reset_pool_size": ("Empty places", lambda pool: pool.reset),
        "inactive_pool_size": ("Unused blocks that can be reused or evicted", lambda pool: pool.inactive),
    }
    for name, (what, of_pool) in gauges.items():
        sizes = registry.gauge(f"kvbm_{name}", what, ("pool",))
        for label, pool in pools.items():
            sizes.labels(pool=label).follow(partial(_read, of_pool, pool))


def _read(read: Callable[[T], int], source: T) -> float:
    return read(source)


class MetricsServer:
    """HTTP server for these metrics on the port that upstream uses for them (`DYN_KVBM_METRICS_PORT`).

    It has an event loop in a thread of its own, because engines with a connector may have none.
    """

    def __init__(self, registry: MetricsRegistry, port: int, limits: ServerLimits = SCRAPE_LIMITS) -> None:
        """Raise `StartupError` for a port that is in use."""
        page = MetricsPage(registry)

        async def show_metrics(request: Request) -> Response:
            return await metrics_response(request, page)

        listener = bind("0.0.0.0", port, "DYN_KVBM_METRICS_PORT")  # noqa: S104 - scraped from other hosts
        listener.listen()  # Scrapers that connect before the thread has started wait.
        self.port = int(listener.getsockname()[1])
        self._server = HttpServer(Starlette(routes=[Route("/metrics", show_metrics)]), limits)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(listener,), name="kvbm-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CLOSE_S)

    def _run(self, listener: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> None:
        await self._server.start(listener)
        await self._stop.wait()
        await self._server.close()
