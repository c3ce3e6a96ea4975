"""The router sends a request to the cheapest eligible rank, and counts it until its end."""

import gc
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dynamo.core.errors import InvalidArgument, NotReady, RouterQueueLimitExceeded
from dynamo.kv_router import events
from dynamo.kv_router.config import CostWeights, RoutingConfig
from dynamo.kv_router.index import KvIndex
from dynamo.kv_router.policy import PolicyProfile
from dynamo.kv_router.queue import PolicyClass
from dynamo.kv_router.router import Decision, Router, RouteRequest, WorkerFacts
from dynamo.protocols.kv_events import (
    KvEventData,
    NumberedKvEvent,
    Removed,
    Stored,
    StoredBlock,
    WorkerKvEvent,
)
from dynamo.tokens.hashing import block_hashes, packed_block_hashes

BLOCK = 4


def make(workers: int = 2, classes: list[PolicyClass] | None = None, **config: Any) -> Router:
    profile = PolicyProfile(policy_classes=classes) if classes else None
    router = Router(RoutingConfig(block_size=BLOCK, **config), random.Random(1), profile)
    for worker_id in range(1, workers + 1):
        router.set_worker(WorkerFacts(worker_id, batch_tokens=100, kv_blocks=50))
    return router


def route_request(name: str, tokens: list[int], **more: Any) -> RouteRequest:
    return RouteRequest(name, packed_block_hashes(tokens, BLOCK), len(tokens), **more)


def stored(worker_id: int, tokens: list[int], tier: str = "device", dp_rank: int = 0) -> WorkerKvEvent:
    hashes = block_hashes(tokens, BLOCK)
    change = Stored(None, None, [StoredBlock(hash(tuple(hashes[: n + 1])), one) for n, one in enumerate(hashes)])
    return WorkerKvEvent(worker_id, tier, "worker", NumberedKvEvent(1, KvEventData(stored=change), dp_rank))


def placed(router: Router, requested: RouteRequest, now: float = 0) -> Decision:
    decision = router.place(requested, now)
    assert decision is not None
    return decision


PROMPT = list(range(40))


def test_kv_router_sends_a_prompt_to_the_worker_that_caches_it() -> None:
    router = make(4)
    router.apply(stored(3, PROMPT[:24]))
    decision = placed(router, route_request("a", PROMPT))
    assert (decision.worker_id, decision.overlap_blocks, decision.blocks) == (3, 6, 10)
    assert router.loads()[(3, 0)] == (40 - 24, 10, 1)


@pytest.mark.parametrize("many_ranks", [1, 100])
def test_routers_that_share_an_index_find_the_same_cached_blocks(many_ranks: int) -> None:
    owner = make(2)
    router = Router(owner.config, random.Random(1), index=owner.index, many_ranks=many_ranks)
    for worker_id in (1, 2):
        router.set_worker(WorkerFacts(worker_id))
    owner.apply(stored(2, PROMPT[:12]))
    assert placed(router, route_request("a", PROMPT)).worker_id == 2


def test_explanation_of_a_decision_names_the_workers_of_its_time() -> None:
    router = make(2)
    first = placed(router, route_request("a", PROMPT))
    router.remove_worker(2)
    router.set_worker(WorkerFacts(9))
    second = placed(router, route_request("b", PROMPT))
    router.set_worker(WorkerFacts(10))
    explained = [{one.worker_id for one in router.explain(decision).candidates} for decision in (first, second)]
    assert explained == [{1, 2}, {1, 9}]
    assert list(first.snapshot.slots) == list(second.snapshot.slots) == [0, 1]


def test_kv_router_prefers_idle_worker_when_queue_cost_exceeds_overlap() -> None:
    router = make(2)
    router.apply(stored(1, PROMPT[:12]))
    counts = Counter(
        placed(router, route_request(f"r{n}", [*PROMPT[:12], *range(100 * n, 100 * n + 28)])).worker_id
        for n in range(1, 9)
    )
    assert counts[1] > 0 < counts[2]


def test_kv_router_releases_load_step_by_step() -> None:
    router = make(1, track_output_blocks=True)
    placed(router, route_request("a", PROMPT))
    assert router.loads() == {(1, 0): (40, 10, 1)}
    assert router.prefilled("a")
    assert router.grow("a")
    assert router.loads() == {(1, 0): (0, 11, 1)}
    assert router.finish("a")
    assert not router.finish("a")
    assert router.loads() == {(1, 0): (0, 0, 0)}


def test_kv_router_counts_blocks_added_by_slower_tiers() -> None:
    router = make(2)
    router.apply(stored(1, PROMPT[:8]))
    router.apply(stored(1, PROMPT[:16], "host_pinned"))
    router.apply(stored(1, PROMPT[:32], "disk"))
    decision = placed(router, route_request("a", PROMPT))
    assert (decision.device_blocks, decision.host_blocks, decision.disk_blocks) == (2, 2, 4)
    assert router.overlaps(packed_block_hashes(PROMPT, BLOCK), 0) == {(1, 0): (2, 2, 4)}


def test_kv_router_prefers_a_preferred_taint() -> None:
    router = make(1)
    router.set_worker(WorkerFacts(2, taints=frozenset({"near"})))
    for n in range(5):
        decision = placed(router, route_request(f"r{n}", PROMPT, preferred_taints={"near": 3.0}))
        router.finish(decision.request_id)
        assert decision.worker_id == 2


def test_kv_router_ignores_overlap_when_a_request_sets_its_credit_to_zero() -> None:
    router = make(2)
    router.apply(stored(1, PROMPT))
    chosen = set()
    for n in range(30):
        decision = placed(router, route_request(f"r{n}", PROMPT, overrides={"overlap_score_credit": 0.0}))
        chosen.add(decision.worker_id)
        router.finish(decision.request_id)
    assert chosen == {1, 2}


def test_kv_router_query_changes_no_state() -> None:
    router = make(2)
    assert router.place(route_request("a", PROMPT), 0, book=False) is not None
    assert set(router.loads().values()) == {(0, 0, 0)}


def test_kv_router_predicts_caches_without_kv_events() -> None:
    router = make(2, use_kv_events=False, approximate_ttl_s=10.0)
    first = placed(router, route_request("a", PROMPT))
    router.finish("a")
    assert placed(router, route_request("b", PROMPT), 5).worker_id == first.worker_id
    router.finish("b")
    assert placed(router, route_request("c", PROMPT), 16).overlap_blocks == 0


def test_kv_router_counts_a_placed_prompt_as_cached_until_its_ttl() -> None:
    router = make(2, predicted_ttl_s=5.0)
    first = placed(router, route_request("a", PROMPT))
    assert placed(router, route_request("b", PROMPT), 1).device_blocks == 10
    router.finish("a")
    router.finish("b")
    assert placed(router, route_request("c", PROMPT), 20).device_blocks == 0
    assert first.device_blocks == 0


def test_kv_router_queues_requests_while_every_worker_is_busy() -> None:
    router = make(2, queue_threshold=0.3)
    assert {placed(router, route_request(name, PROMPT)).worker_id for name in "ab"} == {1, 2}
    assert router.place(route_request("c", PROMPT), 1) is None
    assert router.place(route_request("d", PROMPT, priority_jump=10), 2) is None
    assert router.admit(3) == []
    router.prefilled("a")
    ((requested, decision),) = router.admit(4)
    assert isinstance(decision, Decision)
    assert (requested.request_id, decision.request_id) == ("d", "d")
    assert router.withdraw("c")
    assert not router.withdraw("c")
    router.finish("b")
    assert router.admit(5) == []


def test_kv_router_fails_requests_queued_for_a_removed_worker() -> None:
    router = make(1, queue_threshold=0.0)
    placed(router, route_request("a", PROMPT))
    assert router.place(route_request("b", PROMPT, worker_id=1), 0) is None
    assert router.remove_worker(1) == ["a"]
    ((requested, error),) = router.admit(1)
    assert requested.request_id == "b"
    assert isinstance(error, InvalidArgument)


def test_kv_router_does_not_block_the_queue_with_a_pinned_request() -> None:
    router = make(2, queue_threshold=0.0)
    for worker_id in (1, 2):
        placed(router, route_request(f"r{worker_id}", PROMPT, worker_id=worker_id))
    assert router.place(route_request("pinned", PROMPT, worker_id=1), 0) is None
    assert router.place(route_request("free", PROMPT), 1) is None
    router.prefilled("r2")
    assert [requested.request_id for requested, _ in router.admit(2)] == ["free"]


def test_kv_router_policy_class_has_a_separate_threshold_and_limit() -> None:
    classes = [
        PolicyClass(),
        PolicyClass(name="batch", policy_family="batch", prefill_busy_threshold=0, request_queue_limit_per_worker=1),
    ]
    router = make(1, classes=classes)
    placed(router, route_request("a", PROMPT))
    assert router.place(route_request("b", PROMPT, policy_class="batch"), 0) is None
    placed(router, route_request("c", PROMPT))
    with pytest.raises(RouterQueueLimitExceeded, match="class batch"):
        router.place(route_request("d", PROMPT, policy_class="batch"), 0)
    placed(router, route_request("e", PROMPT, policy_class="of another world"))


def test_kv_router_removes_all_state_of_a_removed_worker() -> None:
    router = make(2)
    router.apply(stored(1, PROMPT))
    placed(router, route_request("a", PROMPT))
    assert router.remove_worker(1) == ["a"]
    assert placed(router, route_request("b", PROMPT)).overlap_blocks == 0
    router.set_worker(WorkerFacts(5))
    assert router.loads()[(5, 0)] == (0, 0, 0)
    router.validate()


def test_kv_router_explanation_lists_every_candidate() -> None:
    router = make(3)
    router.apply(stored(2, PROMPT[:20]))
    decision = placed(router, route_request("a", PROMPT, avoid=frozenset({3})))
    placed(router, route_request("b", PROMPT))
    worker_event = router.explain(decision)
    assert [(one.worker_id, one.device, one.cost, one.filtered) for one in worker_event.candidates] == [
        (2, 5, 15.0, None),
        (1, 0, 20.0, None),
        (3, 0, None, "failed or unresponsive"),
    ]
    assert (
        worker_event.candidates[0].prefill - worker_event.candidates[0].saved + worker_event.candidates[0].decode == 15
    )
    assert router.decisions[0] is decision


def test_kv_router_keeps_a_session_on_its_worker_while_it_exists() -> None:
    router = make(3, affinity_ttl_s=60)
    first = placed(router, route_request("a", PROMPT, session="s"))
    router.apply(stored(next(one for one in (1, 2, 3) if one != first.worker_id), PROMPT))
    assert placed(router, route_request("b", PROMPT, session="s")).worker_id == first.worker_id
    busy = frozenset({first.worker_id})
    assert placed(router, route_request("c", PROMPT, session="s", busy=busy)).worker_id == first.worker_id
    moved = placed(router, route_request("d", PROMPT, session="s", avoid=busy))
    assert moved.worker_id != first.worker_id
    router.remove_worker(moved.worker_id)
    assert placed(router, route_request("e", PROMPT, session="s")).worker_id != moved.worker_id


def test_kv_router_soft_session_moves_from_a_busy_worker_and_ends_with_its_final_turn() -> None:
    router = make(2, affinity_ttl_s=60, affinity_mode="soft")
    first = placed(router, route_request("a", PROMPT, session="s"))
    assert (
        placed(router, route_request("b", PROMPT, session="s", busy=frozenset({first.worker_id}))).worker_id
        != first.worker_id
    )
    placed(router, route_request("c", PROMPT, session="s", is_last=True))
    assert router.affinity is not None
    assert len(router.affinity) == 0


def test_kv_router_balanced_policy_spreads_a_popular_prefix_when_its_worker_is_loaded() -> None:
    router = make(2, policy="balanced")
    router.apply(stored(1, PROMPT[:8]))
    assert placed(router, route_request("first", PROMPT)).worker_id == 1
    counts = Counter(placed(router, route_request(f"r{n}", [*PROMPT[:8], 1000 + n])).worker_id for n in range(40))
    assert counts[1] > 0 < counts[2]


@pytest.mark.parametrize("many_ranks", [1, 99])
@pytest.mark.parametrize("is_copied", [False, True])
def test_kv_router_balanced_copies_a_prefix_of_many_requests_to_an_idle_worker(
    is_copied: bool, many_ranks: int
) -> None:
    router = Router(RoutingConfig(block_size=BLOCK, policy="balanced"), random.Random(1), many_ranks=many_ranks)
    for each in range(1, 5):
        router.set_worker(WorkerFacts(each, kv_blocks=10_000))
    prefix, other = list(range(1600)), list(range(10_000, 11_600))
    router.apply(stored(1, prefix))
    router.apply(stored(1, other))
    for number in range(20):
        tail = range(20_000 + 4 * number, 20_004 + 4 * number)
        placed(router, route_request(f"r{number}", [*(prefix if is_copied else other), *tail], worker_id=1))
        router.finish(f"r{number}")
    placed(router, route_request("decoding", [*prefix, 1, 2, 3, 4], worker_id=1))
    router.prefilled("decoding")
    decision = placed(router, route_request("next", [*prefix, 5, 6, 7, 8]))
    assert (decision.worker_id != 1) is is_copied


@pytest.mark.parametrize("many_ranks", [1, 99])
def test_kv_router_balanced_spreads_new_prompts_evenly_over_idle_workers(many_ranks: int) -> None:
    router = Router(RoutingConfig(block_size=BLOCK, policy="balanced"), random.Random(1), many_ranks=many_ranks)
    for each in range(1, 9):
        router.set_worker(WorkerFacts(each, kv_blocks=10_000))
    counts: Counter[int] = Counter()
    for number in range(80):
        first = 10_000 * number
        counts[placed(router, route_request("r", list(range(first, first + 400)))).worker_id] += 1
        router.finish("r")
    assert set(counts.values()) == {10}
    router.remove_worker(3)
    router.set_worker(WorkerFacts(3, kv_blocks=10_000))
    assert placed(router, route_request("r", [1] * 400)).worker_id == 3, "a new worker has no recent requests"


REMOTE = {"overlap_score_credit": 0.0, "assume_kv_reuse": False, "track_prefill_tokens": False}


def test_kv_router_balanced_learns_the_duration_of_transfers_by_domain() -> None:
    router = make(0, policy="balanced")
    for worker_id, zone in ((1, "a"), (2, "b")):
        taints = frozenset({f"dynamo.topology/zone={zone}"})
        router.set_worker(WorkerFacts(worker_id, kv_blocks=50_000, taints=taints))
    lengths = [400, 4000, 1200, 8000, 2400]
    for at in range(200):
        tokens, now = [at * 10_000 + one for one in range(lengths[at % 5])], at * 10.0
        requested = route_request("r", tokens, worker_id=at % 2 + 1, overrides=REMOTE)
        requested.near_taint = "dynamo.topology/zone=a"
        router.place(requested, now)
        pace_s = (1e-5, 9e-5)[at % 2]
        router.prefilled("r", now + len(tokens) * pace_s + router.pace.step(1, 0))
        router.finish("r", now + 9)
    movement = router.pace.movement
    assert movement.near.first == pytest.approx(1e-5, rel=0.1)
    assert movement.far.first == pytest.approx(9e-5, rel=0.1)
    for zone, worker_id in (("a", 1), ("b", 2)):
        requested = route_request("s", list(range(4000)), overrides=REMOTE, near_taint=f"dynamo.topology/zone={zone}")
        assert placed(router, requested, 5000).worker_id == worker_id
        router.finish("s", 5001)


def test_kv_router_balanced_decode_worker_with_cached_blocks_needs_a_shorter_transfer() -> None:
    router = make(3, policy="balanced")
    router.apply(stored(2, PROMPT[:36]))
    assert placed(router, route_request("a", PROMPT, overrides=REMOTE)).worker_id == 2


def test_kv_router_balanced_does_not_learn_transfers_from_prompts_that_are_still_computed() -> None:
    router = make(1, policy="balanced")
    placed(router, route_request("a", PROMPT, overrides=REMOTE, is_computed=False))
    assert not len(router.pace.movement)
    placed(router, route_request("b", PROMPT, overrides=REMOTE))
    assert len(router.pace.movement) == 1


def test_kv_router_balanced_learns_the_duration_of_copies_from_host_memory() -> None:
    """Slow copies are no longer preferred to a prefill; fast ones are."""
    for pace_s, chosen in ((1e-6, 2), (9e-5, 1)):
        router = make(1, policy="balanced")
        router.set_worker(WorkerFacts(2))
        for at in range(400):
            first = 100_000 + at * 1000
            tokens = list(range(first, first + (40, 400)[at % 2]))
            router.apply(stored(2, tokens[: (at % 5) * 8], "host_pinned"))
            decision = placed(router, route_request("r", tokens, worker_id=2), at)
            uncached = len(tokens) - decision.host_blocks * BLOCK
            took = decision.host_blocks * BLOCK * pace_s + uncached * router.pace.prefill_token_s
            router.prefilled("r", at + took + router.pace.step(1, 0))
            router.finish("r", at + 0.9)
        assert router.pace.movement.tiers.first == pytest.approx(pace_s, rel=0.2, abs=1e-6)
        router.apply(stored(2, long := list(range(4000)), "host_pinned"))
        assert placed(router, route_request("s", long), 1e4).worker_id == chosen


def test_kv_router_balanced_counts_blocks_in_host_memory_as_computed() -> None:
    router = make(1, policy="balanced")
    router.apply(stored(1, PROMPT[:20], "host_pinned"))
    placed(router, route_request("a", PROMPT))
    assert router.loads()[1, 0][0] == 20


def test_kv_router_index_dump_restores_an_equal_index() -> None:
    router = make(2)
    for worker_id, length in ((1, 40), (2, 16)):
        router.apply(stored(worker_id, PROMPT[:length]))
    router.apply(stored(2, PROMPT[:28], "host_pinned"))
    other = KvIndex()
    for worker_event in events.dump(router.index):
        assert events.apply(other, worker_event)
    blocks = packed_block_hashes(PROMPT, BLOCK)
    assert other.depth_by_rank(other.find(blocks)) == {(1, 0): 10, (2, 0): 4}
    assert {worker_event.worker_id for worker_event in events.dump(router.index, frozenset({2}))} == {2}
    gone = WorkerKvEvent(1, "device", "worker", NumberedKvEvent(9, "cleared", 0))
    assert events.apply(other, gone)
    assert other.depth_by_rank(other.find(blocks)) == {(2, 0): 4}
    unknown = KvEventData(removed=Removed([12345]))
    assert not events.apply(other, WorkerKvEvent(2, "device", "worker", NumberedKvEvent(9, unknown, 0)))
    assert events.apply(other, WorkerKvEvent(2, "external", "worker", NumberedKvEvent(9, unknown, 0)))


class RouterMachine(RuleBasedStateMachine):
    """Workers that start and stop, and requests in any phase."""

    config: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.router = make(0, queue_threshold=0.5, **self.config)
        self.count = 0
        self.under_way: dict[str, int] = {}
        self.waiting: set[str] = set()
        self.now = 0.0

    @rule(worker=st.integers(1, 4), ranks=st.integers(1, 2))
    def come(self, worker: int, ranks: int) -> None:
        before = self.router.workers.get(worker)
        self.router.set_worker(WorkerFacts(worker, dp_size=ranks, batch_tokens=40))
        if before is not None and before.dp_size > ranks:
            self.under_way = {name: its for name, its in self.under_way.items() if name in self.router.active}

    @rule(worker=st.integers(1, 4))
    def go(self, worker: int) -> None:
        lost = self.router.remove_worker(worker)
        assert set(lost) == {name for name, its in self.under_way.items() if its == worker}
        for name in lost:
            del self.under_way[name]

    @rule(worker=st.integers(1, 4), length=st.integers(0, 40), rank=st.integers(0, 1))
    def publish_event(self, worker: int, length: int, rank: int) -> None:
        self.router.apply(stored(worker, PROMPT[:length], dp_rank=rank))

    @rule(length=st.integers(0, 40), pinned=st.none() | st.integers(1, 4), is_remote=st.booleans())
    def request(self, length: int, pinned: int | None, *, is_remote: bool) -> None:
        self.count += 1
        name = f"r{self.count}"
        overrides = {"track_prefill_tokens": False} if is_remote else None
        requested = route_request(name, PROMPT[:length], worker_id=pinned, overrides=overrides)
        try:
            decision = self.router.place(requested, self.now)
        except (NotReady, InvalidArgument):
            assert not self.router.workers or pinned not in self.router.workers
            return
        if decision is None:
            self.waiting.add(name)
        else:
            assert pinned in (None, decision.worker_id)
            self.under_way[name] = decision.worker_id

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.under_way:
            name = data.draw(st.sampled_from(sorted(self.under_way)))
            assert self.router.finish(name)
            del self.under_way[name]

    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        if self.under_way:
            self.router.prefilled(data.draw(st.sampled_from(sorted(self.under_way))), self.now)

    @rule()
    def admit(self) -> None:
        self.now += 1
        for requested, decision in self.router.admit(self.now):
            self.waiting.remove(requested.request_id)
            if isinstance(decision, Decision):
                assert decision.worker_id in self.router.workers
                self.under_way[requested.request_id] = decision.worker_id

    @invariant()
    def is_consistent(self) -> None:
        self.router.validate()
        assert len(self.router.active) == len(self.under_way)
        assert len(self.router.waiting) == len(self.waiting)
        assert len(self.router.pace.movement) <= len(self.under_way), "a request that ended is remembered"
        for times in (self.router.pace.movement.near, self.router.pace.movement.tiers):
            assert min(times.constant, times.first, times.second) >= 0


class BalancedRouterMachine(RouterMachine):
    """The same with the policy `balanced`, which learns from first tokens."""

    config: dict[str, Any] = {"policy": "balanced"}


RouterMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
BalancedRouterMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestRouterMachine = RouterMachine.TestCase
TestBalancedRouterMachine = BalancedRouterMachine.TestCase


def test_kv_router_weights_equal_those_of_released_dynamo() -> None:
    assert CostWeights() == RoutingConfig().weights
    assert (CostWeights().overlap_score_credit, CostWeights().host_cache_hit_weight) == (1.0, 0.75)


def test_kv_router_expires_a_session_whose_request_was_never_released() -> None:
    router = make(2, affinity_ttl_s=60, expiry_s=300.0)
    assert router.affinity is not None
    forgotten, lost = (RouteRequest(name, b"", 4, session=name) for name in ("forgotten", "lost"))
    router.place(forgotten, 0.0)
    decision = router.place(lost, 0.0)
    assert decision is not None
    router.remove_worker(decision.worker_id)
    router.expire(301.0)
    router.expire(362.0)
    assert len(router.affinity) == 0
    assert len(router.active) == 0


def test_kv_router_counts_placements_of_other_routers_by_sequence_hash() -> None:
    router = make(2)
    router.share("theirs", (1, 0), b"\1" * 24, 8, 0.0)
    assert not router.share("unknown-session", (9, 0), b"", 8, 0.0)
    assert router.is_active("theirs")
    assert router.loads()[(1, 0)] == (8, 3, 1)
    decision = router.place(RouteRequest("ours", b"\2" * 24, 12, worker_id=1, sequence=b"\1" * 24), 0.0)
    assert decision is not None
    assert router.loads()[(1, 0)] == (20, 3, 2), "its blocks are the other's"
    router.finish("theirs")
    router.finish("ours")
    router.validate()


def test_kv_router_credits_shared_cache_blocks_beyond_the_workers_own() -> None:
    router = make(2)
    router.apply(stored(1, PROMPT[:8]))

    decision = placed(router, route_request("a", PROMPT, shared=((0, 6), (7, 10))))

    explained = router.explain(decision)
    assert [(one.worker_id, one.device, one.shared, one.saved) for one in explained.candidates] == [
        (1, 2, 4, 4.0),
        (2, 0, 6, 3.0),
    ]
    assert router.active.prefill_of("a") == 40 - 16


def test_kv_router_ignores_shared_cache_blocks_behind_a_hole() -> None:
    router = make(1)

    decision = placed(router, route_request("a", PROMPT, shared=((2, 6),)))

    assert router.explain(decision).candidates[0].shared == 0


def test_kv_router_decays_active_prefill_over_its_expected_duration() -> None:
    router = make(2, prefill_load_model="ais", prefill_estimate=(10.0, 0.0, 0.0))
    first = placed(router, route_request("a", PROMPT))

    later = router.place(route_request("b", PROMPT[20:]), 5.0, book=False)

    assert later is not None
    tokens = {one.worker_id: one.active_prefill_tokens for one in router.explain(later).candidates}
    assert tokens[first.worker_id] == 20
    assert router.loads()[(first.worker_id, 0)][0] == 40, "the books have it in full"
    router.finish("a", 6.0)
    router.validate()
    assert router.active.decay is not None and len(router.active.decay) == 0


def test_kv_router_admits_a_queued_request_when_active_prefill_has_decayed() -> None:
    router = make(1, prefill_load_model="ais", prefill_estimate=(10.0, 0.0, 0.0), queue_threshold=0.2)
    placed(router, route_request("a", PROMPT))
    assert router.place(route_request("b", PROMPT[20:]), 1.0) is None

    assert router.admit(2.0) == []
    assert [requested.request_id for requested, _ in router.admit(9.0)] == ["b"]


def test_kv_router_stores_the_prompts_of_a_session() -> None:
    router = make(1, session_prefixes=True)
    for length in (8, 16):
        placed(router, route_request(f"r{length}", PROMPT[:length], session="s"))
    assert router.sessions is not None
    assert router.sessions.of("s") == [packed_block_hashes(PROMPT[:16], BLOCK)]

    placed(router, route_request("last", PROMPT, session="s", is_last=True))
    assert len(router.sessions) == 0


@pytest.mark.parametrize(("policy", "computed"), [("balanced", 48), ("dynamo", 88)])
def test_kv_router_balanced_counts_a_prompt_in_progress_as_cached_before_its_event(policy: str, computed: int) -> None:
    router = make(1, policy=policy)
    placed(router, route_request("a", PROMPT))
    placed(router, route_request("b", [*PROMPT, *range(100, 108)]))
    assert router.loads()[(1, 0)][0] == computed


@pytest.mark.parametrize(("policy", "is_counted"), [("dynamo", False), ("balanced", True)])
def test_kv_router_counts_recent_requests_only_for_the_policy_that_uses_them(policy: str, is_counted: bool) -> None:
    router = make(policy=policy)
    placed(router, route_request("a", PROMPT))
    assert any(router.active.recent) == is_counted


def test_kv_router_leaves_decisions_and_events_out_of_garbage_collection() -> None:
    """Hundreds of decisions are kept and thousands of events decoded in a second: a collection would visit all of them."""
    router = make()
    decision = placed(router, route_request("a", PROMPT))
    snapshot = decision.snapshot
    event = stored(1, PROMPT)
    data = event.event.data
    assert isinstance(data, KvEventData)
    assert data.stored is not None
    kept = [decision, snapshot, snapshot.load, snapshot.prompt, snapshot.route_request]
    received = [event, event.event, data, data.stored, *data.stored.blocks, Removed([1])]
    assert [one for one in (*kept, *received) if gc.is_tracked(one)] == []
