"""RelayHost: the pools of the selected namespaces, created and removed as their endpoints change.

model cards ─┐                 ┌─▶ catalog    pools and how to query them
instances ───┼─▶ membership ───┼─▶ readiness  models and their roles
sources ─────┘                 └─▶ pools      filter and load, from KV events and load reports
"""

import asyncio
import hashlib
import logging
import random
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from dynamo.core.tasks import TaskOwner
from dynamo.dc_relay.config import RelayConfig
from dynamo.dc_relay.membership import PoolKey, ReadinessEntry, RelayPoolPlan, entries_of, plan_of
from dynamo.dc_relay.namespace_file import POLL_INTERVAL_S, NamespaceFile
from dynamo.dc_relay.pool import PoolLoad, RelayPool
from dynamo.dc_relay.published import Published, Windows
from dynamo.dc_relay.records import BUCKETS, RelayRecords
from dynamo.protocols.discovery import EndpointId
from dynamo.runtime.distributed import DistributedRuntime

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One pool and its present generation."""

    plan: RelayPoolPlan
    generation: int


@dataclass(frozen=True, slots=True)
class LoadWindow:
    """Loads of all pools at one time."""

    observed_ms: int
    pools: tuple[tuple[CatalogEntry, PoolLoad], ...]


class RelayHost:
    """Pools, catalog and readiness of one relay, from `start` to `close`."""

    def __init__(self, runtime: DistributedRuntime, config: RelayConfig) -> None:
        self.config = config
        self.dc_id = int.from_bytes(hashlib.sha256(config.dc_id.encode()).digest()[:8], "little")
        self.instance_id = runtime.instance_id
        self.incarnation = random.getrandbits(63) | 1
        self.catalog: Published[tuple[CatalogEntry, ...]] = Published(())
        self.readiness: Published[tuple[ReadinessEntry, ...]] = Published(())
        self.loads: Windows[LoadWindow] = Windows(config.limits.load_fanout_capacity)
        self._runtime = runtime
        self._tasks = TaskOwner("KV relay")
        self._file: NamespaceFile | None = None
        self._records = RelayRecords()
        self._pools: dict[EndpointId, RelayPool] = {}
        self._generations: dict[PoolKey, int] = {}
        self._endpoint_count = 0
        self._has_changed = asyncio.Event()
        self._is_closed = False

    async def start(self) -> None:
        """Follow the registry. Raises `ConfigError` for a sources file that cannot be used."""
        if self.config.sources_file is not None:
            self._file = NamespaceFile(self.config.sources_file, self.config.connection_revision)
            self._file.load()
            self._tasks.supervise(self._poll_file, "sources file")
        for bucket in BUCKETS:
            self._tasks.supervise(partial(self._watch, bucket), bucket)
        self._tasks.supervise(self._follow_changes, "pools")
        if self.config.bind is not None:
            self._tasks.supervise(self._publish_loads, "loads")

    async def close(self) -> None:
        """Withdraw the catalog and end every subscription."""
        self._is_closed = True
        self.catalog.set(())
        await self._tasks.cancel_and_wait()
        for pool in self._pools.values():
            await pool.close()
        self._pools.clear()
        self.catalog.wake()
        self.readiness.wake()

    @property
    def is_sound(self) -> bool:
        """Whether the relay runs and no subscription is interrupted."""
        return not self._is_closed and self._tasks.is_sound and all(pool.is_sound for pool in self._pools.values())

    def pool(self, endpoint: EndpointId) -> RelayPool | None:
        """Return the active pool of an endpoint."""
        pool = self._pools.get(endpoint)
        return pool if pool is not None and pool.is_started else None

    def flush(self) -> None:
        """Publish the collected changes of every pool."""
        for pool in self._pools.values():
            pool.publication.flush()

    def health(self) -> dict[str, Any]:
        """Return the state of the relay, with upstream's keys."""
        return {
            "sources": self._sources_status(),
            "healthy": self.is_sound,
            "shutting_down": self._is_closed,
            "host_last_error": ", ".join(sorted(self._tasks.down)) or None,
            "endpoint_count": self._endpoint_count,
            "active_endpoint_count": sum(pool.is_started for pool in self._pools.values()),
            "fenced_endpoint_count": 0,
        }

    def _sources_status(self) -> dict[str, Any]:
        file = self._file
        return {
            "desiredRevision": file.desired_revision if file is not None else None,
            "appliedRevision": file.applied_revision if file is not None else None,
            "count": 0 if self._is_closed else len(self._selected_namespaces()),
            "lastError": file.last_error if file is not None else None,
        }

    def _selected_namespaces(self) -> frozenset[str]:
        if self._file is not None:
            return self._file.namespaces
        return frozenset(self.config.namespaces) or self._records.namespaces

    def _is_selected(self, endpoint: EndpointId) -> bool:
        if endpoint.namespace not in self._selected_namespaces():
            return False
        prefixes = self.config.endpoint_prefixes
        return not prefixes or any(f"{endpoint}.".startswith(f"{prefix}.") for prefix in prefixes)

    # Changes

    async def _watch(self, bucket: str) -> None:
        unconfirmed = self._records.begin(bucket)
        async for change in self._runtime.discovery.watch(bucket):
            self._records.apply(bucket, change, unconfirmed)
            self._has_changed.set()

    async def _poll_file(self) -> None:
        assert self._file is not None
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            if await asyncio.to_thread(self._file.reload):
                self._has_changed.set()

    async def _follow_changes(self) -> None:
        """Update pools, catalog and readiness after each change."""
        while True:
            await self._has_changed.wait()
            self._has_changed.clear()
            facts = self._records.facts(self._is_selected)
            self._endpoint_count = len(facts.cards)
            plans = {endpoint: plan_of(endpoint, facts) for endpoint in facts.cards}
            await self._update_pools({endpoint: plan for endpoint, plan in plans.items() if plan is not None})
            self._show_catalog()
            keys = {endpoint: pool.plan.key for endpoint, pool in self._pools.items()}
            self.readiness.set(entries_of(facts, keys))

    async def _update_pools(self, plans: dict[EndpointId, RelayPoolPlan]) -> None:
        ended = []
        for endpoint, pool in list(self._pools.items()):
            plan = plans.get(endpoint)
            if plan is None or (plan.key, plan.state_endpoint) != (pool.plan.key, pool.plan.state_endpoint):
                ended.append(self._pools.pop(endpoint))
            else:
                pool.plan = plan
        if ended:
            self._show_catalog()  # A pool is withdrawn before its subscriptions end.
        for pool in ended:
            await pool.close()
        for endpoint, plan in plans.items():
            if endpoint not in self._pools:
                generation = self._generations[plan.key] = self._generations.get(plan.key, 0) + 1
                pool = self._pools[endpoint] = RelayPool(self._runtime, self.config, self.dc_id, plan, generation)
                await pool.start()
                logger.info("pool of %s started: generation %d", endpoint, generation)

    def _show_catalog(self) -> None:
        pools = sorted(self._pools.values(), key=lambda pool: str(pool.plan.endpoint))
        self.catalog.set(tuple(CatalogEntry(pool.plan, pool.generation) for pool in pools if pool.is_started))

    async def _publish_loads(self) -> None:
        while True:
            await asyncio.sleep(self.config.limits.load_window_ms / 1000)
            pools = [pool for pool in self._pools.values() if pool.is_started]
            loads = tuple((CatalogEntry(pool.plan, pool.generation), pool.load()) for pool in pools)
            self.loads.add(LoadWindow(int(time.time() * 1000), loads))
