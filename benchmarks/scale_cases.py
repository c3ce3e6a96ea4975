"""Cases of `benchmarks.scale` within one process: a decision, an event, a replica's message, and the metrics page.

All figures are processor time of this thread, so that other programs distort them little; a pause is the longest single call.
"""

import gc
import random
import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, Self

from dynamo.core.codec import msgpack_encode
from dynamo.core.memory import resident_bytes
from dynamo.core.metrics import MetricsRegistry
from dynamo.kv_events.subscriber import decode_events as decode_kv_events
from dynamo.kv_router.config import RoutingConfig
from dynamo.kv_router.index import KvIndex
from dynamo.kv_router.router import Router, RouteRequest, WorkerFacts
from dynamo.kv_router.runs import pack
from dynamo.protocols.active_sequences import (
    MARK_PREFILL_COMPLETED,
    ActiveSequenceEvent,
    ActiveSequenceEvents,
    AddedSequence,
    AddRequest,
    PrefillLoadHint,
    SequenceWorker,
)
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.kv_events import KvEventData, NumberedKvEvent, Stored, StoredBlock, WorkerKvEvent
from dynamo.routing.metrics import KvRouterMetrics
from dynamo.routing.sync.replica_sync import FREED, ReplicaSync, decode_events
from dynamo.tokens.hashing import packed_block_hashes

Policy = Literal["dynamo", "balanced"]

BLOCK_SIZE = 16
PROMPT_BLOCKS = 128
COMMON_BLOCKS = 64
"""Blocks of the system prompt, which every worker holds."""
CONVERSATIONS = 256
HOLDERS = 4
"""Workers that hold a conversation; most beyond the system prompt hold nothing of it."""
EVENT_BLOCKS = 64
EVENT_WORKERS = 64
ENDPOINT = EndpointId("n", "c", "e")


def microseconds(work: Callable[[int], object], count: int, repetitions: int = 5) -> float:
    """Return the processor time of one call: the median of the repetitions."""
    found, number = [], 0
    for _ in range(repetitions):
        began = time.thread_time_ns()
        for _ in range(count):
            work(number)
            number += 1
        found.append((time.thread_time_ns() - began) / count / 1e3)
    return statistics.median(found)


class LoadedRouter:
    """A router whose workers hold conversations, with two active requests for each worker."""

    def __init__(self, workers: int, policy: Policy) -> None:
        self.rng = random.Random(workers)
        self.router = Router(RoutingConfig(block_size=BLOCK_SIZE, policy=policy), random.Random(1))
        common = self._tokens(COMMON_BLOCKS)
        self.prompts = [[*common, *self._tokens(PROMPT_BLOCKS - COMMON_BLOCKS)] for _ in range(CONVERSATIONS)]
        self.blocks = [packed_block_hashes(prompt, BLOCK_SIZE) for prompt in self.prompts]
        for worker in range(workers):
            self.router.set_worker(WorkerFacts(worker, kv_blocks=100_000, batch_tokens=8192))
            self._store(worker, self.blocks[0][: COMMON_BLOCKS * 8])
        for blocks in self.blocks:
            for worker in self.rng.sample(range(workers), min(HOLDERS, workers)):
                self._store(worker, blocks)
        self.active: deque[str] = deque()
        self.most = 2 * workers
        for number in range(self.most):
            self.decide(-1 - number)

    def _tokens(self, blocks: int) -> list[int]:
        return [self.rng.randrange(150_000) for _ in range(blocks * BLOCK_SIZE)]

    def _store(self, worker: int, blocks: bytes) -> None:
        keys = [int.from_bytes(blocks[at : at + 8]) ^ 0x5555 for at in range(0, len(blocks), 8)]
        self.router.index.store(worker, 0, None, keys, blocks)

    def decide(self, number: int) -> None:
        """Route one request."""
        blocks = self.blocks[number % CONVERSATIONS]
        self.router.place(RouteRequest(str(number), blocks, PROMPT_BLOCKS * BLOCK_SIZE), 0.0)
        self.active.append(str(number))

    def end(self, number: int) -> None:
        """Record the first token of the last request, and the end of the first."""
        self.router.prefilled(self.active[-1])
        self.router.finish(self.active.popleft())


def decision(workers: int, policy: Policy, count: int) -> dict[str, float]:
    """Return the cost of a decision and of the other records of a request, in microseconds."""
    loaded = LoadedRouter(workers, policy)
    decide_us, end_us = [], []
    for number in range(count):
        began = time.thread_time_ns()
        loaded.decide(number)
        between = time.thread_time_ns()
        loaded.end(number)
        decide_us.append((between - began) / 1e3)
        end_us.append((time.thread_time_ns() - between) / 1e3)
    return {"decision_us": statistics.median(decide_us), "end_us": statistics.median(end_us)}


def hashing() -> float:
    """Return the microseconds of hashing one prompt."""
    tokens = [number * 7 for number in range(PROMPT_BLOCKS * BLOCK_SIZE)]
    return microseconds(lambda _: packed_block_hashes(tokens, BLOCK_SIZE), 200)


class Pauses:
    """Processor time of garbage collections, by generation."""

    def __init__(self) -> None:
        self.longest_ms = [0.0, 0.0, 0.0]
        self._began = 0

    def __enter__(self) -> Self:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._began = time.thread_time_ns()
        else:
            took = (time.thread_time_ns() - self._began) / 1e6
            self.longest_ms[info["generation"]] = max(self.longest_ms[info["generation"]], took)


class EventSource:
    """Events of workers, whose prompts are distinct."""

    def __init__(self, index: KvIndex) -> None:
        self.index = index
        self.taken = array("Q")
        """Nanoseconds of each event."""
        self.stored: deque[tuple[int, list[int]]] = deque(maxlen=4096)
        self._rng = random.Random(1)
        self._number = 0

    def store(self) -> None:
        """Store a prompt of one of the workers."""
        hashes = [self._rng.getrandbits(63) for _ in range(EVENT_BLOCKS)]
        keys, blocks = [one ^ 0x5555 for one in hashes], pack(hashes)
        worker = self._number % EVENT_WORKERS
        self._number += 1
        self.stored.append((worker, keys[:]))
        began = time.thread_time_ns()
        self.index.store(worker, 0, None, keys, blocks)
        self.taken.append(time.thread_time_ns() - began)

    def remove(self) -> None:
        """Evict a recent prompt."""
        worker, keys = self.stored.popleft()
        began = time.thread_time_ns()
        self.index.remove(worker, 0, keys)
        self.taken.append(time.thread_time_ns() - began)

    def drain(self) -> tuple[float, float]:
        """Return the median nanoseconds per block and the longest event in milliseconds, and begin again."""
        taken, self.taken = sorted(self.taken), array("Q")
        return taken[len(taken) // 2] / EVENT_BLOCKS, taken[-1] / 1e6


def index(size: int) -> dict[str, float]:
    """Return cost and longest pauses of an index that grows to this size, in which a worker then leaves."""
    gc.collect()
    gc.freeze()
    before = resident_bytes()
    tree = KvIndex(2 * size)
    source = EventSource(tree)
    with Pauses() as pauses:
        while tree.size < size:
            source.store()
        found = {"bytes_per_block": (resident_bytes() - before) / size}
        found["stored_ns"], found["stored_pause_ms"] = source.drain()
        prompts = [pack([1, 2, 3]), *(pack([key ^ 0x5555 for key in keys]) for _, keys in list(source.stored)[:512])]
        found["find_us"] = microseconds(lambda number: tree.find(prompts[number % len(prompts)]), 1000)
        for _ in range(len(source.stored) // 2):
            source.remove()
        found["removed_ns"], found["removed_pause_ms"] = source.drain()
        began = time.thread_time_ns()
        tree.remove_worker(EVENT_WORKERS // 2)
        found["leave_ms"] = (time.thread_time_ns() - began) / 1e6
        for _ in range(2048):
            source.store()
        found["swept_ns"], found["swept_pause_ms"] = source.drain()
        found["collection_ms"] = max(pauses.longest_ms[:2])
        gc.collect()
        found["full_collection_ms"] = pauses.longest_ms[2]
    gc.unfreeze()
    return found


def decoded_event() -> float:
    """Return the nanoseconds per block of decoding an event of 64 blocks and unpacking its fields."""
    rng = random.Random(1)
    blocks = [StoredBlock(rng.getrandbits(63), rng.getrandbits(63)) for _ in range(EVENT_BLOCKS)]
    change = NumberedKvEvent(1, KvEventData(stored=Stored(None, None, blocks)), 0)
    payload = msgpack_encode([WorkerKvEvent(1, "device", "worker", change)])

    def decode(_: int) -> None:
        (event,) = decode_kv_events(payload)
        assert not isinstance(event.event.data, str)
        assert event.event.data.stored is not None
        found = event.event.data.stored.blocks
        pack([block.tokens_hash for block in found])
        [block.block_hash for block in found]

    return microseconds(decode, 500) * 1e3 / EVENT_BLOCKS


def replica_message(sync: ReplicaSync, router: Router, workers: int) -> float:
    """Return the microseconds that one request of another router takes here: its start, first token and end."""
    rng = random.Random(1)
    for worker in range(workers):
        router.set_worker(WorkerFacts(worker))
    payloads = []
    for number in range(2000):
        name, place = f"other-{number}", SequenceWorker(rng.randrange(workers), 0)
        hashes = [rng.getrandbits(63) for _ in range(PROMPT_BLOCKS)]
        added = AddRequest(AddedSequence(hashes, True, None, PrefillLoadHint(PROMPT_BLOCKS * BLOCK_SIZE, None)))
        events = [ActiveSequenceEvent(name, place, data, 1) for data in (added, MARK_PREFILL_COMPLETED, FREED)]
        payloads.append(msgpack_encode(ActiveSequenceEvents(events)))

    def apply(number: int) -> None:
        for event in decode_events(payloads[number % len(payloads)]).events:
            sync.apply(event)

    return microseconds(apply, 400)


def metrics(workers: int) -> dict[str, float]:
    """Return the milliseconds of rendering the metrics of a router, and the microseconds of recording a decision."""
    registry, router = MetricsRegistry(), Router(RoutingConfig(block_size=BLOCK_SIZE), random.Random(1))
    for worker in range(workers):
        router.set_worker(WorkerFacts(worker))
    recorder = KvRouterMetrics(registry, "1", ENDPOINT, 1, router, "aggregated")
    recorder.set_model("m", ENDPOINT)
    recorder.set_ranks(router.ranks)
    decided = router.place(RouteRequest("a", b"", 1), 0.0)
    assert decided is not None
    return {
        "render_ms": microseconds(lambda _: registry.render(), max(3, 400 // workers)) / 1e3,
        "page_kb": len(registry.render()) / 1e3,
        "record_us": microseconds(lambda _: recorder.decided(decided), 1000),
    }
