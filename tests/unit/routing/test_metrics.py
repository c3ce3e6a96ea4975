"""Metrics of a KV router: its queue, its ranks and its decisions."""

import random

import pytest

from dynamo.core.errors import RouterQueueLimitExceeded
from dynamo.core.metrics import MetricsRegistry
from dynamo.kv_router.config import RoutingConfig
from dynamo.kv_router.policy import PolicyProfile
from dynamo.kv_router.queue import PolicyClass
from dynamo.kv_router.router import Router, RouteRequest, WorkerFacts
from dynamo.protocols.discovery import EndpointId
from dynamo.routing.metrics import BATCH, KvRouterMetrics

ENDPOINT = EndpointId("n", "c", "e")
BLOCK = 4


def series(registry: MetricsRegistry) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in registry.render().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def router_of(*workers: int, policy: PolicyClass | None = None) -> Router:
    profile = None if policy is None else PolicyProfile(policy_classes=[policy])
    router = Router(RoutingConfig(block_size=BLOCK), random.Random(1), profile)
    for worker in workers:
        router.set_worker(WorkerFacts(worker, batch_tokens=10))
    return router


def metrics_of(registry: MetricsRegistry, router: Router, worker_type: str = "aggregated") -> KvRouterMetrics:
    metrics = KvRouterMetrics(registry, "15", ENDPOINT, 15, router, worker_type)
    metrics.set_model("m", ENDPOINT)
    metrics.set_ranks(router.ranks)
    return metrics


def request(name: str, tokens: int = 8) -> RouteRequest:
    return RouteRequest(name, bytes(8 * (tokens // BLOCK)), tokens)


def test_router_metrics_show_the_load_of_each_rank_until_it_leaves() -> None:
    registry, router = MetricsRegistry(), router_of(7)
    metrics = metrics_of(registry, router)
    router.place(request("a"), 0.0)
    rank = 'dp_rank="0",worker_id="7",worker_type="decode"'
    assert series(registry)[f"dynamo_frontend_worker_active_prefill_tokens{{{rank}}}"] == 8
    assert series(registry)[f"dynamo_frontend_worker_active_decode_blocks{{{rank}}}"] == 2
    router.remove_worker(7)
    metrics.set_ranks(router.ranks)
    assert not [name for name in series(registry) if 'worker_id="7"' in name]


def test_router_metrics_add_the_loads_of_several_models_on_one_worker() -> None:
    registry, first, second = MetricsRegistry(), router_of(7), router_of(7)
    metrics = metrics_of(registry, first)
    metrics_of(registry, second)
    first.place(request("a"), 0.0)
    second.place(request("b", 4), 0.0)
    rank = '{dp_rank="0",worker_id="7",worker_type="decode"}'
    assert series(registry)[f"dynamo_frontend_worker_active_prefill_tokens{rank}"] == 12
    assert series(registry)[f"dynamo_frontend_worker_active_decode_blocks{rank}"] == 3
    metrics.close()  # The other router reports the rank still.
    assert series(registry)[f"dynamo_frontend_worker_active_prefill_tokens{rank}"] == 4
    assert series(registry)[f"dynamo_frontend_worker_active_decode_blocks{rank}"] == 1


def test_router_metrics_count_received_waiting_expired_and_refused_requests() -> None:
    limited = PolicyClass(prefill_busy_threshold=1, request_queue_limit_per_worker=1)
    registry, router = MetricsRegistry(), router_of(7, policy=limited)
    metrics_of(registry, router)
    assert router.place(request("placed"), 0.0) is not None
    assert router.place(request("waiting", 12), 0.0) is None
    with pytest.raises(RouterQueueLimitExceeded):
        router.place(request("refused"), 0.0)
    labels = 'model="m",policy_class="default",worker_type="decode"'

    def value(name: str, more: str = "") -> float:
        return series(registry)[f"dynamo_frontend_router_{name}{{{labels}{more}}}"]

    assert value("admission_received_total") == 3
    assert value("queue_pending_requests") == 1
    assert value("queue_pending_isl_tokens") == 12
    assert value("queue_backpressure_total", ',reason="request_limit"') == 1
    assert router.withdraw("waiting", is_late=True)
    assert value("queue_pending_requests") == 0
    assert value("admission_rejected_total", ',reason="due_time_passed"') == 1


@pytest.mark.parametrize(
    ("worker_type", "phase"), [("aggregated", "aggregated"), ("prefill", "prefill"), ("decode", "decode")]
)
def test_router_metrics_record_cached_tokens_by_phase(worker_type: str, phase: str) -> None:
    registry, router = MetricsRegistry(), router_of(1, 2)
    metrics = metrics_of(registry, router, worker_type)
    decision = router.place(request("a"), 0.0)
    assert decision is not None
    other = next(slot for slot, rank in decision.snapshot.ranks.items() if rank[0] != decision.worker_id)
    decision.snapshot.prompt.device[other] = 2
    metrics.decided(decision)
    found = series(registry)
    place = f'dynamo_namespace="n",dynamo_component="c",worker_id="f",router_id="15",model="m",phase="{phase}"'
    assert found[f"dynamo_component_router_kv_best_eligible_cached_prefix_tokens_total{{{place}}}"] == 2 * BLOCK
    assert found[f"dynamo_component_router_kv_selected_cached_prefix_tokens_total{{{place}}}"] == 0
    kind = "prefill" if worker_type == "prefill" else "decode"
    router_labels = f'dynamo_namespace="n",dynamo_component="c",worker_id="f",router_id="15",worker_type="{kind}"'
    assert found[f"dynamo_component_router_non_max_overlap_selections_total{{{router_labels}}}"] == 1
    assert found[f"dynamo_component_router_overlap_blocks_lost_sum{{{router_labels}}}"] == 2


def test_router_metrics_show_every_decision_although_they_record_batches() -> None:
    registry, router = MetricsRegistry(), router_of(1)
    metrics = metrics_of(registry, router)
    other = metrics_of(registry, router)  # The router of another model, with the same label.
    decision = router.place(request("a"), 0.0)
    assert decision is not None
    count = "dynamo_component_router_kv_hit_rate_count"
    rates = f'{count}{{dynamo_namespace="n",dynamo_component="c",worker_id="f",router_id="15"}}'
    total = 'dynamo_router_overhead_{}_ms_{}{{router_id="15"}}'
    for number in range(1, BATCH + 3):
        metrics.decided(decision)
        metrics.timed(0.001, 0.002, 0.007)
        if number in {1, BATCH, BATCH + 2}:
            found = series(registry)
            assert found[rates] == number
            assert found[total.format("total", "count")] == number
    found = series(registry)
    for name, milliseconds in {"block_hashing": 1, "indexer_find_matches": 2, "scheduling": 4, "total": 7}.items():
        assert found[total.format(name, "sum")] == pytest.approx(milliseconds * (BATCH + 2))
    other.decided(decision)
    other.timed(0.0, 0.0, 0.0)
    other.close()
    metrics.decided(decision)
    assert series(registry)[rates] == BATCH + 4
    assert series(registry)[total.format("total", "count")] == BATCH + 3


def test_router_metrics_keep_a_bounded_number_of_decisions() -> None:
    router = router_of(1)
    metrics = metrics_of(MetricsRegistry(), router)
    decision = router.place(request("a"), 0.0)
    assert decision is not None
    for _ in range(3 * BATCH + 1):
        metrics.timed(0.0, 0.0, 0.0)
    for _ in range(2 * BATCH + 1):
        metrics.decided(decision)
    assert metrics.overhead.total.count == 3 * BATCH + 1
    assert len(metrics._rates) == 1
