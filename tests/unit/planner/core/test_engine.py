"""Planner core: ticks, reasons, budgets, and records that replay to the same decisions."""

import random
from dataclasses import replace

import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.planner.config.planner_config import parse
from dynamo.planner.config.plugins import PluginStage
from dynamo.planner.core.engine import PlannerCore, TickDecision, without_nan
from dynamo.planner.core.pipeline import PluginReply, PluginSpec
from dynamo.planner.core.reasons import LimitReason, LoadReason, ThroughputReason
from dynamo.planner.core.record import Start, encode, recorded, replay
from dynamo.planner.core.scaling import WorkerCapabilities
from dynamo.planner.plugins.types import ComponentTarget, OverrideResult, ProposeStageResponse
from dynamo.protocols.load import FORWARD_PASS_VERSION, ForwardPassMetrics, QueuedRequests, ScheduledRequests
from dynamo.protocols.planner import (
    EngineCapabilities,
    FpmObservations,
    RankKey,
    RolloutPhase,
    ScalingDecision,
    TickInput,
    TrafficObservation,
    WorkerCounts,
)

ENGINE = EngineCapabilities(
    num_gpu=1, max_num_batched_tokens=2048, max_num_seqs=64, context_length=4096, max_kv_tokens=100_000
)
CAPABILITIES = WorkerCapabilities(prefill=ENGINE, decode=ENGINE)
PLUGIN = PluginSpec(plugin_id="user", stage=PluginStage.PROPOSE, priority=5)


def steps(workers: int, queued: int = 0, kv: int = 100, seconds: float = 0.02) -> dict[RankKey, ForwardPassMetrics]:
    scheduled = ScheduledRequests(
        num_prefill_requests=1, sum_prefill_tokens=100, num_decode_requests=2, sum_decode_kv_tokens=kv
    )
    waiting = QueuedRequests(num_prefill_requests=1 if queued else 0, sum_prefill_tokens=queued)
    return {
        (f"{worker}", 0): ForwardPassMetrics(FORWARD_PASS_VERSION, f"{worker}", 0, 1, seconds, scheduled, waiting)
        for worker in range(workers)
    }


def seen(now_s: float, prefill: int, decode: int, queued: int = 0, kv: int = 100, **more: object) -> TickInput:
    return TickInput(
        now_s=now_s,
        worker_counts=WorkerCounts(
            ready_num_prefill=prefill,
            ready_num_decode=decode,
            expected_num_prefill=prefill,
            expected_num_decode=decode,
        ),
        fpm_observations=FpmObservations(steps(prefill, queued), steps(decode, kv=kv)),
        **more,  # type: ignore[arg-type]
    )


def first(core: PlannerCore, observed: TickInput) -> TickDecision:
    return core.tick(core.first_tick(0.0), observed)


def test_tick_adds_a_prefill_worker_when_a_queue_exceeds_the_context() -> None:
    decision = first(PlannerCore(parse({}), CAPABILITIES), seen(5.0, 2, 2, queued=5000, kv=80_000))
    assert decision.scale_to == ScalingDecision(num_prefill=3)
    assert (decision.load.reason, decision.throughput.reason) == (LoadReason.SCALE_UP, ThroughputReason.DISABLED)


def test_tick_without_observations_scales_no_worker_and_names_the_reason() -> None:
    decision = first(PlannerCore(parse({}), CAPABILITIES), TickInput(now_s=5.0))
    assert decision.scale_to is None
    assert decision.load.reason is LoadReason.NO_FPM_DATA


def test_tick_never_exceeds_the_gpu_budget_even_for_a_final_override() -> None:
    core = PlannerCore(parse({"max_gpu_budget": 4}), CAPABILITIES, [PLUGIN])
    override = OverrideResult(targets=[ComponentTarget(sub_component_type="decode", replicas=50)])
    decision = core.tick(
        core.first_tick(0.0), seen(5.0, 1, 1), lambda call: ProposeStageResponse(override=override, final=True)
    )
    total = (
        2 if decision.scale_to is None else (decision.scale_to.num_prefill or 1) + (decision.scale_to.num_decode or 1)
    )
    assert total <= 4
    assert decision.clamped


def test_ticks_run_throughput_scaling_at_its_own_interval() -> None:
    raw = {"optimization_target": "sla", "enable_load_scaling": True, "load_predictor": "constant"}
    core = PlannerCore(parse({**raw, "throughput_adjustment_interval": 20}), CAPABILITIES)
    scheduled = core.first_tick(100.0)
    runs = []
    for _ in range(8):
        runs.append((scheduled.at_s, scheduled.run_throughput_scaling))
        core.tick(scheduled, TickInput(now_s=scheduled.at_s))
        scheduled = core.next_tick(scheduled, scheduled.at_s)
    assert [at for at, is_due in runs if is_due] == [120.0, 140.0]
    assert [at for at, _ in runs][:3] == [105.0, 110.0, 115.0]


def test_missed_ticks_are_skipped() -> None:
    core = PlannerCore(parse({}), CAPABILITIES)
    assert core.next_tick(core.first_tick(0.0), 22.0).at_s == 25.0


def test_throughput_scaling_without_traffic_names_the_reason() -> None:
    raw = {"optimization_target": "sla", "load_predictor": "constant", "throughput_adjustment_interval": 5}
    decision = first(PlannerCore(parse(raw), CAPABILITIES), seen(5.0, 1, 1))
    assert decision.throughput.reason is ThroughputReason.NO_TRAFFIC_DATA


def test_traffic_of_an_idle_window_has_lengths_of_zero_and_unknown_counts_are_no_traffic() -> None:
    nan = float("nan")
    idle = without_nan(TrafficObservation(duration_s=5, num_req=0, isl=nan, osl=nan, kv_hit_rate=nan))
    assert idle == TrafficObservation(duration_s=5, num_req=0, isl=0, osl=0, kv_hit_rate=None)
    assert without_nan(TrafficObservation(duration_s=5, num_req=nan, isl=1, osl=1)) is None


def record_of(seed: int, checkpoint_at: int | None = None) -> list[bytes]:
    """Return the record of random ticks with a plugin that overrides, accepts and fails.

    With `checkpoint_at`, the record starts with a checkpoint before that tick.
    """
    rng = random.Random(seed)
    raw = {
        "optimization_target": "sla",
        "enable_load_scaling": True,
        "load_predictor": "kalman",
        "throughput_adjustment_interval": 10,
        "load_min_observations": 1,
    }
    start = Start(config=parse(raw).as_json(), capabilities=CAPABILITIES, plugins=[PLUGIN])
    core = start.planner()
    scheduled, lines = core.first_tick(0.0), [encode(start)]
    workers = [1, 1]
    for number in range(12):
        if number == checkpoint_at:
            lines = [encode(Start.of(core))]
        traffic = TrafficObservation(duration_s=10.0, num_req=rng.randint(0, 500), isl=rng.uniform(1, 3000), osl=50.0)
        observed = seen(scheduled.at_s, *workers, queued=rng.choice([0, 20_000]), kv=rng.randint(0, 90_000))
        full = TickInput(
            now_s=observed.now_s,
            traffic=traffic if scheduled.need_traffic_metrics else None,
            worker_counts=observed.worker_counts,
            fpm_observations=observed.fpm_observations,
        )
        recording = recorded(core, scheduled, full)
        while recording.decision is None:
            override = OverrideResult(
                targets=[ComponentTarget(sub_component_type="decode", replicas=rng.randint(1, 3))]
            )
            reply = rng.choice([PluginReply(ProposeStageResponse(override=override)), PluginReply(None, "timeout")])
            recording.reply([reply for _ in recording.calls])
        lines.append(encode(recording.tick))
        target = recording.decision.scale_to
        if target is not None:
            workers = [target.num_prefill or workers[0], target.num_decode or workers[1]]
        scheduled = core.next_tick(scheduled, scheduled.at_s)
    return lines


@pytest.mark.parametrize("seed", range(10))
def test_record_replays_to_the_same_decisions_byte_for_byte(seed: int) -> None:
    lines = record_of(seed)
    assert len(lines) == 13
    for tick, decided in replay(lines):
        assert decided == bytes(tick.decision)


@pytest.mark.parametrize("seed", range(10))
def test_record_that_starts_at_a_checkpoint_replays_to_the_same_decisions(seed: int) -> None:
    lines = record_of(seed, checkpoint_at=1 + seed)
    assert len(lines) == 12 - seed
    for tick, decided in replay(lines):
        assert decided == bytes(tick.decision)


@pytest.mark.parametrize("seed", range(10))
def test_checkpoint_does_not_change_the_decisions_that_follow(seed: int) -> None:
    assert record_of(seed, checkpoint_at=6)[1:] == record_of(seed)[7:]


def test_restarted_planner_has_the_last_action_and_the_lower_bounds() -> None:
    core = PlannerCore(parse({}), CAPABILITIES)
    first(core, seen(5.0, 2, 2, queued=5000, kv=80_000))
    core.state.lower_bounds["decode"] = 3
    restarted = PlannerCore(parse({}), CAPABILITIES)
    restarted.restore(core.checkpoint())
    assert restarted.checkpoint() == core.checkpoint()
    assert restarted.checkpoint().last_action == ScalingDecision(num_prefill=3)


def test_record_with_a_changed_input_does_not_replay_to_the_same_decisions() -> None:
    lines = record_of(1)
    changed = [
        lines[0],
        *(line.replace(b'"max_gpu_budget":8', b"").replace(b'"isl":', b'"isl":1') for line in lines[1:]),
    ]
    assert any(decided != bytes(tick.decision) for tick, decided in replay(changed))


def test_replay_names_the_line_that_cannot_be_decoded() -> None:
    with pytest.raises(InvalidArgument, match="line 2: cannot decode a tick record"):
        list(replay([record_of(1)[0], b"{"]))


def test_replay_names_the_plugin_whose_reply_is_missing() -> None:
    lines = record_of(2)
    start, tick = lines[0], lines[1].replace(b'"plugin_id":"user","stage"', b'"plugin_id":"other","stage"')
    with pytest.raises(InvalidArgument, match="expected a reply of user, found a reply of other"):
        list(replay([start, tick]))


def test_tick_during_a_rollout_holds_and_names_the_reason() -> None:
    observed = seen(5.0, 2, 2, queued=5000, kv=80_000)
    assert observed.worker_counts is not None
    counts = replace(observed.worker_counts, rollout=RolloutPhase.IN_PROGRESS)
    decision = first(PlannerCore(parse({}), CAPABILITIES), replace(observed, worker_counts=counts))
    assert (decision.scale_to, decision.limits) == (None, (LimitReason.ROLLOUT_IN_PROGRESS,))


def test_tick_with_a_budget_below_the_minimum_holds_and_names_the_reason() -> None:
    core = PlannerCore(parse({"max_gpu_budget": 1}), CAPABILITIES)
    decision = first(core, seen(5.0, 2, 2, queued=5000, kv=80_000))
    assert (decision.scale_to, decision.load.reason) == (None, LoadReason.GPU_BUDGET_BELOW_MINIMUM)


def test_tick_never_exceeds_the_power_budget() -> None:
    engine = replace(ENGINE, power_watts_per_replica=700)
    raw = {"enable_power_awareness": True, "total_gpu_power_limit": 2900}
    core = PlannerCore(parse(raw), WorkerCapabilities(prefill=engine, decode=engine))
    decision = first(core, seen(5.0, 2, 2, queued=5000, kv=80_000))
    assert (decision.scale_to, decision.limits) == (None, (LimitReason.POWER_BUDGET_CLAMPED,))


def test_tick_without_the_watts_of_a_replica_adds_no_worker() -> None:
    raw = {"enable_power_awareness": True, "total_gpu_power_limit": 2900}
    decision = first(PlannerCore(parse(raw), CAPABILITIES), seen(5.0, 2, 2, queued=5000, kv=80_000))
    assert (decision.scale_to, decision.limits) == (None, (LimitReason.POWER_UNKNOWN,))
