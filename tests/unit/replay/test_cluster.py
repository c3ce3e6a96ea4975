"""Cluster: invariants of every run, and equivalent runs."""

import dataclasses
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.core.errors import ConfigError
from dynamo.kv_router.index import KvIndex
from dynamo.mocker.simulation.rules import EngineType
from dynamo.mocker.simulation.scheduler import Simulation
from dynamo.replay.engine import EngineArgs
from dynamo.replay.load import ReplaySession, Turn
from dynamo.replay.modes import MODES
from dynamo.replay.outcome import RunOutcome
from dynamo.replay.placement import KvPlacement
from dynamo.replay.plan import Failure
from dynamo.replay.report import as_json, report_of
from dynamo.replay.scenario import Scenario
from dynamo.replay.synthetic import Shape, sessions


def times(outcome: RunOutcome) -> list[tuple[float, ...]]:
    return [(one.arrived_ms, one.first_ms, one.second_ms, one.finished_ms, one.slot) for one in outcome.flights]


@pytest.mark.parametrize("mode", MODES)
def test_every_router_mode_answers_every_request(mode: str, engine: EngineArgs, chatty: list[ReplaySession]) -> None:
    outcome = Scenario(sessions=chatty, workers=3, router_mode=mode, engine=engine, block_tokens=64).run()
    assert len(outcome.flights) == 90  # Quiet books are checked by the run itself (`Cluster.validate`).
    assert all(one.finished_ms > one.first_ms >= one.placed_ms >= one.arrived_ms for one in outcome.flights)
    assert {one.slot for one in outcome.flights} == {0, 1, 2}


@pytest.mark.parametrize("mode", MODES)
def test_equal_seeds_produce_byte_identical_reports(mode: str, engine: EngineArgs, chatty: list[ReplaySession]) -> None:
    scenario = Scenario(sessions=chatty, workers=3, router_mode=mode, engine=engine, block_tokens=64, concurrency=8)
    first, second = (as_json(report_of(scenario.run(), with_requests=True, with_telemetry=True)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    "given_settings", [{}, {"blocks_max": 100_000}], ids=["not reported", "reported to a bounded index"]
)
@pytest.mark.parametrize("engine_type", ["vllm", "sglang", "trtllm"])
def test_blocks_of_answers_change_no_placement(
    given_settings: dict[str, Any],
    engine_type: EngineType,
    engine: EngineArgs,
    chatty: list[ReplaySession],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = msgspec.structs.replace(engine, engine_type=engine_type)
    scenario = Scenario(
        sessions=chatty, workers=3, router_mode="kv", router_settings=given_settings, engine=engine, block_tokens=64
    )
    stored: list[int] = []

    def store(self: KvIndex, worker: int, rank: int, parent: int | None, keys: list[int], *rest: Any) -> bool:
        stored.extend(keys)
        return original(self, worker, rank, parent, keys, *rest)

    original = KvIndex.store
    monkeypatch.setattr(KvIndex, "store", store)
    found, named = times(scenario.run()), len(stored)
    monkeypatch.setattr(KvPlacement, "counts_answers", True)
    assert found == times(scenario.run())
    assert (named < len(stored) - named) == (not given_settings)


def test_batched_steps_end_at_the_same_times_as_single_steps(
    engine: EngineArgs, chatty: list[ReplaySession], monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = Scenario(sessions=chatty, workers=2, router_mode="kv", engine=engine, block_tokens=64)
    at_once = scenario.run()
    monkeypatch.setattr(Simulation, "coast_steps", lambda self, **given: 0)
    one_by_one = scenario.run()
    assert times(at_once) == times(one_by_one)
    assert at_once.steps == one_by_one.steps


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    concurrency=st.none() | st.integers(1, 30),
    mode=st.sampled_from(MODES),
    blocks=st.integers(60, 300),
    chunked=st.booleans(),
    lag_ms=st.sampled_from([0.0, 30.0]),
    failures=st.lists(
        st.builds(Failure, st.floats(0, 4000), st.integers(0, 1), st.none() | st.floats(0, 2000)), max_size=2
    ),
)
def test_no_request_is_lost_under_random_failures(
    seed: int,
    concurrency: int | None,
    mode: str,
    blocks: int,
    chunked: bool,
    lag_ms: float,
    failures: list[Failure],
) -> None:
    shape = Shape(
        input_tokens=200,
        output_tokens=30,
        requests=40,
        turns=2,
        shared_prefix_ratio=0.5,
        prefix_groups=2,
        request_rate=20,
        block_tokens=64,
        seed=seed,
    )
    engine = EngineArgs(
        num_gpu_blocks=blocks,
        block_size=16,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        enable_chunked_prefill=chunked,
    )
    outcome = Scenario(
        sessions=sessions(shape),
        workers=2,
        router_mode=mode,
        engine=engine,
        block_tokens=64,
        seed=seed,
        concurrency=concurrency,
        event_lag_ms=lag_ms,
        failures=tuple(failures),
    ).run()
    answered = sum(one.finished_ms >= 0 for one in outcome.flights)
    assert answered + outcome.unfinished == len(outcome.flights)
    if not outcome.unfinished:
        assert answered == 40


def test_requests_of_a_failed_worker_continue_on_another_worker(
    engine: EngineArgs, chatty: list[ReplaySession]
) -> None:
    quiet = Scenario(sessions=chatty, workers=2, engine=engine, block_tokens=64)
    before = quiet.run()
    victim = next(one for one in before.flights if one.slot == 0 and one.finished_ms - one.first_ms > 50)
    at_ms = (victim.first_ms + victim.finished_ms) / 2
    after = dataclasses.replace(quiet, failures=(Failure(at_ms, 0, 1000.0),)).run()
    moved = [one for one in after.flights if one.migrations]
    assert victim.key in {one.key for one in moved}
    assert all(one.slot == 1 for one in moved)
    same = next(one for one in after.flights if one.key == victim.key)
    assert same.first_ms == victim.first_ms
    assert 0 < same.migrated_tokens < same.turn.output_tokens
    assert any(one.slot == 0 and one.arrived_ms > at_ms + 1000 for one in after.flights)


def test_requests_wait_until_a_worker_is_available(engine: EngineArgs) -> None:
    requested = [ReplaySession("s", [Turn("r", 100, 5, (1, 2), 500.0)])]
    quick = Scenario(sessions=requested, engine=engine, block_tokens=64, failures=(Failure(100.0, 0, 900.0),)).run()
    assert quick.flights[0].placed_ms == 1000.0
    never = Scenario(sessions=requested, engine=engine, block_tokens=64, failures=(Failure(100.0, 0),)).run()
    assert never.unfinished == 1


def test_closed_loop_keeps_the_configured_concurrency(engine: EngineArgs, chatty: list[ReplaySession]) -> None:
    outcome = Scenario(sessions=chatty, workers=2, engine=engine, block_tokens=64, concurrency=4).run()
    edges = sorted(edge for one in outcome.flights for edge in ((one.arrived_ms, 1), (one.finished_ms, -1)))
    level = most = 0
    for _, change in edges:
        level += change
        most = max(most, level)
    assert most == 4


def test_router_queue_delays_requests_until_a_worker_is_free(engine: EngineArgs, chatty: list[ReplaySession]) -> None:
    outcome = Scenario(
        sessions=chatty,
        workers=1,
        router_mode="kv",
        router_settings={"queue_threshold": 0.5},
        engine=engine,
        block_tokens=64,
        concurrency=12,
    ).run()
    assert any(one.placed_ms > one.arrived_ms for one in outcome.flights)


def test_simulation_time_limit_leaves_requests_unfinished(engine: EngineArgs, chatty: list[ReplaySession]) -> None:
    outcome = Scenario(sessions=chatty, engine=engine, block_tokens=64, max_sim_time_ms=2000.0).run()
    assert 0 < outcome.unfinished < len(outcome.flights)


def test_request_larger_than_every_cache_is_refused_by_name(engine: EngineArgs) -> None:
    requested = [ReplaySession("s", [Turn("giant", 256 * 16, 5, range(64), 0.0)])]
    with pytest.raises(ConfigError, match="giant"):
        Scenario(sessions=requested, engine=engine, block_tokens=64).run()


def test_second_token_follows_the_first_by_one_step_on_decode_workers(
    engine: EngineArgs, chatty: list[ReplaySession]
) -> None:
    roomy = msgspec.structs.replace(engine, num_gpu_blocks=1024)
    outcome = Scenario(
        sessions=chatty, workers=2, prefill_workers=1, router_mode="kv", engine=roomy, block_tokens=64
    ).run()
    assert outcome.preemptions == 0
    gaps = [one.second_ms - one.first_ms for one in outcome.flights]
    steps = [(one.finished_ms - one.first_ms) / (one.turn.output_tokens - 1) for one in outcome.flights]
    assert max(gap / step for gap, step in zip(gaps, steps, strict=True)) < 1.5


def test_wait_of_a_migrated_request_leaves_out_its_time_on_the_failed_worker(
    engine: EngineArgs, chatty: list[ReplaySession]
) -> None:
    outcome = Scenario(
        sessions=chatty, workers=2, engine=engine, block_tokens=64, failures=(Failure(3000.0, 0, 0.0),)
    ).run()
    moved = [one for one in outcome.flights if one.migrations]
    assert moved
    assert all(one.waited_ms == 0.0 for one in moved)
    assert all(one.first_ms > one.placed_ms for one in outcome.flights)


def burst(count: int, tokens: int = 400) -> list[ReplaySession]:
    """Return requests without common prefixes that arrive at once."""
    return [
        ReplaySession(f"s{at}", [Turn(f"r{at}", tokens, 20, range(at * 10, at * 10 + 10), 0.0)]) for at in range(count)
    ]


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"queue_threshold": 0.5, "queue_timeout_s": 0.05}, "no worker had capacity within 0.05 s"),
        ({"queue_threshold": 0.5, "request_queue_limit_per_worker": 3}, "request_queue_limit_per_worker 3"),
        ({"active_prefill_tokens_threshold": 800}, "above a busy threshold"),
        ({"active_decode_blocks_threshold": 0.2}, "above a busy threshold"),
    ],
)
def test_replay_refuses_what_the_live_router_refuses(rules: dict[str, float], reason: str, engine: EngineArgs) -> None:
    scenario = Scenario(
        sessions=burst(12), workers=1, router_mode="kv", router_settings=rules, engine=engine, block_tokens=64
    )
    outcome = scenario.run()
    assert outcome.rejected
    assert len(outcome.flights) + len(outcome.rejected) == 12
    assert all(one.finished_ms > 0 for one in outcome.flights)
    assert all(reason in one.refusal for one in outcome.rejected)
    assert sum(outcome.failures.values()) == len(outcome.rejected)


def test_prompt_that_is_refused_a_decode_worker_is_released_by_its_prefill_worker(engine: EngineArgs) -> None:
    outcome = Scenario(
        sessions=burst(12),
        workers=1,
        prefill_workers=1,
        router_mode="kv",
        router_settings={"active_decode_blocks_threshold": 0.2},
        engine=engine,
        block_tokens=64,
    ).run()
    assert outcome.rejected
    assert outcome.flights  # Blocks that stay in use fail the checks at the end of the run.


def test_refused_request_ends_its_session_and_a_closed_loop_goes_on(
    engine: EngineArgs, chatty: list[ReplaySession]
) -> None:
    outcome = Scenario(
        sessions=chatty,
        workers=1,
        router_mode="kv",
        router_settings={"active_decode_blocks_threshold": 0.3},
        engine=engine,
        block_tokens=64,
        concurrency=20,
    ).run()
    assert outcome.rejected
    assert {one.session.session_id for one in [*outcome.flights, *outcome.rejected]} == {
        one.session_id for one in chatty
    }


def test_overhead_delays_the_first_token_and_is_no_wait(engine: EngineArgs) -> None:
    plain = Scenario(sessions=burst(1), engine=engine, block_tokens=64)
    first, later = plain.run().flights[0], dataclasses.replace(plain, overhead_ms=7.0).run().flights[0]
    assert later.first_ms == pytest.approx(first.first_ms + 7.0)
    assert (later.arrived_ms, later.waited_ms) == (0.0, 0.0)


def test_slow_workers_get_fewer_requests_once_their_steps_are_known(engine: EngineArgs) -> None:
    shape = Shape(input_tokens=300, output_tokens=60, requests=400, request_rate=25, block_tokens=64)
    outcome = Scenario(
        sessions=sessions(shape), workers=2, router_mode="balanced", engine=engine, block_tokens=64, speeds={0: 0.4}
    ).run()
    late = outcome.flights[200:]
    assert sum(one.slot == 0 for one in late) < 0.4 * len(late)
