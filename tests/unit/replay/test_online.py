"""Online: a load sent to a server with real chunks, on a manual clock."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import pytest
from tests.settle import turns

from dynamo.core.clock import ManualClock
from dynamo.core.errors import ConfigError, DynamoException, ResponseTimeout
from dynamo.replay.frontend import FrontendClient, Prompts, parse_event
from dynamo.replay.load import ClosedLoop, OpenLoop, ReplaySession, Turn
from dynamo.replay.online import AnswerChunk, Online
from dynamo.replay.outcome import RunOutcome
from dynamo.replay.report import report_of, rows_of, summary_of


class Answers:
    """The first token after 100 ms, each further one 10 ms later."""

    def __init__(self, clock: ManualClock, broken: str = "") -> None:
        self.clock = clock
        self.broken = broken
        self.under_way = self.most = 0

    async def send(self, session: ReplaySession, turn: Turn) -> AsyncGenerator[AnswerChunk, None]:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await self.clock.sleep(0.1)
            yield AnswerChunk(1, worker=7 + len(turn.request_id))
            if turn.request_id == self.broken:
                raise ResponseTimeout("nothing came for 9 s")
            for _ in range(turn.output_tokens - 1):
                await self.clock.sleep(0.01)
                yield AnswerChunk(1)
            yield AnswerChunk(0, total=turn.output_tokens, cached_tokens=64)
        finally:
            self.under_way -= 1


async def passed(work: Coroutine[Any, Any, RunOutcome], clock: ManualClock) -> RunOutcome:
    task = asyncio.create_task(work)
    for _ in range(20_000):
        await turns(8)
        if task.done():
            return task.result()
        clock.advance(0.001)
    raise AssertionError("it never ended")


def session(name: str, at_ms: float, turns: int = 1) -> ReplaySession:
    return ReplaySession(
        name,
        [Turn(f"{name}.{at}", 100, 5, (1,), at_ms if at == 0 else None, 50.0 if at else 0.0) for at in range(turns)],
    )


async def test_online_times_are_measured_by_the_client() -> None:
    clock = ManualClock()
    online = Online(OpenLoop([session("a", 20.0, 2), session("b", 30.0)]), Answers(clock), clock=clock)
    outcome = await passed(online.run(), clock)
    rows = {row.request_id: row for row in rows_of(outcome.flights)}
    assert rows["a.0"].ttft_ms == pytest.approx(100.0, abs=5.0)
    assert rows["a.0"].itl_ms == pytest.approx(10.0, abs=1.5)
    assert rows["a.1"].arrival_ms == pytest.approx(20 + 140 + 50, abs=10.0)
    assert rows["b.0"].cached_tokens == 64
    summary = summary_of(outcome, list(rows.values()))
    assert summary["completed_requests"] == 3
    assert summary["total_output_tokens"] == 15
    assert sum(outcome.timeline.counted("output_tokens", 0)) == 15
    assert set(report_of(outcome)) == {"summary", "per_request", "coverage", "planner"}


async def test_closed_loop_and_concurrency_limit_bound_open_requests() -> None:
    clock = ManualClock()
    sessions = [session(f"s{number}", 0.0) for number in range(9)]
    answers = Answers(clock)
    await passed(Online(ClosedLoop(sessions, 3), answers, clock=clock).run(), clock)
    assert answers.most == 3
    clock = ManualClock()
    answers = Answers(clock)
    outcome = await passed(Online(OpenLoop(sessions), answers, at_once=2, clock=clock).run(), clock)
    assert answers.most == 2
    assert max(one.first_ms - one.arrived_ms for one in outcome.flights) > 400.0  # Waiting counts.


async def test_failed_request_is_counted_and_ends_its_session() -> None:
    clock = ManualClock()
    online = Online(ClosedLoop([session("a", 0.0, 3), session("b", 0.0)], 1), Answers(clock, "a.1"), clock=clock)
    outcome = await passed(online.run(), clock)
    assert outcome.unfinished == 1
    assert outcome.failures == {"ResponseTimeout: nothing came for 9 s": 1}
    assert [one.turn.request_id for one in outcome.flights] == ["a.0", "a.1", "b.0"]
    assert report_of(outcome)["coverage"]["failures"] == {"ResponseTimeout: nothing came for 9 s": 1}


def test_blocks_with_one_hash_id_have_the_same_tokens() -> None:
    prompts = Prompts(64, range(100, 200))
    first, second = prompts.tokens([1, 2], 100), prompts.tokens([1, 3], 128)
    assert len(first) == 100
    assert first[:64] == second[:64]
    assert first[64:] != second[64:100]
    assert set(first) <= set(range(100, 200))
    with pytest.raises(ConfigError, match="hash_ids"):
        prompts.tokens([1], 65)


def test_parse_event_returns_tokens_usage_and_worker() -> None:
    assert parse_event({"choices": [{"text": "a"}]}) == AnswerChunk(1)
    usage = {"completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 3}}
    assert parse_event({"choices": [], "usage": usage}) == AnswerChunk(0, 9, 3)
    worker = {"worker_id": {"prefill_worker_id": 1, "decode_worker_id": 2}}
    assert parse_event({"choices": [{"text": "a"}], "nvext": worker}) == AnswerChunk(1, worker=2)
    assert parse_event({"choices": []}) is None
    with pytest.raises(DynamoException, match="no room"):
        parse_event({"error": {"message": "no room"}})


def test_request_body_fixes_the_number_of_output_tokens() -> None:
    asker = FrontendClient(None, "m", Prompts(64, range(9)))  # type: ignore[arg-type]  # nothing is sent
    body = asker.body(Turn("r", 70, 5, (1, 2), priority=3.0))
    assert len(body["prompt"]) == 70
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == (5, 5, True)
    assert body["nvext"]["agent_hints"] == {"priority": 3}
