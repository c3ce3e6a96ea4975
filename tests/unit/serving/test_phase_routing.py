"""The prefill worker is chosen together with the decode worker that can receive its blocks."""

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.cluster.memory import MemoryCluster

from dynamo.core.clock import ManualClock
from dynamo.kv_router.config import RoutingConfig
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.protocols.model_card import ModelDeploymentCard, RuntimeConfig
from dynamo.routing import kv_push_router
from dynamo.routing.kv_push_router import KvPushRouter
from dynamo.routing.prefill_plan import DECODE_OVERRIDE, prefill_routing_request
from dynamo.serving.phase_routing import UNREACHABLE_S, onward_costs
from dynamo.serving.served_model import ServedModel
from dynamo.tokens.hashing import packed_block_hashes


@dataclass
class Progress:
    tokens: int = 0
    is_over: bool = False


def card(zone: str | None, enforcement: str = "required") -> ModelDeploymentCard:
    config = RuntimeConfig(total_kv_blocks=1000, max_num_batched_tokens=8192)
    if zone is not None:
        config.topology_domains = {"zone": zone}
        config.kv_transfer_domain, config.kv_transfer_enforcement = "zone", enforcement
        config.kv_transfer_preferred_weight = 0.1
    return ModelDeploymentCard(display_name="m", slug="m", kv_cache_block_size=16, runtime_config=config)


class Graph:
    """Prefill workers 1 and 2, decode workers 11 and 12, in zones a and b."""

    def __init__(self, policy: Any = "balanced") -> None:
        self.runtime = MemoryCluster().runtime()
        self.prefill = self.pool(policy, "prefill")
        self.decode = self.pool(policy, "decode")
        self.set_cards(self.prefill, {1: card("a"), 2: card("b")})
        self.set_cards(self.decode, {11: card("a"), 12: card("b")})

    def pool(self, policy: Any, component: str) -> Any:
        endpoint = EndpointId.parse(f"dynamo.{component}.generate")
        config = RoutingConfig(block_size=16, policy=policy)
        kv = KvPushRouter(self.runtime, endpoint, config, rng=random.Random(1), clock=ManualClock())
        pool = SimpleNamespace(kv=kv)
        pool.current = pool
        return pool

    def set_cards(self, pool: Any, cards: dict[int, ModelDeploymentCard]) -> None:
        pool.card_of, pool.worker_ids = cards.get, lambda: list(cards)
        pool.kv.set_workers(cards)

    async def load(self, worker: int, requests: int) -> None:
        """Give a decode worker requests of others."""
        for at in range(requests):
            request = PreprocessedRequest(
                model="m", token_ids=[worker, at] * 200, router_config_override=dict(DECODE_OVERRIDE)
            )
            routed = self.decode.kv.to_route_request(request, f"{worker}.{at}")
            routed.worker_id = worker
            await self.decode.kv.place(routed, Progress())

    def costs(self) -> dict[str, float]:
        return onward_costs(cast(ServedModel, self.decode), REQUEST, "r", cast(ServedModel, self.prefill))

    async def close(self) -> None:
        await self.prefill.kv.close()
        await self.decode.kv.close()
        await self.runtime.shutdown()


A, B = "dynamo.topology/zone=a", "dynamo.topology/zone=b"
REQUEST = PreprocessedRequest(model="m", token_ids=list(range(640)))


@pytest.fixture
async def graph() -> AsyncIterator[Graph]:
    made = Graph()
    yield made
    await made.close()


@pytest.mark.parametrize(("busy", "chosen"), [(11, 2), (12, 1)])
async def test_prefill_worker_is_in_the_zone_of_the_less_loaded_decode_workers(
    graph: Graph, busy: int, chosen: int
) -> None:
    await graph.load(busy, 20)
    costs = graph.costs()
    assert costs[A if busy == 11 else B] > costs[B if busy == 11 else A]
    decision = await graph.prefill.kv.choose(prefill_routing_request(REQUEST), "r", Progress(), onward=costs)
    assert decision.worker_id == chosen


async def test_zone_without_decode_worker_is_the_last_choice(graph: Graph) -> None:
    graph.set_cards(graph.decode, {12: card("b")})
    costs = graph.costs()
    assert costs[A] == UNREACHABLE_S > costs[B]
    decision = await graph.prefill.kv.choose(prefill_routing_request(REQUEST), "r", Progress(), onward=costs)
    assert decision.worker_id == 2


async def test_choice_is_not_counted_at_the_decode_workers(graph: Graph) -> None:
    graph.costs()
    assert {load[2] for load in graph.decode.kv.machine.loads().values()} == {0}


async def test_prompt_is_hashed_once_for_all_zones(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def packed(tokens: list[int], *more: Any) -> bytes:
        hashed.append(len(tokens))
        return packed_block_hashes(tokens, *more)

    monkeypatch.setattr(kv_push_router, "packed_block_hashes", packed)
    assert len(graph.costs()) == 2
    assert hashed == [640]


async def test_graph_with_one_zone_or_none_needs_no_comparison(graph: Graph) -> None:
    for zone in ("a", None):
        graph.set_cards(graph.prefill, {1: card(zone), 2: card(zone)})
        assert graph.costs() == {}


async def test_preferred_zone_is_compared_as_well(graph: Graph) -> None:
    cards = {worker: card(zone, "preferred") for worker, zone in ((1, "a"), (2, "b"))}
    graph.set_cards(graph.prefill, cards)
    await graph.load(11, 20)
    costs = graph.costs()
    assert costs[A] > costs[B] > 0


async def test_upstreams_cost_has_no_unit_in_common_with_a_duration() -> None:
    graph = Graph("dynamo")
    assert graph.costs() == {}
    await graph.close()
