"""The decision over many ranks, on arrays, is the decision over few, on dictionaries."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.core.errors import DynamoException
from dynamo.kv_router.config import CostWeights, RoutingConfig
from dynamo.kv_router.decision import Decision
from dynamo.kv_router.policy import PolicyProfile
from dynamo.kv_router.queue import PolicyClass
from dynamo.kv_router.router import Router, RouteRequest, WorkerFacts
from dynamo.kv_router.runs import pack

BLOCK = 4
TAINTS = (frozenset[str](), frozenset({"a"}), frozenset({"a", "b"}))

weights = st.builds(
    CostWeights,
    overlap_score_credit=st.sampled_from([1.0, 0.5, 0.0]),
    overlap_score_credit_decay=st.sampled_from([0.0, 0.0, 0.5]),
    prefill_load_scale=st.sampled_from([1.0, 2.5]),
    decode_active_request_weight=st.sampled_from([0.0, 1.5]),
    router_temperature=st.sampled_from([0.0, 0.0, 0.7]),
    assume_kv_reuse=st.booleans(),
    track_prefill_tokens=st.sampled_from([True, True, False]),
)
configs = st.builds(
    RoutingConfig,
    weights=weights,
    policy=st.sampled_from(["dynamo", "balanced"]),
    block_size=st.just(BLOCK),
    use_kv_events=st.sampled_from([True, True, False]),
    predicted_ttl_s=st.sampled_from([None, 20.0]),
    affinity_ttl_s=st.sampled_from([None, 50.0]),
    queue_threshold=st.sampled_from([None, 0.5]),
    prefill_load_model=st.sampled_from(["none", "ais"]),
)


def pair(config: RoutingConfig, seed: int) -> tuple[Router, Router]:
    """Return a router that uses arrays from 12 ranks on, and one that never does."""
    classes = [PolicyClass(prefill_busy_threshold_frac=config.queue_threshold)]
    profile = PolicyProfile(policy_classes=classes)
    return (
        Router(config, random.Random(seed), profile, many_ranks=12),
        Router(config, random.Random(seed), profile, many_ranks=1 << 30),
    )


def request_of(rng: random.Random, number: int, prompts: list[list[int]]) -> RouteRequest:
    hashes = rng.choice(prompts)[: rng.randrange(13)]
    more: dict[str, Any] = {}
    if rng.random() < 0.15:
        more["preferred_taints"] = {"a": 0.5, "b": rng.choice([-1.0, 2.0])}
    if rng.random() < 0.15:
        more[rng.choice(["busy", "avoid", "allowed"])] = frozenset(rng.sample(range(40), rng.choice([1, 30])))
    if rng.random() < 0.1:
        more["required_taints"] = frozenset({"a"})
    if rng.random() < 0.1:
        more["dp_rank"] = rng.choice([0, 1, 5])
    if rng.random() < 0.1:
        more["worker_id"] = rng.randrange(40)
    if rng.random() < 0.2:
        more["shared"] = ((0, rng.randrange(1, 13)),)
    if rng.random() < 0.1:
        more["held"] = {(worker, 0): (rng.randrange(4), rng.randrange(3), 1) for worker in rng.sample(range(40), 9)}
    if rng.random() < 0.3:
        more["session"] = f"s{rng.randrange(5)}"
    if rng.random() < 0.2:
        more["expected_output_tokens"] = rng.choice([1, 700])
    return RouteRequest(str(number), pack(hashes), len(hashes) * BLOCK + rng.randrange(BLOCK), **more)


def outcome(router: Router, route_request: RouteRequest, now: float) -> Any:
    """Return what a decision was based on and led to, or the error."""
    try:
        decision = router.place(route_request, now)
    except DynamoException as error:
        return type(error), str(error)
    return None if decision is None else facts(router, decision)


def facts(router: Router, decision: Decision) -> Any:
    explanation = router.explain(decision)
    costs = {(one.worker_id, one.dp_rank): one for one in explanation.candidates}
    return (
        (decision.worker_id, decision.dp_rank, decision.cost, decision.tokens_ahead),
        (decision.device_blocks, decision.host_blocks, decision.disk_blocks, decision.snapshot.deepest()),
        router.effective_tokens(decision),
        costs,
    )


@settings(max_examples=25, deadline=None)
@given(config=configs, seed=st.integers(0, 1 << 30))
def test_rank_arrays_decide_as_dictionaries_do(config: RoutingConfig, seed: int) -> None:
    rng, both = random.Random(seed), pair(config, seed)
    prompts = [[rng.getrandbits(64) for _ in range(12)] for _ in range(4)]
    prompts += [prompt[:6] + [rng.getrandbits(64) for _ in range(6)] for prompt in prompts]
    now = 0.0
    for number in range(120):
        now += rng.random()
        drawn = rng.random()
        if drawn < 0.25:
            worker = WorkerFacts(
                rng.randrange(40),
                dp_size=rng.choice([1, 1, 3]),
                kv_blocks=rng.choice([None, 6, 400]),
                batch_tokens=rng.choice([None, 16]),
                taints=rng.choice(TAINTS),
            )
            for router in both:
                router.set_worker(worker)
        elif drawn < 0.3:
            worker_id = rng.randrange(40)
            assert both[0].remove_worker(worker_id) == both[1].remove_worker(worker_id)
        elif drawn < 0.55:
            worker_id, tier, held = rng.randrange(40), rng.choice([0, 0, 0, 1, 2]), rng.choice(prompts)
            held = held[: rng.randrange(1, 13)]
            for router in both:
                router.index.store(worker_id, 0, None, list(held), pack(held), tier)
        elif drawn < 0.65:
            sample = (rng.randrange(3) * 40, rng.randrange(4), rng.randrange(900), rng.random() / 50)
            for router in both:
                for _ in range(210):
                    router.pace.observe(*sample, rank=(number % 40, 0))
        elif drawn < 0.75:
            done = str(rng.randrange(number + 1))
            for router in both:
                router.prefilled(done, now)
        elif drawn < 0.8:
            done = str(rng.randrange(number + 1))
            assert both[0].finish(done, now) == both[1].finish(done, now)
            admitted = [
                [facts(router, one) for _, one in router.admit(now) if isinstance(one, Decision)] for router in both
            ]
            assert admitted[0] == admitted[1]
        else:
            state = rng.getstate()
            found = []
            for router in both:
                rng.setstate(state)
                found.append(outcome(router, request_of(rng, number, prompts), now))
            assert found[0] == found[1]
    for router in both:
        router.validate()
    assert both[1]._workers.arrays is None


def test_rank_arrays_replace_dictionaries_from_many_ranks_on() -> None:
    router = Router(RoutingConfig(block_size=BLOCK), random.Random(1), many_ranks=3)
    for worker in range(3):
        assert router._workers.arrays is None
        router.set_worker(WorkerFacts(worker))
    assert router._workers.arrays is not None
    decision = router.place(RouteRequest("a", pack([1, 2]), 8), 0.0)
    assert decision is not None
    router.remove_worker(decision.worker_id)
    assert router._workers.ranks.keys() < decision.snapshot.ranks.keys(), "a snapshot keeps the ranks of its time"
    following = router.place(RouteRequest("b", pack([1, 2]), 8), 0.0)
    assert following is not None
    assert following.worker_id != decision.worker_id


def test_rank_arrays_draw_ties_evenly() -> None:
    router = Router(RoutingConfig(block_size=BLOCK), random.Random(1), many_ranks=1)
    for worker in range(4):
        router.set_worker(WorkerFacts(worker))
    chosen = []
    for number in range(400):
        decision = router.place(RouteRequest(str(number), b"", 1), 0.0, book=False)
        assert decision is not None
        chosen.append(decision.worker_id)
    assert all(abs(chosen.count(worker) - 100) < 40 for worker in range(4))


def test_rank_arrays_raise_without_an_eligible_rank() -> None:
    router = Router(RoutingConfig(block_size=BLOCK), random.Random(1), many_ranks=1)
    with pytest.raises(DynamoException, match="no worker serves this model"):
        router.place(RouteRequest("a", b"", 1), 0.0)
