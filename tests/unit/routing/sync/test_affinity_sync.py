"""Routers of the same workers send a session to the same one."""

import random
from dataclasses import dataclass

from tests.cluster.memory import MemoryCluster
from tests.settle import turns

from dynamo.core.clock import ManualClock
from dynamo.core.codec import msgpack_decode, msgpack_encode
from dynamo.kv_router.config import RoutingConfig
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.protocols.model_card import ModelDeploymentCard, RuntimeConfig
from dynamo.routing.kv_push_router import KvPushRouter
from dynamo.routing.sync.affinity_sync import SessionAffinityUpdate

DECODE, PREFILL = EndpointId.parse("dynamo.backend.generate"), EndpointId.parse("dynamo.prefill.generate")
WORKERS = range(1, 9)


@dataclass
class Progress:
    tokens: int = 0
    is_over: bool = False


class AffinityHarness(MemoryCluster):
    """Routers of eight workers each."""

    def __init__(self, *endpoints: EndpointId, ttl_s: float = 60.0) -> None:
        self.clock = ManualClock()
        super().__init__()
        wanted = RoutingConfig(block_size=4, use_kv_events=False, affinity_ttl_s=ttl_s)
        self.routers = [
            KvPushRouter(self.runtime(), endpoint, wanted, rng=random.Random(number), clock=self.clock)
            for number, endpoint in enumerate(endpoints)
        ]
        card = ModelDeploymentCard(display_name="m", slug="m", runtime_config=RuntimeConfig(total_kv_blocks=100))
        for router in self.routers:
            router.set_workers(dict.fromkeys(WORKERS, card))

    async def start(self) -> "AffinityHarness":
        for router in self.routers:
            await router.start()
        return self

    async def close(self) -> None:
        for router in self.routers:
            await router.close()

    async def turn(self, router: int, session: str, request_id: str, *, is_last: bool = False) -> int:
        """Return the worker of a session's turn, once all routers received it."""
        context = {"session_id": session, "session_final": is_last}
        request = PreprocessedRequest(model="m", token_ids=list(range(9)), agent_context=context)
        decision = await self.routers[router].choose(request, request_id, Progress())
        await turns(20)
        self.routers[router].release(request_id)
        return decision.worker_id


async def test_affinity_sync_binds_a_session_to_one_worker_on_all_routers() -> None:
    harness = await AffinityHarness(DECODE, DECODE, DECODE).start()

    for number in range(12):
        first = await harness.turn(number % 3, f"s{number}", f"a{number}")
        assert await harness.turn((number + 1) % 3, f"s{number}", f"b{number}") == first
    await harness.close()


async def test_affinity_sync_extends_a_session_on_other_routers() -> None:
    harness = await AffinityHarness(DECODE, DECODE, ttl_s=10.0).start()
    first = await harness.turn(0, "s", "a")
    for number in range(4):
        harness.clock.advance(6.0)
        assert await harness.turn(0, "s", f"b{number}") == first

    harness.clock.advance(6.0)

    affinity = harness.routers[1].machine.affinity
    assert affinity is not None and affinity.find("s", harness.clock.now()) == (first, 0)
    await harness.close()


async def test_affinity_sync_binds_prefill_and_decode_separately() -> None:
    harness = await AffinityHarness(DECODE, PREFILL).start()
    await harness.turn(0, "s", "a")

    affinity = harness.routers[1].machine.affinity
    assert affinity is not None and affinity.find("s", harness.clock.now()) is None
    await harness.close()


async def test_affinity_sync_resolves_simultaneous_bindings_to_one_worker() -> None:
    harness = AffinityHarness(DECODE, DECODE)
    reported = []
    for number, router in enumerate(harness.routers):
        affinity = router.machine.affinity
        assert affinity is not None and router.bindings is not None
        affinity.bind("s", f"r{number}", (number + 1, 0), 0.0)
        version = affinity.version_of("s")
        assert version is not None
        reported.append(msgpack_encode(SessionAffinityUpdate("s", number + 1, 0, *version)))

    for router in harness.routers:
        assert router.bindings is not None
        for payload in reported:
            router.bindings.apply(payload)

    found = {router.machine.affinity.find("s", 0.0) for router in harness.routers if router.machine.affinity}
    assert len(found) == 1


async def test_affinity_sync_ignores_malformed_and_unknown_bindings() -> None:
    harness = AffinityHarness(DECODE)
    router = harness.routers[0]
    assert router.bindings is not None and router.machine.affinity is not None

    router.bindings.apply(b"\xc1")
    router.bindings.apply(msgpack_encode(SessionAffinityUpdate("s", 99, None, 7, 1)))

    assert len(router.machine.affinity) == 0
    router.machine.affinity.bind("s", "r", (1, 0), 0.0)
    assert router.machine.affinity.version_of("s") == (8, router.bindings.writer_id)


def test_affinity_sync_writes_bindings_as_released_routers() -> None:
    assert msgpack_decode(msgpack_encode(SessionAffinityUpdate("s", 1, 0, 2, 3))) == {
        "session_id": "s",
        "worker_id": 1,
        "dp_rank": 0,
        "sequence": 2,
        "writer_id": 3,
    }
