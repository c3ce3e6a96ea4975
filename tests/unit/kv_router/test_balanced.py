"""Balanced cost function: preferences and calibration."""

import math
import random
from collections.abc import Sequence

import pytest

from dynamo.kv_router.balanced import (
    OCCUPANCY_WEIGHT,
    TRANSFER_WEIGHT,
    Pace,
    balanced_costs,
)
from dynamo.kv_router.balanced import RECOMPUTE_WEIGHT_FILLED as FILLED
from dynamo.kv_router.balanced import RECOMPUTE_WEIGHT_IDLE as IDLE
from dynamo.kv_router.balanced import RECOMPUTE_WEIGHT_MAX as MAX
from dynamo.kv_router.config import CostWeights
from dynamo.kv_router.cost import Prompt, RankLoads
from dynamo.kv_router.movement import Movement

BLOCK = 16


def costs(
    load: RankLoads,
    prompt: Prompt,
    weights: CostWeights | None = None,
    output: int | None = None,
    capacity: Sequence[float] | None = None,
) -> list[float]:
    slots = range(len(load.requests))
    capacity = [math.inf] * len(slots) if capacity is None else capacity
    return balanced_costs(slots, load, prompt, weights or CostWeights(), Pace(), BLOCK, output, capacity)


def prompt(tokens: int, **device: int) -> Prompt:
    held = {int(slot[1:]): blocks for slot, blocks in device.items()}
    return Prompt(tokens, tokens // BLOCK, held, {}, {}, {}, {})


def test_recompute_weight_grows_with_busy_workers_and_occupied_caches() -> None:
    pace = Pace(output_tokens=100)
    assert pace.recompute_weight == IDLE
    weights = []
    for _ in range(200):
        pace.observe_load(0.2, 0.0)
        weights.append(pace.recompute_weight)
    assert weights == sorted(weights)
    assert weights[-1] == pytest.approx(IDLE + (MAX - IDLE) / 4, rel=0.01)
    for _ in range(200):
        pace.observe_load(1.0, 0.0)
    assert pace.recompute_weight == MAX
    for _ in range(400):
        pace.observe_load(0.0, 0.0)
    assert pace.recompute_weight == pytest.approx(IDLE, abs=0.01)
    for _ in range(400):
        pace.observe_load(0.0, 0.5)
    assert pace.recompute_weight == pytest.approx(IDLE + OCCUPANCY_WEIGHT / 2, abs=0.01)


@pytest.mark.parametrize(("tokens", "factor"), [(20, 1.0), (200, 1.0), (400, 2.0), (600, 3.0), (5000, 4.0)])
def test_recompute_weight_of_idle_workers_grows_with_the_duration_of_answers(tokens: int, factor: float) -> None:
    pace = Pace(output_tokens=tokens, step_s=6e-3)
    pace.observe_load(0.0, 0.0)
    assert pace.recompute_weight == pytest.approx(IDLE * factor)
    for _ in range(400):
        pace.observe_load(1.0, 0.0)
    assert pace.recompute_weight == pytest.approx(max(MAX, IDLE * factor))


def test_recompute_weight_grows_as_caches_fill_up() -> None:
    pace = Pace(output_tokens=100)
    weights = []
    for filled in (0.5, 0.7, 0.825, 0.95, 1.2):
        for _ in range(400):
            pace.observe_load(0.0, 0.0, filled)
        weights.append(pace.recompute_weight)
    assert weights == pytest.approx([IDLE, IDLE, (IDLE + FILLED) / 2, FILLED, FILLED], abs=0.01)


def test_balanced_cost_prefers_cached_blocks() -> None:
    idle = RankLoads([0, 0], [0, 0], [0, 0])
    one, other = costs(idle, prompt(1600, s1=90))
    assert other < one


def test_balanced_cost_prefers_ranks_without_recent_requests_if_they_are_otherwise_equal() -> None:
    load = RankLoads([0] * 4, [0] * 4, [0] * 4, recent=[0.0, 10.0, 20.0, 90.0], recent_scale=0.1)
    found = costs(load, prompt(1600))
    assert found[0] < found[1] < found[2] == found[3], "above twice the mean the number of requests has no effect"
    cached = costs(load, prompt(1600, s3=90))
    assert min(cached) == cached[3], "cached blocks count more"


def test_balanced_cost_prefers_less_queued_prefill() -> None:
    one, other = costs(RankLoads([5000, 100], [10, 10], [1, 1]), prompt(1600))
    assert other < one


def test_balanced_cost_prefers_few_delayed_requests_over_more_cached_blocks() -> None:
    busy, quiet = costs(RankLoads([0, 0], [200, 200], [60, 2]), prompt(16_000, s0=200))
    assert quiet < busy


def test_balanced_cost_accepts_some_load_for_cached_blocks() -> None:
    holder, other = costs(RankLoads([0, 0], [200, 200], [4, 3]), prompt(16_000, s0=900))
    assert holder < other


def test_balanced_cost_ignores_prefill_where_it_is_not_tracked() -> None:
    weights = CostWeights(track_prefill_tokens=False)
    one, other = costs(RankLoads([0, 90_000], [10, 10], [2, 2]), prompt(1600), weights)
    assert one == other


def test_balanced_cost_of_a_decode_worker_falls_with_the_blocks_that_it_has() -> None:
    weights = CostWeights(track_prefill_tokens=False)
    holder, other = costs(RankLoads([0, 0], [10, 10], [2, 2]), prompt(1600, s0=50), weights)
    assert other - holder == pytest.approx(TRANSFER_WEIGHT * 800 * Movement().near.first)


def test_balanced_cost_orders_device_host_disk_and_recomputation() -> None:
    idle = RankLoads([0] * 4, [0] * 4, [0] * 4)
    found = costs(idle, Prompt(1600, 100, {0: 80}, {1: 80}, {2: 80}, {}, {}))
    assert found == sorted(found)
    assert len(set(found)) == 4


def test_balanced_cost_weights_load_by_expected_output_length() -> None:
    load = RankLoads([0, 0], [9000, 100], [50, 1])
    short, long = (costs(load, prompt(160), output=tokens) for tokens in (10, 1000))
    assert long[0] - long[1] > short[0] - short[1] > 0


def test_balanced_cost_counts_what_a_step_reads_for_each_request() -> None:
    """Blocks in common occupy memory once, but every request reads them."""
    load = RankLoads([0, 0], [100, 100], [5, 5], [500, 100])
    crowded, other = costs(load, prompt(1600))
    assert crowded > other


def test_balanced_cost_of_a_full_cache_grows_with_the_missing_blocks() -> None:
    load = RankLoads([0, 0, 0], [900, 900, 900], [9, 9, 9])
    small, large, unknown = costs(load, prompt(1600), capacity=[1000, 4000, math.inf])
    assert small > large == unknown
    assert costs(load, prompt(3200), capacity=[1000, 4000, math.inf])[0] - large > small - large


def test_balanced_cost_counts_shared_blocks_once_against_capacity() -> None:
    load = RankLoads([0, 0], [500, 500], [2, 2])
    requested = Prompt(1600, 100, {}, {}, {}, {}, {0: 100})
    shared, new = costs(load, requested, capacity=[660, 660])
    unlimited_shared, unlimited_new = costs(load, requested)
    assert shared == unlimited_shared
    assert new > unlimited_new


def test_balanced_cost_accepts_a_prompt_larger_than_the_cache_on_an_idle_worker() -> None:
    assert costs(RankLoads([0], [0], [0]), prompt(1600), capacity=[10]) == costs(RankLoads([0], [0], [0]), prompt(1600))


@pytest.mark.parametrize("truth", [(20e-3, 2e-4, 1e-8), (3e-3, 0.0, 2e-7), (10e-3, 1e-3, 0.0)])
def test_balanced_cost_learns_decode_speed(truth: tuple[float, float, float]) -> None:
    base, per_request, per_token = truth
    pace, rng = Pace(), random.Random(1)
    for _ in range(6000):
        requests = rng.randint(1, 100)
        tokens = requests * rng.randint(200, 8000)
        pace.observe(0, requests, tokens, base + per_request * requests + per_token * tokens)
    for requests, tokens in ((10, 20_000), (60, 200_000), (100, 500_000)):
        expected = base + per_request * requests + per_token * tokens
        assert pace.step(requests, tokens) == pytest.approx(expected, rel=0.05)


def test_balanced_cost_learns_step_time_from_identical_steps() -> None:
    pace = Pace()
    for _ in range(3000):
        pace.observe(0, 8, 40_000, 0.03)
    assert pace.step(8, 40_000) == pytest.approx(0.03, rel=0.05)
    assert min(pace.step_s, pace.step_request_s, pace.step_token_s) >= 0
    assert pace.step(16, 80_000) >= pace.step(8, 40_000)


def test_balanced_cost_learns_prefill_speed_during_decoding() -> None:
    pace = Pace()
    for _ in range(400):
        pace.observe(4000, 10, 50_000, 4000 * 8e-5 + pace.step(10, 50_000))
    assert pace.prefill_token_s == pytest.approx(8e-5, rel=0.01)


def test_balanced_cost_ignores_steps_without_duration() -> None:
    pace = Pace()
    for _ in range(200):
        pace.observe(100, 0, 0, 0.0)
        pace.observe(0, 5, 100, 0.0)
    assert pace == Pace()


def test_balanced_cost_learns_output_length() -> None:
    pace = Pace()
    for _ in range(300):
        pace.observe_output(1000)
    assert pace.output_tokens == pytest.approx(1000, rel=0.01)


def observe_two_ranks(pace: Pace, ratio: float, steps: int) -> None:
    """Report steps of two ranks, of which the second takes `ratio` times as long."""
    for at in range(steps):
        requests, context = at % 17 + 1, 2000 * (at % 13 + 1)
        seconds = 6e-3 + 1e-5 * requests + 5e-8 * context
        pace.observe(0, requests, context, seconds, (1, 0))
        pace.observe(0, requests, context, seconds * ratio, (2, 0))


def test_balanced_learns_that_a_rank_is_slower_than_the_others() -> None:
    pace = Pace()
    observe_two_ranks(pace, 2.0, 1500)
    assert pace.uneven[2, 0] / pace.uneven[1, 0] == pytest.approx(2.0, rel=0.05)
    pace.forget((2, 0))
    assert (2, 0) not in pace.uneven


@pytest.mark.parametrize(("ratio", "steps"), [(1.0, 1500), (1.15, 1500), (2.0, 100)])
def test_balanced_treats_ranks_as_equal_unless_many_steps_differ_much(ratio: float, steps: int) -> None:
    pace = Pace()
    observe_two_ranks(pace, ratio, steps)
    assert not pace.uneven


def test_balanced_cost_of_a_slow_rank_is_as_much_higher() -> None:
    slots, load = range(2), RankLoads([0, 0], [10, 10], [3, 3])
    infinite = [math.inf] * 2
    fast, slow = balanced_costs(
        slots, load, prompt(1600), CostWeights(), Pace(), BLOCK, None, infinite, slowness=[1.0, 1.5]
    )
    assert slow == pytest.approx(1.5 * fast)


def test_starts_of_short_prefills_do_not_make_a_rank_slow() -> None:
    pace = Pace()
    for _ in range(1000):
        pace.observe(4096, 0, 0, 0.0165 + 4096 * 2e-5, (1, 0))  # Long prompts on one rank,
        pace.observe(16, 0, 0, 0.0165, (2, 0))  # and prompts that are almost wholly cached on the other.
        for rank in ((1, 0), (2, 0)):
            pace.observe(0, 2, 1000, pace.step(2, 1000), rank)
    assert not pace.uneven
