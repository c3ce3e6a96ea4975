"""The production planner in the simulator: scaling, records, metric faults, failures of workers."""

import random
from pathlib import Path

import pytest

from dynamo.core.config import load
from dynamo.core.errors import ConfigError
from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.config.planner_config import PlannerConfig, parse
from dynamo.planner.core.record import replay
from dynamo.protocols.planner import FpmObservations, TickInput
from dynamo.replay.config import ReplayConfig
from dynamo.replay.core_planner import CorePlanner, FaultyObserver, Lines, MetricFaults, planner_config
from dynamo.replay.engine import EngineArgs
from dynamo.replay.load import ReplaySession, Turn
from dynamo.replay.outcome import RunOutcome
from dynamo.replay.page import page
from dynamo.replay.plan import Failure
from dynamo.replay.report import Objectives, rows_of, summary_of
from dynamo.replay.scenario import Scenario

ENGINE = EngineArgs(startup_time=10.0)
FORECAST = {
    "optimization_target": "sla",
    "scaling_policy": "forecast",
    "mode": "agg",
    "ttft_ms": 2000,
    "max_gpu_budget": 4,
}


def sessions(rate: float, seconds: float, seed: int = 1) -> list[ReplaySession]:
    rng, at, found = random.Random(seed), 0.0, list[ReplaySession]()
    while (at := at + rng.expovariate(rate)) < seconds:
        number = len(found)
        found.append(
            ReplaySession(f"{number}", [Turn(f"{number}", 4000, 20, range(8 * number, 8 * number + 8), at * 1000)])
        )
    return found


def run(raw: dict[str, object], faults: MetricFaults | None = None, **more: object) -> RunOutcome:
    config = parse(raw)
    made = lambda: CorePlanner(config, {EngineRole.AGGREGATED: ENGINE}, faults or MetricFaults())  # noqa: E731
    return Scenario(sessions=sessions(6.0, 60.0), workers=1, engine=ENGINE, planner=made, **more).run()  # type: ignore[arg-type]


def requested(outcome: RunOutcome) -> list[int]:
    assert outcome.planner is not None
    return [event["to"] for event in outcome.planner.scaling_events]


def test_planner_scales_simulated_workers_within_the_budget() -> None:
    outcome = run(FORECAST)
    assert 1 < max(requested(outcome)) <= 4
    assert outcome.unfinished == 0


def test_summary_has_gpu_hours_goodput_per_gpu_and_events() -> None:
    outcome = run(FORECAST)
    summary = summary_of(outcome, rows_of(outcome.flights), Objectives(2000, 50))
    assert summary["gpu_hours"] == pytest.approx(outcome.worker_ms / 3_600_000)
    assert summary["goodput_tok_s_per_gpu"] == pytest.approx(summary["goodput_tok_s"] / summary["mean_gpus"])
    assert summary["scaling_events"] == len(requested(outcome))


def test_page_lists_decisions_with_their_reasons() -> None:
    outcome = run(FORECAST)
    text = page({"run": outcome}, {"run": summary_of(outcome, rows_of(outcome.flights))})
    assert "Decisions of run" in text
    assert "demand and backlog over" in text


def test_each_tick_reports_reason_and_estimates() -> None:
    outcome = run(FORECAST)
    assert outcome.planner is not None
    found = outcome.planner.ticks[2]["diagnostics"]
    assert found["load_reason"] in {"scale_up", "no_change"}
    assert found["forecast"]["decode"]["demand"] > 0


def test_failed_worker_is_replaced() -> None:
    outcome = run(FORECAST, failures=(Failure(30_000.0, 0),))
    assert outcome.planner is not None
    at_end = [row["worker_counts"]["ready_num_decode"] for row in outcome.planner.ticks[-3:]]
    assert min(at_end) >= 1
    assert outcome.unfinished == 0


@pytest.mark.parametrize("seed", range(3))
def test_lost_and_late_metrics_never_exceed_the_budget_and_lose_no_request(seed: int) -> None:
    outcome = run(FORECAST, MetricFaults(delay_s=10.0, loss=0.5, seed=seed))
    assert all(1 <= target <= 4 for target in requested(outcome))
    assert outcome.unfinished == 0


def test_delayed_observation_is_the_one_of_the_past() -> None:
    observer = FaultyObserver(MetricFaults(delay_s=10.0))
    seen = [TickInput(now_s=5.0 * at, fpm_observations=FpmObservations()) for at in range(4)]
    received = [observer.observed(one) for one in seen]
    assert received[1].fpm_observations is None
    assert received[2].fpm_observations is seen[0].fpm_observations
    assert received[3].fpm_observations is seen[1].fpm_observations
    assert received[3].now_s == seen[3].now_s


def test_record_of_a_simulation_replays_to_the_same_decisions(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    config = parse(FORECAST)
    made = lambda: CorePlanner(config, {EngineRole.AGGREGATED: ENGINE}, sink=Lines(str(path)).write)  # noqa: E731
    Scenario(sessions=sessions(6.0, 40.0), workers=1, engine=ENGINE, planner=made).run()
    with path.open("rb") as lines:
        ticks = list(replay(lines))
    assert len(ticks) >= 6
    assert all(bytes(tick.decision) == again for tick, again in ticks)


def test_upstream_policies_run_with_a_performance_model_from_the_engine() -> None:
    raw = {**FORECAST, "scaling_policy": "standard", "enable_load_scaling": True, "load_predictor": "kalman"}
    outcome = run(raw)
    assert outcome.planner is not None
    reasons = {row["diagnostics"]["load_reason"] for row in outcome.planner.ticks}
    assert reasons - {"insufficient_data", "unset"}


def test_mode_defaults_to_that_of_the_cluster_and_must_match_it() -> None:
    assert planner_config("{}", is_disaggregated=False).mode.value == "agg"
    assert planner_config("{}", is_disaggregated=True).mode.value == "disagg"
    with pytest.raises(ConfigError, match="mode disagg: must be agg for these workers"):
        run({**FORECAST, "mode": "disagg"})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--planner-config", "nope"], "--planner-config value is neither"),
        (["--planner-config", '{"ttft": -1}'], "--planner-config: ttft_ms: -1"),
        (["--planner-record", "x"], "require --planner-config"),
        (["--planner-config", "{}", "--scale-load", "on"], "mutually exclusive"),
        (["--planner-config", "{}", "--planner-metrics-loss", "2"], "--planner-metrics-loss 2: must be a probability"),
    ],
)
def test_wrong_flags_are_one_line(flags: list[str], message: str) -> None:
    made_up = ["--input-tokens", "100", "--output-tokens", "10", "--request-count", "1", "--request-rate", "1"]

    def scenarios() -> None:
        config = load(ReplayConfig, [*made_up, *flags], prog="replay")
        config.scenarios(config.source())

    with pytest.raises(ConfigError, match=message):
        scenarios()


def test_planner_config_has_forecast_as_an_option_only() -> None:
    assert PlannerConfig().scaling_policy.value == "standard"
