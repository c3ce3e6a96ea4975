"""Simulated registry: processes receive discovery updates late, twice or not at all.

Each process has production's `MemoryDiscovery` over a replica of its own. The registry sends changes to all processes
over the network and periodically full snapshots, as real members read them after a failure.
"""

import asyncio
from collections import defaultdict

from tests.simulation.loop import Process
from tests.simulation.network import Network

from dynamo.protocols.discovery import INSTANCES
from dynamo.runtime.discovery.base import Watch
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore

RETRY_S = 0.5
CALM_READS = 3  # Full reads after the last fault; later updates are not lost.


class Registry:
    """Authoritative records and leases, in the registry's own process."""

    def __init__(self, network: Network, process: Process, lease_s: float, resync_s: float) -> None:
        self.network = network
        self.process = process
        self.lease_s = lease_s
        self.revision = 0
        self.records: defaultdict[str, dict[str, tuple[int, bytes]]] = defaultdict(dict)
        self.members: list[SimDiscovery] = []
        self._resync_s = resync_s
        self._calm_reads = 0
        process.later(1.0, self._keep)
        process.later(resync_s, self._resync)

    def write(self, bucket: str, key: str, value: bytes | None) -> None:
        """Put a record, or delete it if `value` is None; notify every process whose message arrives."""
        records = self.records[bucket]
        if value is None and key not in records:
            return
        self.revision += 1
        if value is None:
            del records[key]
        else:
            records[key] = (self.revision, value)
        for member in self.members:
            self.network.datagram(self.process, member.process, member.apply_update, bucket, key, self.revision, value)

    def _keep(self) -> None:
        """Remove the records of processes whose lease expired; they write them again later."""
        now = self.network.loop.time()
        for member in list(self.members):
            process = member.process
            if not (process.is_dead or process.is_paused or self.network.is_cut(process, self.process)):
                member.seen_s = now
                for (bucket, key), value in member.own.items():
                    if key not in self.records[bucket]:
                        self.write(bucket, key, value)
            elif now - member.seen_s > self.lease_s:
                for bucket, key in member.own:
                    self.write(bucket, key, None)
                if process.is_dead:
                    self.members.remove(member)
        self.process.later(1.0, self._keep)

    def _resync(self) -> None:
        """Send the whole registry to all reachable processes, periodically."""
        self._calm_reads += self.network.is_calm
        if self._calm_reads > CALM_READS:
            return
        for member in self.members:
            if not self.network.is_cut(member.process, self.process) and not member.process.is_dead:
                records = {bucket: dict(records) for bucket, records in self.records.items()}
                member.process.later(self.network.latency(), member.read, self.revision, records)
        self.process.later(self._resync_s, self._resync)


class SimDiscovery:
    """Discovery of one process: production's memory member over a replica that lags behind the registry."""

    def __init__(self, registry: Registry, process: Process) -> None:
        self.process = process
        self.own: dict[tuple[str, str], bytes] = {}
        self.seen_s = registry.network.loop.time()
        self.gone_s: dict[str, float] = {}
        """Time at which each instance's record left this process's view."""
        self._registry = registry
        self._network = registry.network
        self._replica = MemoryStore()
        self._inner = MemoryDiscovery(self._replica)
        self._known: dict[tuple[str, str], int] = {}
        registry.members.append(self)
        records = {bucket: dict(records) for bucket, records in registry.records.items()}
        self.read(registry.revision, records)

    async def put(self, bucket: str, key: str, value: bytes) -> None:
        await self._reach()
        self.own[bucket, key] = value
        self._registry.write(bucket, key, value)

    async def delete(self, bucket: str, key: str) -> None:
        await self._reach()
        self.own.pop((bucket, key), None)
        self._registry.write(bucket, key, None)

    async def snapshot(self, bucket: str) -> dict[str, bytes]:
        await self._reach()
        return {key: value for key, (_, value) in self._registry.records[bucket].items()}

    def watch(self, bucket: str) -> Watch:
        return self._inner.watch(bucket)

    async def close(self) -> None:
        """Remove the records, or leave them to their lease if the registry is unreachable."""
        if not self._network.is_cut(self.process, self._registry.process):
            for bucket, key in list(self.own):
                self._registry.write(bucket, key, None)
            self._registry.members.remove(self)
        await self._inner.close()

    async def _reach(self) -> None:
        await asyncio.sleep(self._network.latency())
        while self._network.is_cut(self.process, self._registry.process):  # noqa: ASYNC110 - as real members do
            await asyncio.sleep(RETRY_S)

    def apply_update(self, bucket: str, key: str, revision: int, value: bytes | None) -> None:
        """Apply an update, which may be late or a duplicate."""
        if revision <= self._known.get((bucket, key), 0):
            return
        self._known[bucket, key] = revision
        self._note(bucket, key, value)
        view = self._replica.views[bucket]
        if value is None:
            view.delete(key)
        else:
            view.put(key, value)

    def read(self, revision: int, records: dict[str, dict[str, tuple[int, bytes]]]) -> None:
        """Apply the whole registry at a revision."""
        for bucket in {**dict.fromkeys(self._replica.views), **records}:
            there = records.get(bucket, {})
            for key in {**self._replica.views[bucket].records, **there}:
                if self._known.get((bucket, key), 0) <= revision:
                    at, value = there.get(key, (revision, None))
                    if at > self._known.get((bucket, key), 0):
                        self.apply_update(bucket, key, at, value)

    def _note(self, bucket: str, key: str, value: bytes | None) -> None:
        if bucket == INSTANCES:
            if value is None:
                self.gone_s[key] = self._network.loop.time()
            else:
                self.gone_s.pop(key, None)

    def instances(self) -> set[str]:
        """Return the instances in this process's view, as hex."""
        return {key.rpartition("/")[2] for key in self._replica.views[INSTANCES].records}
