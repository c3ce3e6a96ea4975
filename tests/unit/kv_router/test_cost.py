"""Cost of a rank from its load and the prompt; the cheapest rank is chosen."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.errors import InvalidArgument
from dynamo.kv_router.config import CostWeights
from dynamo.kv_router.cost import NEVER, Prompt, RankLoads, choose, costs, taint_factor, terms

BLOCK = 4


def prompt(tokens: int, device: dict[int, int] | None = None, **more: dict[int, int]) -> Prompt:
    host, disk, beyond, active = (more.pop(name, {}) for name in ("host", "disk", "shared_beyond", "active"))
    assert not more
    return Prompt(tokens, tokens // BLOCK, device or {}, host, disk, beyond, active)


def idle(slots: int = 1) -> RankLoads:
    return RankLoads([0] * slots, [0] * slots, [0] * slots)


@pytest.mark.parametrize(
    ("tokens", "hits", "expected"),
    [(3, 0, 0.75), (6, 0, 2.5), (6, 1, 1.5), (9, 1, 3.25), (9, 2, 2.25), (8, 2, 2.0)],
)
def test_cost_of_an_idle_worker_equals_that_of_the_released_router(tokens: int, hits: int, expected: float) -> None:
    assert costs([0], idle(), prompt(tokens, {0: hits} if hits else {}), CostWeights(), BLOCK) == [expected]


def test_cost_credits_slower_tiers_less() -> None:
    requested = prompt(16, {0: 1}, host={0: 1}, disk={0: 1}, shared_beyond={0: 1})
    found = terms(0, idle(), requested, CostWeights(), BLOCK, 0)
    assert found.saved == 1 + 0.75 + 0.25 + 0.5
    assert found.cost == 4 - 2.5 + 4


def test_cost_credit_shrinks_with_queued_prefill() -> None:
    load = RankLoads([32, 0], [0, 0], [0, 0])
    requested = prompt(16, {0: 4})
    assert terms(0, load, requested, CostWeights(overlap_score_credit_decay=1), BLOCK, 0).saved == 4 / (1 + 2)


def test_cost_of_a_decode_worker_counts_blocks_to_transfer() -> None:
    weights = CostWeights(track_prefill_tokens=False, decode_active_request_weight=0.5)
    assert costs([0], RankLoads([99], [3], [2]), prompt(16, {0: 1}), weights, BLOCK) == [3 + 4 - 1 + 1]


def test_cost_does_not_count_active_blocks_as_new() -> None:
    requested = prompt(16, active={0: 3})
    assert costs([0], idle(), requested, CostWeights(), BLOCK) == [4 + 1]
    assert costs([0], idle(), requested, CostWeights(assume_kv_reuse=False), BLOCK) == [4 + 4]


slots = st.integers(0, 5)
overlaps = st.dictionaries(slots, st.integers(1, 5), max_size=3)


@given(
    tokens=st.integers(0, 40),
    load=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, 9)), min_size=6, max_size=6),
    held=st.tuples(overlaps, overlaps, overlaps, overlaps, overlaps),
    weights=st.builds(
        CostWeights,
        overlap_score_credit=st.floats(0, 2),
        overlap_score_credit_decay=st.sampled_from([0.0, 0.5]),
        prefill_load_scale=st.floats(0, 9),
        decode_active_request_weight=st.sampled_from([0.0, 1.5]),
        assume_kv_reuse=st.booleans(),
        track_prefill_tokens=st.booleans(),
    ),
)
def test_cost_fast_path_equals_the_general_path(
    tokens: int, load: list[tuple[int, int, int]], held: tuple[dict[int, int], ...], weights: CostWeights
) -> None:
    state = RankLoads(*zip(*load, strict=True))
    device, host, disk, shared, active = held
    requested = Prompt(tokens, tokens // BLOCK, device, host, disk, shared, active)
    least = min(state.prefill_tokens)
    long = [terms(slot, state, requested, weights, BLOCK, least).cost for slot in range(6)]
    assert costs(range(6), state, requested, weights, BLOCK) == pytest.approx(long)


def test_cost_selection_picks_the_minimum_and_breaks_ties_evenly() -> None:
    rng = random.Random(1)
    assert choose([3.0, 1.0, 2.0], 0, rng) == 1
    drawn = Counter(choose([1.0, 2.0, 1.0, NEVER], 0, rng) for _ in range(2000))
    assert set(drawn) == {0, 2}
    assert abs(drawn[0] - 1000) < 150
    with pytest.raises(ValueError, match="no eligible rank"):
        choose([NEVER], 0, rng)


def test_cost_selection_with_temperature_follows_a_softmax() -> None:
    rng = random.Random(1)
    drawn = Counter(choose([0.0, 5.0, 10.0, NEVER], 0.5, rng) for _ in range(4000))
    odds = [math.exp(-x / 0.5) for x in (0, 0.5, 1)]
    for place, odd in enumerate(odds):
        assert abs(drawn[place] / 4000 - odd / sum(odds)) < 0.04
    assert drawn[3] == 0
    assert {choose([2.0, 2.0], 1.0, rng) for _ in range(50)} == {0, 1}


def test_cost_of_a_preferred_taint_is_lower_within_bounds() -> None:
    assert taint_factor(frozenset("a"), {"a": 0.5}) == math.exp(-math.tanh(0.5))
    assert taint_factor(frozenset("b"), {"a": 0.5}) == 1
    assert taint_factor(frozenset("a"), {"a": -99}) == pytest.approx(math.e)


def test_cost_weights_can_be_overridden_by_a_request() -> None:
    changed = CostWeights().overridden({"overlap_score_credit": 0, "assume_kv_reuse": False, "of_later": 1})
    assert (changed.overlap_score_credit, changed.assume_kv_reuse) == (0, False)
    assert CostWeights().overridden(None) is not None
    with pytest.raises(InvalidArgument, match="overlap_score_credit"):
        CostWeights().overridden({"overlap_score_credit": "much"})
    with pytest.raises(InvalidArgument, match="router_temperature: must be at least 0, not -1"):
        CostWeights().overridden({"router_temperature": -1})


def test_decay_of_the_credit_has_no_pole_for_a_rank_with_less_prefill_than_the_eligible_ones() -> None:
    state = RankLoads([0, 2 * BLOCK], [0, 0], [0, 0])
    requested = prompt(BLOCK, {0: 1, 1: 1})
    weights = CostWeights(overlap_score_credit_decay=0.5)
    found = terms(0, state, requested, weights, BLOCK, 2 * BLOCK)
    assert found.saved == weights.overlap_score_credit
