"""RequestFlow: SGLang's decode workers reserve blocks before the prompt is computed; failures and refusals release both workers."""

import dataclasses

import msgspec
import pytest

from dynamo.replay.engine import EngineArgs
from dynamo.replay.load import ReplaySession, Turn
from dynamo.replay.plan import Failure
from dynamo.replay.scenario import Scenario

SGLANG = EngineArgs(engine_type="sglang", num_gpu_blocks=256, block_size=16, max_num_seqs=16)


def requests(*arrivals_ms: float, tokens: int = 1000, answer: int = 40) -> list[ReplaySession]:
    """Return requests without common prefixes."""
    return [
        ReplaySession(f"s{at}", [Turn(f"r{at}", tokens, answer, range(at * 100, at * 100 + 16), arrival_ms)])
        for at, arrival_ms in enumerate(arrivals_ms)
    ]


def split(load: list[ReplaySession], engine: EngineArgs = SGLANG, **more: object) -> Scenario:
    """Return a cluster of one prefill and one decode worker."""
    base = Scenario(sessions=load, prefill_workers=1, engine=engine, block_tokens=64)
    return dataclasses.replace(base, **more)


def of_type(engine_type: str, **more: object) -> EngineArgs:
    return msgspec.structs.replace(SGLANG, engine_type=engine_type, **more)


@pytest.mark.parametrize("engine_type", ["vllm", "trtllm", "sglang"])
def test_prompt_is_computed_after_the_reservation_on_sglang_and_at_arrival_on_the_others(engine_type: str) -> None:
    """The decode worker has blocks for one request at a time."""
    outcome = split(requests(0.0, 1.0), of_type(engine_type, num_gpu_blocks=100)).run()
    first, second = outcome.flights
    if engine_type == "sglang":
        assert second.placed_ms == pytest.approx(first.finished_ms)
    else:
        assert second.placed_ms == 1.0
    assert second.first_ms > first.finished_ms
    assert outcome.transfers == 2
    assert {(one.prefill_slot, one.slot) for one in outcome.flights} == {(0, 1)}


def test_reservation_takes_place_at_the_end_of_the_decode_workers_step() -> None:
    first, second = split(requests(0.0, 100.5)).run().flights
    step_ms = first.second_ms - first.first_ms
    assert first.placed_ms == 0.0, "an idle worker reserves at once"
    assert first.first_ms < 100.5 < first.finished_ms
    assert 0.0 < second.placed_ms - 100.5 <= step_ms
    steps = (second.placed_ms - first.first_ms) / step_ms
    assert steps == pytest.approx(round(steps), abs=0.02)
    assert second.waited_ms == 0.0, "no router queued it"


@pytest.mark.parametrize("mode", ["round_robin", "kv_router"])
@pytest.mark.parametrize(
    ("slot", "at_ms", "what"),
    [(0, 10.0, "prompt is being computed"), (1, 10.0, "prompt is being computed"), (1, 37.0, "prompt is in transit")],
)
def test_failed_worker_of_either_role_releases_the_request_on_the_other(
    slot: int, at_ms: float, what: str, mode: str
) -> None:
    engine = of_type("sglang", kv_transfer_bandwidth=0.01, kv_bytes_per_token=1000)  # A transfer takes 100 ms.
    scenario = split(requests(0.0, 0.5, 1.0), engine, router_mode=mode, failures=(Failure(at_ms, slot, 5.0),))
    outcome = scenario.run()  # Checks at its end that no blocks are held and no request is counted.
    assert all(one.finished_ms > 0 for one in outcome.flights), what
    assert outcome.migrations == 3 if slot else outcome.migrations >= 1
    assert all(one.first_ms > at_ms + 5.0 for one in outcome.flights if one.migrations)


def test_prefill_worker_that_is_never_replaced_leaves_no_reservation() -> None:
    outcome = split(requests(0.0, 1.0), failures=(Failure(10.0, 0),)).run()
    assert outcome.unfinished == 2, "they wait for a prefill worker"


def test_decode_worker_that_fails_while_no_prefill_worker_is_there_is_replaced() -> None:
    failures = (Failure(10.0, 0, 500.0), Failure(200.0, 1, 100.0))
    outcome = split(requests(0.0, 1.0), failures=failures).run()
    assert [one.migrations for one in outcome.flights] == [2, 2]
    assert all(one.finished_ms > 510.0 for one in outcome.flights)


@pytest.mark.parametrize(
    "rules",
    [
        {"queue_threshold": 0.1, "queue_timeout_s": 0.05},
        {"queue_threshold": 0.1, "request_queue_limit_per_worker": 2},
        {"active_prefill_tokens_threshold": 2500},
    ],
)
def test_request_that_no_prefill_worker_takes_is_released_by_its_decode_worker(rules: dict[str, float]) -> None:
    outcome = split(requests(*(float(at) for at in range(12)), answer=4), router_mode="kv", router_settings=rules).run()
    assert outcome.rejected
    assert outcome.flights
    assert len(outcome.flights) + len(outcome.rejected) == 12


def test_requests_in_a_prefill_routers_queue_are_withdrawn_when_their_decode_worker_fails() -> None:
    outcome = split(
        requests(*(float(at) for at in range(4))),
        router_mode="kv",
        router_settings={"queue_threshold": 0.1},
        failures=(Failure(20.0, 1, 5.0),),
    ).run()
    assert all(one.finished_ms > 0 for one in outcome.flights)
    assert outcome.migrations == 4


def test_router_learns_the_cached_prompt_when_its_transfer_ends() -> None:
    """The prefill worker is idle by then, so that no step reports it."""
    engine = of_type("sglang", kv_transfer_bandwidth=0.01, kv_bytes_per_token=1000)
    found = []
    for arrival_ms in (100.0, 1000.0):
        again = ReplaySession("t", [Turn("t", 1000, 5, range(16), arrival_ms)])
        found.append(split([*requests(0.0), again], engine, router_mode="kv_router").run().flights[1].cached_tokens)
    assert found == [0, 992]
