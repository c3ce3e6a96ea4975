"""Coast: coasting over steps that allocate blocks changes no time, no placement and no statistic."""

from typing import Any

import msgspec
import pytest

from dynamo.mocker.simulation.scheduler import Simulation
from dynamo.replay.cluster_state import ClusterState
from dynamo.replay.coast import Coast
from dynamo.replay.engine import EngineArgs
from dynamo.replay.load import ReplaySession
from dynamo.replay.outcome import RunOutcome
from dynamo.replay.plan import Failure
from dynamo.replay.report import rows_of, summary_of
from dynamo.replay.scenario import Scenario

APPROXIMATE = ("itl", "per_user")
"""Statistics over all tokens, from a histogram."""


def facts(outcome: RunOutcome) -> dict[str, Any]:
    """Return times and places of all requests, and the summary."""
    times = {
        one.key: (one.slot, one.prefill_slot, one.first_ms, one.second_ms, one.finished_ms, one.migrations)
        for one in outcome.flights
    }
    levels = {
        name: [outcome.timeline.level(name, place) for place in range(outcome.timeline.places)]
        for name in ("running", "waiting", "used_blocks")
    }
    return {"times": times, "levels": levels, **summary_of(outcome, rows_of(outcome.flights))}


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "few blocks": {"engine": {"num_gpu_blocks": 200}},
    "fewest blocks": {"engine": {"num_gpu_blocks": 90}},
    "trtllm": {"engine": {"engine_type": "trtllm", "num_gpu_blocks": 200}},
    "sglang": {"engine": {"engine_type": "sglang", "num_gpu_blocks": 200}},
    "no delays": {"engine": {"speedup_ratio": 0.0}},
    "lag": {"event_lag_ms": 25.0},
    "queue": {"router_settings": {"router_queue_threshold": 0.2}},
    "failures": {"failures": (Failure(900.0, 0, 500.0), Failure(2100.5, 1, 100.0))},
    "disaggregated": {"prefill_workers": 2, "engine": {"kv_transfer_timing_mode": "destination_missing"}},
    "sglang, disaggregated": {"prefill_workers": 2, "engine": {"engine_type": "sglang", "kv_transfer_bandwidth": 0.5}},
    "round robin": {"router_mode": "round_robin"},
}


@pytest.mark.parametrize("case", CASES)
def test_runs_with_and_without_crossed_borders_are_equal(
    case: str, engine: EngineArgs, chatty: list[ReplaySession], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = dict(CASES[case])
    args = msgspec.structs.replace(engine, **given.pop("engine", {}))
    scenario = Scenario(
        **{"sessions": chatty, "workers": 2, "router_mode": "kv_router", "engine": args, "block_tokens": 64, **given}
    )
    crossed: list[int] = []

    def cross(self: Coast) -> list[Any]:
        crossed.append(self.border)
        return original(self)

    original = Coast.cross
    monkeypatch.setattr(Coast, "cross", cross)
    found = facts(scenario.run())
    assert bool(crossed) == (not case.startswith("sglang")), "borders are crossed where the engine allows it"

    monkeypatch.setattr(ClusterState, "crosses", lambda self: False)
    expected = facts(scenario.run())
    for name, value in expected.items():
        if any(part in name for part in APPROXIMATE):
            assert found[name] == pytest.approx(value, rel=2e-3), name
        elif name == "levels":
            for level, tracks in value.items():
                for track, other in zip(tracks, found[name][level], strict=True):
                    assert other == pytest.approx(track), level
        else:
            assert found[name] == pytest.approx(value, rel=1e-9) if isinstance(value, float) else found[name] == value


def test_output_tokens_are_counted_in_the_interval_of_their_step(
    engine: EngineArgs, chatty: list[ReplaySession], monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = Scenario(sessions=chatty, workers=1, engine=engine, block_tokens=64, interval_ms=200.0)
    found = scenario.run()
    monkeypatch.setattr(Simulation, "coast_steps", lambda self, **given: 0)
    expected = scenario.run()
    assert found.timeline.counted("output_tokens", 0) == expected.timeline.counted("output_tokens", 0)
