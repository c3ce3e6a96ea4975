"""Case of `benchmarks.scale` with real frontends: a thousand workers join, and all frontends notice.

One mocker runs; the others are copies of its discovery records, each with an id and a key of its own, that lead to it.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.discovery import processor_s
from benchmarks.stacks import FRONTEND, Recipe, Stack, ours
from dynamo.core.codec import json_decode, json_encode
from dynamo.cpu.config import DEMO_MODEL
from dynamo.protocols.discovery import INSTANCES, MODEL_CARDS
from dynamo.runtime.discovery.file import FileDiscovery

SERIES = "dynamo_frontend_worker_active_prefill_tokens{"
BATCH = 50
POLL_S = 0.1
TIMEOUT_S = 60.0
ARRIVAL_S = 2.0


@dataclass(frozen=True, slots=True)
class Joins:
    """Result of one run, in seconds."""

    workers: int
    frontends: int
    registered_s: float
    """From the first registration to the last."""
    noticed_s: float
    """From the first registration until every frontend routes to all workers."""
    noticed_after_s: float
    """The same from the last registration."""
    dropped_s: float
    """From the first removal until no frontend routes to the removed workers."""
    processor_s: float
    """Processor time of one frontend meanwhile, its answers to the polls included."""
    request_ms: float
    """Longest request to a frontend meanwhile; each is sent after the answer of the one before."""


def copies(records: dict[str, bytes], first: int, count: int) -> list[tuple[str, bytes]]:
    """Return records of further workers after the pattern of the only one."""
    ((key, value),) = records.items()
    found = []
    for number in range(first, first + count):
        record = json_decode(value)
        record["instance_id"] = number
        found.append((f"{key.rpartition('/')[0]}/{number:x}", json_encode(record)))
    return found


async def known(stack: Stack) -> int:
    """Return the number of workers to which a frontend's KV router routes."""
    series = await asyncio.to_thread(stack.scrape)
    return sum(name.startswith(SERIES) for name in series)


async def until(stacks: Sequence[Stack], workers: int) -> None:
    """Return once every frontend routes to that many workers."""
    async with asyncio.timeout(TIMEOUT_S):
        for stack in stacks:
            while await known(stack) != workers:  # noqa: ASYNC110 - another process is polled.
                await asyncio.sleep(POLL_S)


async def longest_request(stack: Stack, over: asyncio.Event) -> float:
    """Return the longest request until the event, in seconds."""
    longest = 0.0
    while not over.is_set():
        began = time.monotonic()
        await asyncio.to_thread(stack.send_request, "GET", "/live")
        longest = max(longest, time.monotonic() - began)
        await asyncio.sleep(0.02)
    return longest


async def measure(stacks: Sequence[Stack], workers: int) -> Joins:
    """Let the workers join and leave."""
    discovery = FileDiscovery(os.path.join(stacks[0].home, "discovery"))
    buckets = {bucket: await discovery.snapshot(bucket) for bucket in (INSTANCES, MODEL_CARDS)}
    instances = {
        key: value for key, value in buckets[INSTANCES].items() if key.endswith(f"/generate/{key.rpartition('/')[2]}")
    }
    added = {
        INSTANCES: copies(instances, 1 << 40, workers),
        MODEL_CARDS: copies(buckets[MODEL_CARDS], 1 << 40, workers),
    }
    over = asyncio.Event()
    probe = asyncio.create_task(longest_request(stacks[-1], over))
    pid = stacks[-1].pids[FRONTEND][0]
    used, began = processor_s(pid), time.monotonic()
    for start in range(0, workers, BATCH):
        for bucket, records in added.items():
            await asyncio.gather(*(discovery.put(bucket, *one) for one in records[start : start + BATCH]))
        await asyncio.sleep(max(0.0, began + ARRIVAL_S * (start + BATCH) / workers - time.monotonic()))
    registered = time.monotonic()
    await until(stacks, workers + 1)
    noticed, used = time.monotonic(), processor_s(pid) - used
    over.set()
    longest = await probe
    left = time.monotonic()
    for bucket, records in added.items():
        await asyncio.gather(*(discovery.delete(bucket, key) for key, _ in records))
    await until(stacks, 1)
    dropped = time.monotonic() - left
    await discovery.close()
    return Joins(
        workers, len(stacks), registered - began, noticed - began, noticed - registered, dropped, used, longest * 1e3
    )


def joins(workers: int, frontends: int) -> dict[str, float]:
    """Start the frontends and one worker, and measure."""
    with contextlib.ExitStack() as opened:
        first = Recipe(name="scale", frontend=ours(), engine=ours(), router_mode="kv")
        stacks = [opened.enter_context(Stack(first, DEMO_MODEL))]
        shared = {"DYN_FILE_KV": os.path.join(stacks[0].home, "discovery")}
        for number in range(1, frontends):
            more = Recipe(
                name=f"scale-{number}", frontend=ours(), engine=ours(), router_mode="kv", workers=0, variables=shared
            )
            stacks.append(opened.enter_context(Stack(more, DEMO_MODEL)))
        found: dict[str, float] = msgspec.to_builtins(asyncio.run(measure(stacks, workers)))
        return found
