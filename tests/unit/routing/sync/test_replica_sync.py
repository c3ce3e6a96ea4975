"""Routers of the same workers count each other's requests, only while these run."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.memory import MemoryCluster
from tests.settle import turns

from dynamo.core.clock import ManualClock
from dynamo.core.codec import msgpack_decode, msgpack_encode
from dynamo.kv_router.config import RoutingConfig
from dynamo.protocols.active_sequences import (
    ActiveSequenceEvent,
    AddedSequence,
    AddRequest,
    Duration,
    PrefillLoadHint,
    SequenceWorker,
)
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.protocols.model_card import ModelDeploymentCard, RuntimeConfig
from dynamo.routing.kv_push_router import KvPushRouter
from dynamo.routing.sync.replica_sync import BATCH_MAX, TOPIC, ReplicaSync
from dynamo.runtime.event_plane.base import Event

ENDPOINT = EndpointId.parse("dynamo.backend.generate")
BLOCK = 4
PROMPT = list(range(1, 23))


@dataclass
class Progress:
    tokens: int = 0
    is_over: bool = False


class ReplicaHarness(MemoryCluster):
    """Routers of two workers that receive each other's messages."""

    def __init__(self, count: int = 2, **config: object) -> None:
        self.clock = ManualClock()
        super().__init__()
        for _ in range(count):
            self.runtime()
        wanted = RoutingConfig(block_size=BLOCK, use_kv_events=False, replica_sync=True, **config)  # type: ignore[arg-type]
        self.routers = [
            KvPushRouter(runtime, ENDPOINT, wanted, rng=random.Random(1), clock=self.clock) for runtime in self.runtimes
        ]
        card = ModelDeploymentCard(
            display_name="m", slug="m", kv_cache_block_size=BLOCK, runtime_config=RuntimeConfig(total_kv_blocks=100)
        )
        for router in self.routers:
            router.set_workers({1: card, 2: card})

    async def start(self) -> "ReplicaHarness":
        for router in self.routers:
            await router.start()
        return self

    async def close(self) -> None:
        for router in self.routers:
            await router.close()

    async def settle(self) -> None:
        """Returns when every published message has been received."""
        for _ in range(20):
            for router in self.routers:
                assert router.sync is not None
                router.sync.flush()
            await turns()

    def loads(self) -> list[dict[tuple[int, int], tuple[float, float, int]]]:
        for router in self.routers:
            router.machine.validate()
        return [router.machine.loads() for router in self.routers]


def request(tokens: list[int] | None = None) -> PreprocessedRequest:
    return PreprocessedRequest(model="m", token_ids=PROMPT if tokens is None else tokens)


async def test_replica_sync_counts_a_request_on_the_other_router_until_it_ends() -> None:
    harness = await ReplicaHarness().start()
    first, second = harness.routers
    progress = Progress()
    decision = await first.choose(request(), "a", progress)
    await harness.settle()
    loads = harness.loads()
    assert loads[0] == loads[1]
    assert loads[1][(decision.worker_id, 0)] == (22, 5, 1)
    other = await second.choose(request(list(range(50, 72))), "b", Progress())
    assert other.worker_id != decision.worker_id, "the other worker has nothing to do"
    progress.tokens = 1
    harness.clock.advance(0.02)
    await harness.settle()
    assert harness.loads()[1][(decision.worker_id, 0)] == (0, 5, 1), "the first token is told without another request"
    first.release("a")
    second.release("b")
    await harness.settle()
    assert set(harness.loads()[0].values()) == set(harness.loads()[1].values()) == {(0, 0, 0)}
    await harness.close()


async def test_replica_sync_shares_blocks_of_requests_with_a_common_prefix() -> None:
    harness = await ReplicaHarness().start()
    decision = await harness.routers[0].choose(request(), "a", Progress(tokens=1))
    harness.routers[0].refresh()
    await harness.settle()
    again = await harness.routers[1].choose(request(), "b", Progress())
    await harness.settle()
    assert again.worker_id == decision.worker_id, "guesses are shared as well"
    loads = harness.loads()
    assert loads[0] == loads[1]
    assert loads[0][(decision.worker_id, 0)][1:] == (5, 2)
    await harness.close()


async def test_replica_sync_drops_requests_of_a_departed_router() -> None:
    harness = await ReplicaHarness(3).start()
    await harness.routers[0].choose(request(), "a", Progress())
    await harness.routers[1].choose(request(), "b", Progress())
    await harness.settle()
    await harness.routers[0].close()
    await harness.settle()
    counted = [sum(load[2] for load in router.machine.loads().values()) for router in harness.routers[1:]]
    assert counted == [1, 1]
    harness.routers = harness.routers[1:]
    await harness.close()


async def test_replica_sync_of_a_late_router_starts_empty_and_follows_events() -> None:
    harness = await ReplicaHarness().start()
    await harness.routers[0].choose(request(), "a", Progress())
    await harness.settle()
    late = KvPushRouter(harness.runtime(), ENDPOINT, harness.routers[0].config, clock=harness.clock)
    late.set_facts(list(harness.routers[0].machine.workers.values()))
    await late.start()
    harness.routers[0].release("a")
    await harness.routers[0].choose(request(), "b", Progress())
    await harness.settle()
    assert sum(load[2] for load in late.machine.loads().values()) == 1
    await late.close()
    await harness.close()


async def test_replica_sync_messages_equal_those_of_released_dynamo() -> None:
    harness = await ReplicaHarness(1).start()
    subscriber = await harness.runtime().event_plane.subscriber(ENDPOINT, TOPIC)
    router = harness.routers[0]
    assert router.sync is not None
    progress = Progress()
    decision = await router.choose(request(), "a", progress)
    progress.tokens = 1
    router.refresh()
    router.release("a")
    await harness.settle()
    received = await anext(aiter(subscriber))
    assert isinstance(received, Event)
    added, prefilled, freed = msgpack_decode(received.payload)["events"]
    worker = {"worker_id": decision.worker_id, "dp_rank": 0}
    common = {"request_id": "a", "worker": worker, "router_id": router.sync.router_id, "lora_name": None}
    (reported,) = added.pop("data").values()
    assert len(reported.pop("token_sequence")) == 5
    assert reported == {
        "track_prefill_tokens": True,
        "expected_output_tokens": None,
        "prefill_load_hint": {"initial_effective_prefill_tokens": 22, "expected_prefill_duration": None},
    }
    assert added == common
    assert (prefilled, freed) == ({**common, "data": "MarkPrefillCompleted"}, {**common, "data": "Free"})
    await harness.close()


class Machine:
    """Router state that only counts."""

    def __init__(self) -> None:
        self.active: set[str] = set()

    def is_active(self, request_id: str) -> bool:
        return request_id in self.active

    def share(
        self,
        request_id: str,
        rank: tuple[int, int],
        sequence: bytes,
        prefill_tokens: int,
        now: float,
        prefill_s: float | None = None,
    ) -> bool:
        if rank[0] != 1:
            return False
        self.active.add(request_id)
        return True

    def prefilled(self, request_id: str, now: float | None = None) -> bool:
        return request_id in self.active

    def finish(self, request_id: str, now: float = 0.0) -> bool:
        self.active.discard(request_id)
        return True


def event(request_id: str, data: object, worker_id: int = 1, router_id: int = 9) -> ActiveSequenceEvent:
    return ActiveSequenceEvent(request_id, SequenceWorker(worker_id), data, router_id)  # type: ignore[arg-type]


ADDED = AddRequest(AddedSequence([1, 2], prefill_load_hint=PrefillLoadHint(8)))


async def test_replica_sync_ignores_ends_of_requests_of_other_routers() -> None:
    harness, machine = ReplicaHarness(1), Machine()
    sync = ReplicaSync(harness.runtimes[0], ENDPOINT, machine, harness.clock)
    machine.active.add("mine")
    sync.added("mine", (1, 0), None, 3)
    sync.apply(event("mine", ADDED))
    sync.apply(event("mine", "Free"))
    assert "mine" in machine.active
    sync.apply(event("theirs", ADDED))
    sync.apply(event("unknown", ADDED, worker_id=5))
    assert machine.active == {"mine", "theirs"}
    sync.apply(event("theirs", "Free"))
    sync.apply(event("theirs", "Free"))
    assert machine.active == {"mine"}
    await sync.close()


async def test_replica_sync_removes_expired_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.routing.sync.replica_sync.PRUNE_MIN", 8)
    harness, machine = ReplicaHarness(1), Machine()
    sync = ReplicaSync(harness.runtimes[0], ENDPOINT, machine, harness.clock)
    for number in range(100):
        sync.apply(event(str(number), ADDED))
        machine.active.clear()
    assert len(sync._others) <= 8
    await sync.close()


async def test_replica_sync_bounds_batches_and_counts_malformed_messages() -> None:
    harness = await ReplicaHarness(2).start()
    router, other = harness.routers
    assert router.sync is not None and other.sync is not None
    subscriber = await harness.runtime().event_plane.subscriber(ENDPOINT, TOPIC)
    for number in range(BATCH_MAX + 1):
        router.sync.added(str(number), (1, 0), None, 1)
    received = await anext(aiter(subscriber))
    assert isinstance(received, Event)
    assert len(msgpack_decode(received.payload)["events"]) == BATCH_MAX
    publisher = await harness.runtime().event_plane.publisher(ENDPOINT, TOPIC)
    publisher.publish(msgpack_encode({"events": 7}))
    await harness.settle()
    assert "dynamo_router_replica_sync_unreadable_total 1" in harness.runtimes[1].metrics.render()
    assert other.is_sound
    await harness.close()


async def test_replica_sync_sends_prefill_durations() -> None:
    harness = await ReplicaHarness(prefill_load_model="ais", prefill_estimate=(1.0, 0.0, 0.0)).start()
    decision = await harness.routers[0].choose(request(), "a", Progress())
    await harness.settle()
    machine = harness.routers[1].machine
    slot = machine.active.slot_of("a")
    assert slot is not None

    assert machine.active.prefill_tokens_at(harness.clock.now())[slot] == 22
    assert machine.active.prefill_tokens_at(harness.clock.now() + 0.5)[slot] == 11
    assert harness.loads()[1][(decision.worker_id, 0)] == (22, 5, 1)
    await harness.close()


def test_replica_sync_writes_durations_as_released_routers() -> None:
    hint = PrefillLoadHint(8, Duration.of(1.25))

    assert msgpack_decode(msgpack_encode(hint)) == {
        "initial_effective_prefill_tokens": 8,
        "expected_prefill_duration": {"secs": 1, "nanos": 250_000_000},
    }
    assert Duration(2, 500_000_000).seconds == 2.5


async def test_replica_sync_shares_blocks_only_between_routers_with_the_same_key(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(name.encode() * 10 + b"..")
    keyed: dict[str, Any] = {"tracking_hash": "keyed-xxh3-v1", "tracking_key_id": "2026"}
    harness = ReplicaHarness(2, tracking_key_file=str(tmp_path / "one"), **keyed)
    other = ReplicaHarness(1, tracking_key_file=str(tmp_path / "two"), **keyed)

    asks = [router.to_route_request(request(), "r") for router in (*harness.routers, *other.routers)]

    assert asks[0].sequence == asks[1].sequence != asks[2].sequence
    assert asks[0].sequence is not None and len(asks[0].sequence) == 5 * 8
    await harness.start()
    decision = await harness.routers[0].choose(request(), "a", Progress())
    await harness.routers[1].choose(request(), "b", Progress())
    await harness.settle()
    assert harness.loads()[0] == harness.loads()[1]
    assert harness.loads()[0][(decision.worker_id, 0)][1:] == (5, 2)
    await harness.close()
