"""Cases of `benchmarks.router` over an adapter, for both implementations. Runs under either interpreter.

    python router_cases.py ADAPTER [--big]      one JSON object on the last line

Only the adapter imports the project, because the released package has the same name.
"""

import gc
import importlib.util
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

REPETITIONS = 5
WORKERS = (8, 64, 256)
DEPTHS = (64, 512, 4096)
EVENT_BLOCKS = (1, 16, 64)
EVENT_WORKERS = 64
MEMORY_BLOCKS = 1_000_000
REMOVAL_BLOCKS = 100_000
BLOCK_SIZE = 16

rng = random.Random(1)


def per_call(work: Callable[[], Any], count: int) -> float:
    """Return nanoseconds of processor time, the median of the repetitions."""
    found = []
    for _ in range(REPETITIONS):
        began = time.process_time_ns()
        for _ in range(count):
            work()
        found.append((time.process_time_ns() - began) / count)
    return statistics.median(found)


def hashes(count: int) -> list[int]:
    return [rng.getrandbits(63) for _ in range(count)]


def rss() -> int:
    with open("/proc/self/statm") as stat:
        return int(stat.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def hashing(adapter: Any) -> dict[str, float]:
    found = {}
    for blocks in (64, 512):
        tokens = [rng.randrange(150_000) for _ in range(BLOCK_SIZE * blocks)]
        took = per_call(partial(adapter.hash_blocks, tokens, BLOCK_SIZE), 20_000 // blocks)
        found[f"hash, {blocks} blocks of {BLOCK_SIZE} (ns a block)"] = took / blocks
    return found


def lookups(adapter: Any) -> dict[str, float]:
    """Measure one popular prompt of which every worker caches a part, and other prompts."""
    found = {}
    for workers in WORKERS:
        for depth in DEPTHS:
            tree, prompt = adapter.Tree(), hashes(depth)
            for worker in range(workers):
                held = depth if worker % 4 == 0 else max(1, depth * (1 + worker % 7) // 8)
                adapter.store(tree, worker, None, prompt[:held])
                for _ in range(4):
                    adapter.store(tree, worker, None, hashes(64))
            requested, uncached = adapter.question(prompt), adapter.question(hashes(depth))
            assert len(adapter.scores(tree, requested)) == workers
            count = max(20, 40_000 // depth)
            hit = per_call(partial(adapter.find, tree, requested), count)
            miss = per_call(partial(adapter.find, tree, uncached), count)
            found[f"find, {depth} blocks, {workers} workers (µs)"] = hit / 1e3
            found[f"find, {depth} blocks, {workers} workers, less the call and its argument (µs)"] = (
                max(0.0, hit - miss) if adapter.HAS_HOP else hit
            ) / 1e3
    return found


def events(adapter: Any) -> dict[str, float]:
    found = {}
    for blocks in EVENT_BLOCKS:
        stored: list[float] = []
        removed: list[float] = []
        for _ in range(3):
            tree, count = adapter.Tree(), 64_000 // blocks
            batches = [(number % EVENT_WORKERS, hashes(blocks)) for number in range(count)]
            outputs = [adapter.stored_event(worker, None, batch) for worker, batch in batches]
            gone = [adapter.removed_event(worker, batch) for worker, batch in batches]
            for into, changes in ((stored, outputs), (removed, gone)):
                gc.collect()
                began = time.process_time_ns()
                for change in changes:
                    adapter.apply(tree, change)
                adapter.find(tree, adapter.question([1]))
                into.append((time.process_time_ns() - began) / count / blocks)
        found[f"stored, events of {blocks} (ns a block)"] = statistics.median(stored)
        found[f"removed, events of {blocks} (ns a block)"] = statistics.median(removed)
    return found


def removal(adapter: Any) -> dict[str, float]:
    tree = adapter.Tree()
    for worker in range(4):
        for _ in range(REMOVAL_BLOCKS // 500):
            adapter.store(tree, worker, None, hashes(500))
    adapter.find(tree, adapter.question([1]))
    began = time.perf_counter_ns()
    adapter.remove_worker(tree, 2)
    adapter.find(tree, adapter.question([1]))
    return {f"a worker with {REMOVAL_BLOCKS:,} blocks leaves (ms)": (time.perf_counter_ns() - began) / 1e6}


def memory(adapter: Any, blocks: int) -> dict[str, float]:
    """Return the bytes of a block, and the longest time that one event took."""
    found = {}
    for holders in (1, 8):
        gc.collect()
        tree, before, longest = adapter.Tree(), rss(), 0
        for number in range(blocks // 64):
            batch = hashes(64)
            for worker in range(holders):
                change = adapter.stored_event((number + worker) % EVENT_WORKERS, None, batch)
                began = time.perf_counter_ns()
                adapter.apply(tree, change)
                longest = max(longest, time.perf_counter_ns() - began)
        adapter.find(tree, adapter.question([1]))
        gc.collect()
        found[f"{blocks:,} blocks on {holders} worker(s) each (bytes a block)"] = (rss() - before) / blocks
        if not adapter.HAS_HOP:
            found[f"{blocks:,} blocks on {holders} worker(s) each: longest pause (ms)"] = longest / 1e6
        del tree
        gc.collect()
    return found


def main() -> None:
    spec = importlib.util.spec_from_file_location("adapter", sys.argv[1])
    assert spec is not None
    assert spec.loader is not None
    adapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(adapter)
    found: dict[str, float] = {}
    for case in (hashing, lookups, events, removal):
        found |= case(adapter)
    found |= memory(adapter, MEMORY_BLOCKS)
    if "--big" in sys.argv:
        found |= memory(adapter, 10 * MEMORY_BLOCKS)
    if hasattr(adapter, "decisions"):
        found |= adapter.decisions()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
