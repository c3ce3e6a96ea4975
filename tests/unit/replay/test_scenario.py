"""Scenarios: the same one has the same outcome in every process, and a pinned one as long as the model does not change.

After an intended change of the model, the failures show the new digests. `balanced` is not pinned: its weights are tuned.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dynamo.replay.engine import EngineArgs
from dynamo.replay.outcome import RunOutcome
from dynamo.replay.plan import Failure
from dynamo.replay.report import rows_of, summary_of
from dynamo.replay.scenario import Scenario
from dynamo.replay.synthetic import Shape, sessions

LOAD = sessions(
    Shape(
        input_tokens=1500,
        output_tokens=60,
        requests=240,
        turns=2,
        shared_prefix_ratio=0.5,
        prefix_groups=12,
        inter_turn_delay_ms=200.0,
        request_rate=40.0,
        block_tokens=128,
        seed=5,
    )
)
BASE = Scenario(sessions=LOAD, workers=3, router_mode="kv_router", block_tokens=128)


def scenarios() -> Iterator[tuple[str, Scenario]]:
    """Yield scenarios of every policy and engine, with and without disaggregation, failures and small caches."""
    for mode in ("round_robin", "kv_router", "balanced", "least_loaded", "power_of_two"):
        yield mode, replace(BASE, router_mode=mode)
    yield "temperature and lag", replace(BASE, event_lag_ms=20.0, router_settings={"router_temperature": 0.5}, seed=2)
    yield "sglang", replace(BASE, engine=EngineArgs(engine_type="sglang"))
    yield "sglang, few blocks", replace(BASE, engine=EngineArgs(engine_type="sglang", num_gpu_blocks=300))
    yield (
        "trtllm, few blocks",
        replace(BASE, engine=EngineArgs(engine_type="trtllm", block_size=32, num_gpu_blocks=600)),
    )
    yield "vllm, few blocks", replace(BASE, engine=EngineArgs(num_gpu_blocks=300))
    yield "multi_lru", replace(BASE, engine=EngineArgs(eviction_backend="multi_lru", num_gpu_blocks=500))
    yield "host tier", replace(BASE, engine=EngineArgs(num_gpu_blocks=400, num_host_blocks=2000))
    yield "two ranks", replace(BASE, engine=EngineArgs(dp_size=2))
    yield "disaggregated", replace(BASE, workers=2, prefill_workers=2)
    yield "failure", replace(BASE, failures=(Failure(2000.0, 1, 1500.0),))
    yield "closed loop", replace(BASE, concurrency=30)


def digest(outcome: RunOutcome) -> str:
    """Return a hash of all times and placements, to a thousandth of a millisecond, and of the counts of the summary."""
    found = hashlib.sha256()
    for one in outcome.flights:
        times = (one.placed_ms, one.first_ms, one.second_ms, one.finished_ms, one.waited_ms)
        places = (one.key, one.slot, one.prefill_slot, one.cached_tokens, one.migrations)
        found.update(repr((places, [f"{value:.3f}" for value in times])).encode())
    summary = summary_of(outcome, rows_of(outcome.flights))
    found.update(repr(sorted((key, value) for key, value in summary.items() if isinstance(value, int))).encode())
    return found.hexdigest()[:12]


DIGESTS = {
    "round_robin": "02c7d329dcbe",
    "kv_router": "88109a526e09",
    "least_loaded": "d42e1f9274f6",
    "power_of_two": "01cbe18a9849",
    "temperature and lag": "6f0502b78353",
    "sglang": "ead03878f533",
    "sglang, few blocks": "02e838d55de8",
    "trtllm, few blocks": "107bcb2d5381",
    "vllm, few blocks": "7804eda5a9b9",
    "multi_lru": "622919117a8a",
    "host tier": "5dd38fc99845",
    "two ranks": "4c37146ecb1f",
    "disaggregated": "7fe272b2018f",
    "failure": "b61eab680599",
    "closed loop": "f7cc1075e899",
}


@pytest.mark.parametrize(("name", "scenario"), list(scenarios()), ids=[name for name, _ in scenarios()])
def test_outcome_is_deterministic_and_the_pinned_one(name: str, scenario: Scenario) -> None:
    expected = DIGESTS[name] if name in DIGESTS else digest(scenario.run())
    assert digest(scenario.run()) == expected


def test_seed_changes_the_placements() -> None:
    scenario = dict(scenarios())["temperature and lag"]
    assert digest(scenario.run()) != digest(replace(scenario, seed=3).run())
