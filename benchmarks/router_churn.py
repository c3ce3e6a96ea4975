"""Router churn: memory over a million requests while workers join, store, evict and leave.

    python -m benchmarks.router_churn [--requests 1000000]

Runs `kv_router.Router` alone, with every feature that keeps state: the index, predictions, sessions, a queue, explained
decisions. A first lap fills the fixed-size tables; the memory after it is the baseline of every later lap. Ends with
status 1 if a lap exceeds it.
"""

import gc
import os
import random
import sys
import time
from collections import deque
from dataclasses import dataclass

from benchmarks.report import write_result
from dynamo.core.config import exit_on_config_error, load, option
from dynamo.core.errors import Overloaded
from dynamo.kv_router.config import RoutingConfig
from dynamo.kv_router.router import Router, RouteRequest, WorkerFacts
from dynamo.kv_router.runs import pack
from dynamo.protocols.kv_events import KvEventData, NumberedKvEvent, Removed, Stored, StoredBlock, WorkerKvEvent

WHOLE_REQUESTS = 1_000_000
BLOCK_SIZE = 16
WORKERS = 32
UNDER_WAY = 256
CACHE_BLOCKS = 4096
LAPS = 10
GROWTH_MAX = 0.05
"""Allowed growth over the baseline, for fragmentation of the allocator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnBench:
    """A router's memory under churn."""

    requests: int = option(WHOLE_REQUESTS, "--requests", None, "In all, in ten laps; fewer write no results file")


class Churn:
    """Router with workers and requests that come and go at random."""

    def __init__(self) -> None:
        self.rng = random.Random(1)
        config = RoutingConfig(
            block_size=BLOCK_SIZE, predicted_ttl_s=2.0, affinity_ttl_s=5.0, queue_threshold=1.0, blocks_max=1 << 20
        )
        self.router = Router(config, self.rng)
        self.now = 0.0
        self.requests = 0
        self._ids = iter(range(1, 1 << 62))
        self._held: dict[int, deque[list[int]]] = {}
        self._events: dict[int, int] = {}
        self._cached: dict[int, set[int]] = {}
        self._under_way: deque[str] = deque()
        self._prefixes = [self._hashes(32) for _ in range(64)]

    def _hashes(self, count: int) -> list[int]:
        return [self.rng.getrandbits(64) for _ in range(count)]

    def lap(self, requests: int) -> None:
        """Send that many requests, then remove all workers."""
        for _ in range(WORKERS):
            self._join()
        for number in range(requests):
            self.now += 0.001
            self._request()
            if number % 500 == 499:
                self._leave()
                self._join()
        self._drain()

    def _join(self) -> None:
        worker_id = next(self._ids)
        self._held[worker_id], self._events[worker_id], self._cached[worker_id] = deque(), 0, set()
        self.router.set_worker(WorkerFacts(worker_id, kv_blocks=CACHE_BLOCKS, batch_tokens=8192))

    def _leave(self) -> None:
        worker_id = self.rng.choice(list(self._held))
        del self._held[worker_id], self._events[worker_id], self._cached[worker_id]
        self.router.remove_worker(worker_id)

    def _request(self) -> None:
        self.requests += 1
        request_id = f"r{next(self._ids)}"
        hashes = [*self.rng.choice(self._prefixes)[: self.rng.randrange(33)], *self._hashes(8)]
        session = f"s{next(self._ids)}" if self.rng.random() < 0.3 else None
        route_request = RouteRequest(request_id, pack(hashes), len(hashes) * BLOCK_SIZE, session=session)
        try:
            decision = self.router.place(route_request, self.now)
        except Overloaded:
            return
        self._under_way.append(request_id)
        if decision is not None:
            self.router.prefilled(request_id)
            self._store(decision.worker_id, hashes)
        while len(self._under_way) > UNDER_WAY:
            self._end(self._under_way.popleft())

    def _end(self, request_id: str) -> None:
        if self.rng.random() < 0.001:
            return  # The request expires without an end.
        self.router.withdraw(request_id)
        self.router.finish(request_id, self.now)
        for route_request, _ in self.router.admit(self.now):
            self.router.prefilled(route_request.request_id)

    def _store(self, worker_id: int, hashes: list[int]) -> None:
        """Store the prompt as its engine does, and evict the least recently computed blocks."""
        keys, key = [], worker_id
        for one in hashes:
            key = hash((key, one)) & (1 << 63) - 1
            keys.append(key)
        cached = self._cached[worker_id]
        new = next((at for at, key in enumerate(keys) if key not in cached), len(keys))
        if new == len(keys):
            return
        blocks = [StoredBlock(*pair) for pair in zip(keys[new:], hashes[new:], strict=True)]
        self._publish_load(worker_id, KvEventData(stored=Stored(keys[new - 1] if new else None, None, blocks)))
        cached.update(keys[new:])
        held = self._held[worker_id]
        held.append(keys[new:])
        while len(cached) > CACHE_BLOCKS:
            gone = held.popleft()
            cached.difference_update(gone)
            self._publish_load(worker_id, KvEventData(removed=Removed(gone)))

    def _publish_load(self, worker_id: int, data: KvEventData) -> None:
        self._events[worker_id] += 1
        self.router.apply(
            WorkerKvEvent(worker_id, "device", "worker", NumberedKvEvent(self._events[worker_id], data, 0))
        )

    def _drain(self) -> None:
        """End all requests, remove all workers, and advance the clock."""
        while self._under_way:
            self._end(self._under_way.popleft())
        for worker_id in list(self._held):
            self.router.remove_worker(worker_id)
        self._held.clear()
        self._events.clear()
        self._cached.clear()
        self.now += 1000.0
        self.router.expire(self.now)
        if self.router.predicted is not None:
            self.router.predicted.expire(self.now)
        while self.router.index.sweep():
            pass
        self.router.decisions.clear()

    def left(self) -> dict[str, int]:
        """Return the number of entries that remain in each table."""
        router = self.router
        router.validate()
        return {
            "blocks": router.index.size,
            "ranks": len(router.index.ranks()),
            "requests": len(router.active),
            "sessions": 0 if router.affinity is None else len(router.affinity),
            "waiting": len(router.waiting),
            "workers": len(router.workers),
        }


def resident_mb() -> float:
    """Return the resident memory of the process."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as stat:
        return int(stat.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> int:
    """Return 1 if memory or entries remain."""
    config = load(ChurnBench, sys.argv[1:])
    churn, laps = Churn(), []
    began = time.perf_counter()
    for lap in range(LAPS):
        churn.lap(config.requests // LAPS)
        left = {name: count for name, count in churn.left().items() if count}
        laps.append(resident_mb())
        print(f"lap {lap + 1}: {churn.requests} requests, {laps[-1]:.1f} MB, left: {left or 'nothing'}", flush=True)
        if left:
            return 1
    seconds = time.perf_counter() - began
    growth = min(laps[-3:]) / laps[0] - 1  # The least of three: memory that an allocator happens to keep is no leak.
    print(f"{churn.requests / seconds:.0f} requests a second; memory {growth:+.1%} against the first lap's")
    found = {"requests": churn.requests, "requests_per_s": churn.requests / seconds, "laps_mb": laps, "growth": growth}
    print(f"written to {write_result('router_churn', found, is_whole=config.requests >= WHOLE_REQUESTS)}")
    return int(growth > GROWTH_MAX)


if __name__ == "__main__":
    exit_on_config_error(main)
