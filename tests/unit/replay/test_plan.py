"""Plan: disaggregated clusters, ranks, other engines, restarts: invariants of every run."""

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dynamo.core.errors import ConfigError
from dynamo.replay.engine import EngineArgs
from dynamo.replay.load import ReplaySession, Turn
from dynamo.replay.modes import MODES
from dynamo.replay.plan import Bypass, Failure, PlannedRestart
from dynamo.replay.report import as_json, report_of, rows_of, summary_of
from dynamo.replay.scenario import Scenario
from dynamo.replay.synthetic import Shape, sessions

SMALL = EngineArgs(num_gpu_blocks=256, block_size=16, max_num_seqs=16, max_num_batched_tokens=512)


def with_args(**more: object) -> EngineArgs:
    given = {name: getattr(SMALL, name) for name in SMALL.__struct_fields__}
    return EngineArgs(**{**given, **more}).check()


def split(load: list[ReplaySession], **more: object) -> Scenario:
    base = Scenario(
        sessions=load, workers=2, prefill_workers=2, router_mode="kv", engine=SMALL, block_tokens=64, concurrency=12
    )
    return dataclasses.replace(base, **more)


@pytest.mark.parametrize("mode", MODES)
def test_disaggregated_workers_share_prefill_and_decode(mode: str, chatty: list[ReplaySession]) -> None:
    outcome = split(chatty, router_mode=mode).run()
    assert len(outcome.flights) == outcome.transfers == 90
    assert {one.prefill_slot for one in outcome.flights} == {0, 1}
    assert {one.slot for one in outcome.flights} == {2, 3}


def test_first_token_is_delayed_by_the_kv_transfer() -> None:
    requested = [ReplaySession("s", [Turn("r", 1000, 5, range(16), 0.0)])]

    def first_ms(**more: object) -> float:
        engine = with_args(max_num_batched_tokens=2048, **more)
        return Scenario(
            sessions=requested, prefill_workers=1, engine=engine, block_tokens=64
        ).run().flights[0].first_ms  # fmt: skip

    quick = first_ms(kv_transfer_bandwidth=0)
    slow = first_ms(kv_transfer_bandwidth=0.001, kv_bytes_per_token=1000)
    assert slow - quick == pytest.approx(1000.0, abs=2.0)  # 1 MB at 1 MB/s.


def test_destination_missing_mode_transfers_only_missing_blocks(chatty: list[ReplaySession]) -> None:
    whole = split(chatty, engine=with_args(kv_transfer_bandwidth=0.1)).run()
    missing = split(
        chatty, engine=with_args(kv_transfer_bandwidth=0.1, kv_transfer_timing_mode="destination_missing")
    ).run()
    assert missing.transfers == whole.transfers
    assert missing.transfer_ms < whole.transfer_ms


def test_conditional_bypass_keeps_short_prefills_on_decode_workers(chatty: list[ReplaySession]) -> None:
    outcome = split(chatty, bypass=Bypass()).run()
    assert outcome.bypassed > 0
    assert outcome.transfers + outcome.bypassed == 90
    summary = summary_of(outcome, rows_of(outcome.flights))
    assert summary["kv_transfers"] == outcome.transfers
    with pytest.raises(ConfigError, match="conditional"):
        split(chatty, bypass=Bypass(), router_mode="round_robin").run()


def test_bypass_requires_few_and_proportionally_few_new_tokens() -> None:
    assert Bypass().applies(10_000, 2000)
    assert not Bypass().applies(10_000, 2048)
    assert not Bypass().applies(1000, 700)


def test_workers_with_two_ranks_equal_twice_as_many_workers(chatty: list[ReplaySession]) -> None:
    base = Scenario(sessions=chatty, workers=4, router_mode="kv", engine=SMALL, block_tokens=64, concurrency=12)
    four = base.run()
    two = dataclasses.replace(base, workers=2, engine=with_args(dp_size=2)).run()
    assert [one.finished_ms for one in two.flights] == [one.finished_ms for one in four.flights]
    assert {one.slot for one in two.flights} == {0, 1}


def test_host_tier_increases_reused_tokens(chatty: list[ReplaySession]) -> None:
    tight = with_args(num_gpu_blocks=100)
    base = Scenario(sessions=chatty, workers=2, router_mode="kv", engine=tight, block_tokens=64, concurrency=6)
    roomy = dataclasses.replace(base, engine=with_args(num_gpu_blocks=100, num_host_blocks=2000)).run()
    alone = base.run()
    assert roomy.reused_tokens > alone.reused_tokens


def test_restarted_worker_finishes_its_requests_and_is_replaced(chatty: list[ReplaySession]) -> None:
    engine = with_args(startup_time=1.0)
    quiet = Scenario(sessions=chatty, workers=2, router_mode="kv", engine=engine, block_tokens=64, speedup=3.0)
    outcome = dataclasses.replace(quiet, restarts=(PlannedRestart(2000.0, 0),)).run()
    assert outcome.migrations == 0
    assert len({one.worker for one in outcome.flights}) == 3
    assert all(one.worker == 1 for one in outcome.flights if 2000.0 < one.placed_ms < 3000.0)


def test_incompatible_pools_are_refused(chatty: list[ReplaySession]) -> None:
    with pytest.raises(ConfigError, match="must be equal"):
        split(chatty, prefill_engine=with_args(block_size=32)).run()
    with pytest.raises(ConfigError, match="unknown worker 4"):
        split(chatty, failures=(Failure(1.0, 4),)).run()
    with pytest.raises(ConfigError, match="prefill workers"):
        split(chatty, prefill_workers=0).run()


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1000),
    concurrency=st.none() | st.integers(1, 30),
    mode=st.sampled_from(MODES),
    prefill=st.none() | st.integers(1, 2),
    engine_type=st.sampled_from(["vllm", "sglang", "trtllm"]),
    ranks=st.integers(1, 2),
    blocks=st.integers(60, 300),
    host=st.none() | st.integers(20, 300),
    eviction=st.sampled_from(["lineage", "lru", "multi_lru"]),
    lag_ms=st.sampled_from([0.0, 30.0]),
    queue=st.booleans(),
    failures=st.lists(
        st.builds(Failure, st.floats(0, 4000), st.integers(0, 1), st.none() | st.floats(0, 2000)), max_size=2
    ),
    restarts=st.lists(st.builds(PlannedRestart, st.floats(0, 4000), st.integers(0, 1)), max_size=2),
)
@example(  # All blocks of a decode worker are reserved for prompts that no worker is left to compute.
    seed=857,
    concurrency=None,
    mode="kv_router",
    prefill=1,
    engine_type="sglang",
    ranks=1,
    blocks=157,
    host=196,
    eviction="lineage",
    lag_ms=0.0,
    queue=False,
    failures=[Failure(72.4, 0, None), Failure(1356.4, 0, None)],
    restarts=[],
)
def test_no_request_is_lost_for_any_cluster_and_failure(
    seed: int,
    concurrency: int | None,
    mode: str,
    prefill: int | None,
    engine_type: str,
    ranks: int,
    blocks: int,
    host: int | None,
    eviction: str,
    lag_ms: float,
    queue: bool,
    failures: list[Failure],
    restarts: list[PlannedRestart],
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
    engine = with_args(
        num_gpu_blocks=blocks,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        engine_type=engine_type,
        dp_size=ranks,
        num_host_blocks=host,
        eviction_backend=eviction,
        startup_time=0.5,
    )
    scenario = Scenario(
        sessions=sessions(shape),
        workers=2,
        prefill_workers=prefill,
        bypass=Bypass(200, 0.7) if mode in {"kv_router", "balanced", "preble"} and prefill and seed % 2 else None,
        router_mode=mode,
        router_settings={"queue_threshold": 0.5, "queue_policy": "wspt"} if queue and mode == "balanced" else {},
        engine=engine,
        block_tokens=64,
        seed=seed,
        concurrency=concurrency,
        event_lag_ms=lag_ms,
        failures=tuple(failures),
        restarts=tuple(restarts),
    )
    outcome = scenario.run()
    answered = sum(one.finished_ms >= 0 for one in outcome.flights)
    assert answered + outcome.unfinished == len(outcome.flights)
    if not outcome.unfinished:
        assert answered == 40
    assert as_json(report_of(outcome, with_requests=True)) == as_json(report_of(scenario.run(), with_requests=True))
