"""Planning: observations of a planner."""

from dataclasses import dataclass, field, replace

from dynamo.protocols.planner import (
    EngineCapabilities,
    PlannerEffects,
    ScalingDecision,
    ScheduledTick,
    TickInput,
)
from dynamo.replay.engine import EngineArgs
from dynamo.replay.load import ReplaySession
from dynamo.replay.policies import load_thresholds
from dynamo.replay.scenario import Scenario
from dynamo.replay.synthetic import Shape, sessions


@dataclass
class Watcher:
    """Planner that runs every two seconds and requests one more worker of each kind once."""

    name: str = "watcher"
    known: list[EngineCapabilities | None] = field(default_factory=list)
    seen: list[TickInput] = field(default_factory=list)

    def begin(self, prefill: EngineCapabilities | None, decode: EngineCapabilities) -> ScheduledTick | None:
        self.known = [prefill, decode]
        return self._next(2.0)

    def tick(self, scheduled: ScheduledTick, seen: TickInput) -> PlannerEffects:
        self.seen.append(seen)
        more = ScalingDecision(num_prefill=2, num_decode=2) if len(self.seen) == 1 else None
        return PlannerEffects(scale_to=more, next_tick=self._next(seen.now_s + 2.0))

    def _next(self, at_s: float) -> ScheduledTick:
        return ScheduledTick(
            at_s=at_s,
            need_traffic_metrics=True,
            traffic_metrics_duration_s=2.0,
            need_worker_states=True,
            need_worker_fpm=True,
        )


def slow(engine: EngineArgs) -> EngineArgs:
    given = {name: getattr(engine, name) for name in engine.__struct_fields__}
    return EngineArgs(**{**given, "startup_time": 3.0})


def test_planner_observes_arrivals_completions_and_cache_hits(engine: EngineArgs, chatty: list[ReplaySession]) -> None:
    watcher = Watcher()
    scenario = Scenario(
        sessions=chatty, workers=2, router_mode="kv", engine=engine, block_tokens=64, planner=lambda: watcher
    )
    outcome = scenario.run()
    assert watcher.known[0] is None
    assert watcher.known[1] == EngineCapabilities(
        max_num_batched_tokens=512, max_num_seqs=16, max_kv_tokens=256 * 16, kv_cache_block_size=16
    )
    for seen in watcher.seen:
        now_ms = seen.now_s * 1000
        assert seen.traffic is not None
        came = [one for one in outcome.flights if now_ms - 2000 < one.arrived_ms < now_ms]
        ended = [one for one in outcome.flights if now_ms - 2000 < one.finished_ms <= now_ms]
        assert seen.traffic.num_req == len(came)
        assert seen.traffic.isl == (sum(one.turn.input_tokens for one in came) / len(came) if came else 0.0)
        assert seen.traffic.osl == (40.0 if ended else 0.0)
    assert any(seen.traffic.kv_hit_rate for seen in watcher.seen if seen.traffic)


def test_planner_observes_ready_and_expected_workers_and_their_load(
    engine: EngineArgs, chatty: list[ReplaySession]
) -> None:
    watcher = Watcher()
    outcome = Scenario(
        sessions=chatty,
        workers=1,
        prefill_workers=1,
        router_mode="kv",
        engine=slow(engine),
        block_tokens=64,
        planner=lambda: watcher,
    ).run()
    counts = [seen.worker_counts for seen in watcher.seen]
    assert counts[1] is not None
    assert (counts[1].ready_num_prefill, counts[1].expected_num_prefill, counts[1].pending_num_prefill) == (1, 2, 1)
    assert counts[1].decode_scaling_in_progress
    assert counts[2] is not None
    assert (counts[2].ready_num_decode, counts[2].pending_num_decode) == (2, 0)
    for seen in watcher.seen[3:]:
        assert seen.fpm_observations is not None
        assert len(seen.fpm_observations.prefill) == len(seen.fpm_observations.decode) == 2
        assert all(one.worker_id == worker for (worker, _), one in seen.fpm_observations.decode.items())
    computed = [
        one.scheduled_requests
        for seen in watcher.seen
        if seen.fpm_observations
        for one in seen.fpm_observations.decode.values()
    ]
    assert any(one.sum_decode_kv_tokens for one in computed)
    assert outcome.planner is not None
    assert [event["role"] for event in outcome.planner.scaling_events] == ["prefill", "decode"]


def test_planner_sees_the_prompts_in_the_routers_queue(engine: EngineArgs) -> None:
    shape = Shape(input_tokens=400, output_tokens=40, requests=300, request_rate=50, block_tokens=64)
    plain = Scenario(
        sessions=sessions(shape),
        workers=1,
        router_mode="balanced",
        engine=engine,
        block_tokens=64,
        planner=lambda: load_thresholds("on"),
    )
    outcome = plain.run()
    assert outcome.planner is not None
    assert outcome.planner.scaling_events[0]["at_s"] == 5.0
    watcher = Watcher()
    replace(plain, planner=lambda: watcher).run()
    passes = watcher.seen[0].fpm_observations
    assert passes is not None
    assert sum(step.queued_requests.sum_prefill_tokens for step in passes.decode.values()) > 10_000
