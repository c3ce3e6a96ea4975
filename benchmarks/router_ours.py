"""Adapter of our index for `benchmarks.router_cases`, and complete decisions."""

import gc
import random
import time
from collections.abc import Sequence

from dynamo.kv_router.config import RoutingConfig
from dynamo.kv_router.index import KvIndex, Overlap
from dynamo.kv_router.router import Router, RouteRequest, WorkerFacts
from dynamo.kv_router.runs import pack, unpack
from dynamo.tokens.hashing import packed_block_hashes

gc.set_threshold(20_000, 20, 100)  # As the frontend does (`core.interpreter.configure_interpreter`).

HAS_HOP = False
"""Whether a call includes a thread switch and the conversion of its argument, which are reported separately."""

Tree = KvIndex
hash_blocks = packed_block_hashes
Change = tuple[int, int | None, list[int], bytes] | tuple[int, list[int]]


def question(hashes: Sequence[int]) -> bytes:
    """Return a prompt as the router receives it from hashing."""
    return pack(hashes)


def find(tree: KvIndex, prompt: bytes) -> Overlap:
    return tree.find(prompt)


def scores(tree: KvIndex, prompt: bytes) -> dict[tuple[int, int], int]:
    return tree.depth_by_rank(tree.find(prompt))


def stored_event(worker: int, parent: int | None, hashes: Sequence[int]) -> Change:
    """Return an event whose keys differ from its hashes, as an engine's do."""
    return worker, parent, [one ^ 0x5555 for one in hashes], pack(hashes)


def removed_event(worker: int, hashes: Sequence[int]) -> Change:
    return worker, [one ^ 0x5555 for one in hashes]


def apply(tree: KvIndex, change: Change) -> None:
    if len(change) == 2:
        tree.remove(change[0], 0, change[1])
    else:
        tree.store(change[0], 0, *change[1:])


def store(tree: KvIndex, worker: int, parent: int | None, hashes: Sequence[int]) -> None:
    apply(tree, stored_event(worker, parent, hashes))


def remove_worker(tree: KvIndex, worker: int) -> None:
    tree.remove_worker(worker)


def decisions() -> dict[str, float]:
    """Measure hashing, look-up, cost, choice and booking of a prompt of 512 blocks of which every worker caches a part."""
    found = {}
    tokens = [random.randrange(150_000) for _ in range(16 * 512)]
    packed = packed_block_hashes(tokens, 16)
    hashes = list(unpack(packed))
    for workers in (8, 64, 256, 1024, 4096):
        router = Router(RoutingConfig(block_size=16), random.Random(1))
        for worker in range(workers):
            router.set_worker(WorkerFacts(worker))
            held = 64 * (1 + worker % 8)
            router.index.store(worker, 0, None, hashes[:held], packed[: held * 8])
        count = 200
        began = time.process_time_ns()
        for number in range(count):
            router.place(RouteRequest(str(number), packed_block_hashes(tokens, 16), len(tokens)), 0.0)
        found[f"a whole decision, 512 blocks, {workers} workers (µs)"] = (time.process_time_ns() - began) / count / 1e3
    return found
