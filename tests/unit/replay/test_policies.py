"""Policies: a schedule, and load thresholds, and their effect in a cluster."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.core.errors import ConfigError
from dynamo.protocols.load import ForwardPassMetrics, QueuedRequests, ScheduledRequests
from dynamo.protocols.planner import (
    EngineCapabilities,
    FpmObservations,
    PlannerEffects,
    ScalingDecision,
    ScheduledTick,
    TickInput,
    WorkerCounts,
)
from dynamo.replay.engine import EngineArgs
from dynamo.replay.load import ReplaySession
from dynamo.replay.policies import LoadThresholds, ScalingThresholds, Timetable, entry, load_thresholds
from dynamo.replay.report import as_json, report_of
from dynamo.replay.scenario import Scenario

ENGINE = EngineCapabilities(max_num_batched_tokens=1000, max_kv_tokens=10_000)
BUSY = '{"interval_s": 0.5, "decode_up": 0.2, "decode_down": 0.1, "prefill_up": 0.5, "max_workers": 4}'


def passed(worker: int, *, queued: int = 0, held: int = 0) -> ForwardPassMetrics:
    return ForwardPassMetrics(
        1,
        f"{worker}",
        0,
        1,
        0.01,
        ScheduledRequests(sum_decode_kv_tokens=held),
        QueuedRequests(sum_prefill_tokens=queued),
    )


def seen(*loads: tuple[int, int], ready: int | None = None, is_scaling: bool = False) -> TickInput:
    decode = {(at, 0): passed(at, queued=queued, held=held) for at, (queued, held) in enumerate(loads)}
    counts = WorkerCounts(
        ready_num_decode=len(loads) if ready is None else ready, decode_scaling_in_progress=is_scaling
    )
    return TickInput(now_s=5.0, worker_counts=counts, fpm_observations=FpmObservations({}, decode))


def decide(state: TickInput) -> tuple[ScalingDecision | None, str]:
    planner = LoadThresholds(ScalingThresholds())
    tick = planner.begin(None, ENGINE)
    assert tick is not None
    effects = planner.tick(tick, state)
    return effects.scale_to, effects.diagnostics["decode"]


def test_one_worker_over_a_threshold_adds_a_worker() -> None:
    assert decide(seen((0, 0), (1000, 0))) == (ScalingDecision(num_decode=3), "scale_up")
    assert decide(seen((0, 0), (0, 10_000))) == (ScalingDecision(num_decode=3), "scale_up")


def test_all_workers_below_a_threshold_remove_a_worker_if_the_others_have_capacity() -> None:
    assert decide(seen((0, 0), (0, 4000))) == (ScalingDecision(num_decode=1), "scale_down")
    assert decide(seen((0, 0), (0, 5500))) == (None, "no_change")
    assert decide(seen((0, 0))) == (None, "no_change")


def test_policy_does_not_scale_while_workers_change_or_report_nothing() -> None:
    assert decide(seen((1000, 0), is_scaling=True)) == (None, "scaling_in_progress")
    assert decide(seen((1000, 0), ready=2)) == (None, "worker_count_mismatch")
    assert decide(seen(ready=1)) == (None, "no_fpm_data")


def test_policy_never_exceeds_the_maximum_number_of_workers() -> None:
    assert decide(seen(*[(1000, 0)] * 8)) == (None, "no_change")


def test_prefill_scaling_depends_on_queued_prompts() -> None:
    planner = LoadThresholds(ScalingThresholds())
    tick = planner.begin(ENGINE, ENGINE)
    assert tick is not None
    counts = WorkerCounts(ready_num_prefill=1, ready_num_decode=1)
    observed = FpmObservations({(0, 0): passed(0, queued=1000)}, {(1, 0): passed(1, held=7000)})
    effects = planner.tick(tick, TickInput(now_s=5.0, worker_counts=counts, fpm_observations=observed))
    assert effects.scale_to == ScalingDecision(num_prefill=2)
    assert effects.diagnostics == {"prefill": "scale_up", "decode": "no_change"}


def test_scheduled_scaling_entries_are_applied_in_order() -> None:
    table = Timetable([entry("60=2"), entry("5=4")])
    first = table.begin(None, ENGINE)
    assert first == ScheduledTick(at_s=5.0)
    effects = table.tick(first, TickInput(now_s=5.0))
    assert effects == PlannerEffects(scale_to=ScalingDecision(num_decode=4), next_tick=ScheduledTick(at_s=60.0))


@pytest.mark.parametrize("words", ["60", "60=", "60=0", "60=1/2/3", "-1=2", "x=2"])
def test_invalid_scaling_entry_is_refused(words: str) -> None:
    with pytest.raises(ConfigError, match="--scale-at"):
        entry(words)


def test_scaling_entry_for_other_roles_is_refused() -> None:
    with pytest.raises(ConfigError, match="PREFILL/DECODE"):
        Timetable([entry("5=4")]).begin(ENGINE, ENGINE)
    with pytest.raises(ConfigError, match="SECONDS=WORKERS"):
        Timetable([entry("5=4/2")]).begin(None, ENGINE)


@pytest.mark.parametrize(
    "text", ['{"interval_s": 0}', '{"min_workers": 9}', '{"decode_up": 0.1}', '{"some": 1}', "nonsense"]
)
def test_contradictory_thresholds_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--scale-load"):
        load_thresholds(text)


def busy(engine: EngineArgs, chatty: list[ReplaySession], **more: object) -> Scenario:
    return dataclasses.replace(
        Scenario(sessions=chatty, router_mode="kv", engine=engine, block_tokens=64, speedup=3.0), **more
    )


def test_added_worker_serves_after_its_startup_time(engine: EngineArgs, chatty: list[ReplaySession]) -> None:
    slow = EngineArgs(**{**{name: getattr(engine, name) for name in engine.__struct_fields__}, "startup_time": 2.0})
    outcome = busy(slow, chatty, planner=lambda: Timetable([entry("1=3")])).run()
    added = [one for one in outcome.flights if one.slot > 0]
    assert added
    assert min(one.placed_ms for one in added) >= 3000.0
    assert outcome.planner is not None
    assert [event["to"] for event in outcome.planner.scaling_events] == [3]
    assert [row["at_s"] for row in outcome.planner.lifecycle_operations if row["at_s"]] == [3.0, 3.0]


def test_removed_worker_finishes_its_requests(engine: EngineArgs, chatty: list[ReplaySession]) -> None:
    outcome = busy(engine, chatty, workers=3, planner=lambda: Timetable([entry("2=1")])).run()
    assert outcome.migrations == 0
    assert all(one.slot == 0 for one in outcome.flights if one.placed_ms > 2000.0)
    assert any(one.slot > 0 and one.finished_ms > 2000.0 for one in outcome.flights)
    gone = [
        row for row in (outcome.planner.lifecycle_operations if outcome.planner else []) if "gone" in row["operation"]
    ]
    assert len(gone) == 2
    assert outcome.worker_ms < 3 * outcome.duration_ms


def test_starting_worker_is_cancelled_before_a_ready_one_is_drained(
    engine: EngineArgs, chatty: list[ReplaySession]
) -> None:
    slow = EngineArgs(**{**{name: getattr(engine, name) for name in engine.__struct_fields__}, "startup_time": 4.0})
    outcome = busy(slow, chatty, workers=2, planner=lambda: Timetable([entry("1=3"), entry("2=2")])).run()
    assert {one.slot for one in outcome.flights} == {0, 1}
    operations = [row["operation"] for row in (outcome.planner.lifecycle_operations if outcome.planner else [])]
    assert "start_cancelled" in operations
    assert "worker_draining" not in operations


@settings(max_examples=10, deadline=None)
@given(
    is_disaggregated=st.booleans(),
    startup_s=st.sampled_from([0.0, 0.7]),
    table=st.lists(st.tuples(st.floats(0, 8), st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4),
    by_load=st.booleans(),
)
def test_scaling_loses_no_request_and_reports_are_reproducible(
    is_disaggregated: bool, startup_s: float, table: list[tuple[float, int, int]], by_load: bool
) -> None:
    from dynamo.replay.synthetic import Shape, sessions

    shape = Shape(
        input_tokens=200, output_tokens=30, requests=40, turns=2, shared_prefix_ratio=0.5, prefix_groups=2,
        request_rate=20, block_tokens=64,
    )  # fmt: skip
    engine = EngineArgs(
        num_gpu_blocks=120, block_size=16, max_num_seqs=8, max_num_batched_tokens=256, startup_time=startup_s
    )
    entries = [entry(f"{at}={p}/{d}" if is_disaggregated else f"{at}={d}") for at, p, d in table]
    scenario = Scenario(
        sessions=sessions(shape),
        router_mode="kv",
        workers=2,
        prefill_workers=2 if is_disaggregated else None,
        engine=engine,
        block_tokens=64,
        planner=(lambda: load_thresholds(BUSY)) if by_load else (lambda: Timetable(entries)),
    )
    first, second = (as_json(report_of(scenario.run(), with_requests=True, with_telemetry=True)) for _ in range(2))
    assert first == second
    assert sum(one.finished_ms >= 0 for one in scenario.run().flights) == 40
