"""Batch runner: batches complete after restarts, failures and cancellation."""

import asyncio
import errno
import io
import json
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.settle import repeat, turns

from dynamo.api.batches import runner, store
from dynamo.api.batches.lines import LineResponse, RequestLine
from dynamo.api.batches.records import BatchObject, BatchRecord, FileObject, new_id
from dynamo.api.batches.runner import BEGUN_MAX, FAILURES_MAX, REST_S, REVIEWS_MAX, SAVE_S, BatchRunner
from dynamo.api.batches.slots import Slots
from dynamo.api.batches.store import BatchStore, lines_of
from dynamo.core.clock import ManualClock
from dynamo.core.errors import Cancelled, Overloaded

STEP_S = 0.5
DEADLINE_S = 30


class Bench:
    """A runner over a directory, a manual clock, and scripted responses."""

    def __init__(self, folder: Path, clock: ManualClock | None = None, concurrency: int = 3) -> None:
        self.clock = clock or ManualClock(wall=1000.0)
        self.store = BatchStore(str(folder), clock=self.clock)
        self.received_requests: list[str] = []
        self.answers: dict[str, list[LineResponse]] = {}
        """The responses to a line, in order; the last one repeats for ever."""
        self.hold: set[str] = set()
        self.left: list[str] = []
        self.most = 0
        self.now = 0
        self.runner = BatchRunner(
            self.store, self.send_request, Slots(concurrency, lambda: 0, self.clock), clock=self.clock
        )

    async def send_request(self, line: RequestLine, owner: str | None) -> LineResponse:
        self.received_requests.append(line.custom_id)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.clock.sleep(0.1)
            if line.custom_id in self.hold:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.left.append(line.custom_id)
            raise
        finally:
            self.now -= 1
        output = self.answers.get(line.custom_id, [LineResponse(200, b'{"said":1}', "r")])
        return output.pop(0) if len(output) > 1 else output[0]

    def begin(self, *ids: str, expires_at: int = 10_000) -> BatchRecord:
        lines = [{"custom_id": one, "method": "POST", "url": "/v1/completions", "body": {"model": "m"}} for one in ids]
        data = "\n".join(map(json.dumps, lines)).encode()
        file = FileObject(id=new_id("file-"), bytes=0, created_at=1000, filename="f", purpose="batch")
        self.store.add_file(io.BytesIO(data), file, None)
        batch = BatchObject(
            id=new_id("batch_"),
            endpoint="/v1/completions",
            input_file_id=file.id,
            created_at=1000,
            expires_at=expires_at,
        )
        record = BatchRecord(batch=batch)
        self.store.add_batch(record)
        return record

    def state(self, record: BatchRecord) -> BatchObject:
        return self.store.batch(record.batch.id, None).batch

    async def until(self, is_so: Any) -> None:
        """Advance the clock until the condition holds."""
        await repeat(lambda: self.clock.advance(STEP_S), is_so)

    def has_ended(self, record: BatchRecord) -> bool:
        return self.store._read(self.store._batches, record.batch.id, BatchRecord).has_ended

    async def ended(self, record: BatchRecord) -> BatchObject:
        await self.until(lambda: self.has_ended(record))
        return self.state(record)

    def lines(self, file_id: str | None) -> dict[str, Any]:
        if file_id is None:
            return {}
        return {line["custom_id"]: line for line in map(json.loads, lines_of(self.store.path(file_id)))}


async def test_batch_completes_and_reports_failed_lines(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.answers["b"] = [LineResponse(400, b'{"error":{}}', "r2")]
    record = bench.begin("a", "b", "c")
    bench.runner.start()
    batch = await bench.ended(record)
    await bench.runner.close()
    assert (batch.status, batch.completed_at is not None) == ("completed", True)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
    assert set(bench.lines(batch.output_file_id)) == {"a", "c"}
    [failed] = bench.lines(batch.error_file_id).values()
    assert failed["response"] == {"status_code": 400, "request_id": "r2", "body": {"error": {}}}


async def test_runner_sends_at_most_as_many_lines_as_slots(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    records = [bench.begin(*(f"{name}{place}" for place in range(20))) for name in "ab"]
    bench.runner.start()
    for record in records:
        await bench.ended(record)
    await bench.runner.close()
    assert bench.most == 3
    assert len(bench.received_requests) == len(set(bench.received_requests)) == 40


@pytest.mark.parametrize("is_busy_for_ever", [False, True])
async def test_batch_is_reviewed_again_until_it_expires_while_slow_lines_cannot_be_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_busy_for_ever: bool
) -> None:
    checks: list[str] = []

    def check(_line: bytes, kind: str, is_wanted: Callable[[], bool]) -> None:
        assert is_wanted()
        checks.append(kind)
        if is_busy_for_ever or len(checks) < 3:
            raise Overloaded("too many large request bodies are being decoded")

    monkeypatch.setattr(runner, "check_slow", check)
    bench = Bench(tmp_path)
    record = bench.begin("a", expires_at=1100)
    bench.runner.start()
    batch = await bench.ended(record)
    await bench.runner.close()
    assert set(checks) == {"batch_line"}
    assert (batch.status, bench.received_requests) == (("failed", []) if is_busy_for_ever else ("completed", ["a"]))


@pytest.mark.parametrize("is_busy", [False, True])
async def test_batch_cancelled_while_a_slow_line_waits_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    """A slow line waits for its child, or for a retry because all children are in use; its batch has no results."""
    entered, leave = threading.Event(), threading.Event()
    checks: list[bytes] = []

    def check(line: bytes, _kind: str, is_wanted: Callable[[], bool]) -> None:
        checks.append(line)
        entered.set()
        while not is_busy and is_wanted():
            if leave.wait(0.001):
                return
        raise Overloaded("too many large request bodies are being decoded") if is_busy else Cancelled("unwanted")

    monkeypatch.setattr(runner, "check_slow", check)
    bench = Bench(tmp_path)
    waits: list[bool] = []
    wait_a_second = bench.runner._wait_a_second

    async def counted(tasks: "set[asyncio.Future[Any]]") -> None:
        waits.append(bool(tasks))
        await wait_a_second(tasks)

    monkeypatch.setattr(bench.runner, "_wait_a_second", counted)
    record = bench.begin("a", "b", "c")
    bench.runner.start()
    await repeat(lambda: None, lambda: entered.is_set() and (not is_busy) in waits)
    await turns(5)
    bench.store.cancel(record.batch.id)
    bench.clock.advance(SAVE_S)
    try:
        await repeat(
            lambda: None, lambda: bench.has_ended(record)
        )  # The clock stands: less than `REVIEW_RETRY_S` passes.
        batch = bench.state(record)
    finally:
        leave.set()
        await bench.runner.close()
    assert (batch.status, len(checks), bench.received_requests) == ("cancelled", 1, [])
    assert batch.cancelled_at is not None and batch.cancelling_at is not None
    assert (batch.output_file_id, batch.error_file_id) == (None, None)


async def test_few_files_are_reviewed_at_the_same_time_and_a_batch_that_waits_for_it_can_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bytes] = []
    leave = threading.Event()

    def check(line: bytes, _kind: str, is_wanted: Callable[[], bool]) -> None:
        begun.append(line)
        while is_wanted() and not leave.wait(0.001):
            pass

    monkeypatch.setattr(runner, "check_slow", check)
    bench = Bench(tmp_path)
    records = [bench.begin(name) for name in "abcd"]
    bench.runner.start()
    try:
        await repeat(lambda: None, lambda: len(begun) == REVIEWS_MAX)
        await turns(50)
        assert len(begun) == REVIEWS_MAX
        reviewed = {json.loads(line)["custom_id"] for line in begun}
        waiting = [record for record, name in zip(records, "abcd", strict=True) if name not in reviewed]
        bench.store.cancel(waiting[0].batch.id)
        await repeat(lambda: bench.clock.advance(SAVE_S), lambda: bench.has_ended(waiting[0]))
        assert (bench.state(waiting[0]).status, len(begun)) == ("cancelled", REVIEWS_MAX)
    finally:
        leave.set()
    others = [await bench.ended(record) for record in records if record is not waiting[0]]
    await bench.runner.close()
    assert [batch.status for batch in others] == ["completed"] * 3


async def test_runner_retries_lines_refused_for_overload(tmp_path: Path) -> None:
    bench = Bench(tmp_path, concurrency=1)
    bench.answers["a"] = [
        LineResponse(503, b"", "r", 0.0),
        LineResponse(429, b"", "r", 60.0),
        LineResponse(200, b"{}", "r"),
    ]
    record = bench.begin("a", "b")
    bench.runner.start()
    batch = await bench.ended(record)
    await bench.runner.close()
    assert bench.received_requests.count("a") == 3 and bench.received_requests.count("b") == 1
    assert bench.clock.wall() >= 1060
    assert batch.request_counts.completed == 2


async def test_waiting_batch_does_not_block_other_batches(tmp_path: Path) -> None:
    bench = Bench(tmp_path, concurrency=2)
    ids = [f"s{place}" for place in range(BEGUN_MAX * 2)]
    bench.answers |= {one: [LineResponse(503, b"", "r", 5.0)] for one in ids}
    stuck, other = bench.begin(*ids), bench.begin("a")
    bench.runner.start()
    assert (await bench.ended(other)).status == "completed"
    assert bench.state(stuck).status == "in_progress"
    assert len(set(bench.received_requests) - {"a"}) <= BEGUN_MAX
    await bench.runner.close()


async def test_restarted_runner_sends_only_lines_without_a_result(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.hold = {"b", "d"}
    record = bench.begin("a", "b", "c", "d", "e")
    bench.runner.start()
    await bench.until(
        lambda: len(bench.store.results(record.batch.id)[0]) >= 2 and set(bench.received_requests) >= bench.hold
    )
    await bench.runner.close()
    before = bench.store.results(record.batch.id)[0]
    assert set(bench.left) >= bench.hold
    again = Bench(tmp_path, bench.clock)
    again.runner.start()
    batch = await again.ended(record)
    await again.runner.close()
    assert set(again.received_requests) == {"a", "b", "c", "d", "e"} - before
    assert set(again.lines(batch.output_file_id)) == {"a", "b", "c", "d", "e"}
    assert batch.request_counts.completed == 5


@pytest.mark.parametrize("status", ["finalizing", "cancelling"])
async def test_finalizing_or_cancelling_batch_ends_after_a_restart(tmp_path: Path, status: str) -> None:
    bench = Bench(tmp_path)
    record = bench.begin("a")
    bench.store.append_result(record.batch.id, {"custom_id": "a"}, False)
    record.batch.status = status
    bench.store.save(record)
    bench.runner.start()
    batch = await bench.ended(record)
    await bench.runner.close()
    assert batch.status == {"finalizing": "completed", "cancelling": "cancelled"}[status]
    assert set(bench.lines(batch.output_file_id)) == {"a"}
    assert bench.received_requests == []


async def test_cancelled_batch_keeps_its_results_and_drops_open_lines(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.hold = {"b"}
    record = bench.begin("a", "b")
    bench.runner.start()
    await bench.until(lambda: set(bench.received_requests) == {"a", "b"} and bench.store.results(record.batch.id)[0])
    bench.store.cancel(record.batch.id)
    bench.runner.nudge()
    batch = await bench.ended(record)
    await bench.runner.close()
    assert (batch.status, bench.left) == ("cancelled", ["b"])
    assert batch.cancelled_at is not None and batch.cancelling_at is not None
    assert set(bench.lines(batch.output_file_id)) == {"a"}
    assert bench.lines(batch.error_file_id)["b"]["error"]["code"] == "batch_cancelled"


async def test_expired_batch_keeps_its_results(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.hold = {"b"}
    record = bench.begin("a", "b")
    bench.runner.start()
    await bench.until(lambda: bench.state(record).request_counts.completed == 1)
    bench.clock.advance(10_000)
    batch = await bench.ended(record)
    await bench.runner.close()
    assert batch.status == "expired" and batch.expired_at is not None and batch.expired_at >= 10_000
    assert bench.lines(batch.error_file_id)["b"]["error"]["code"] == "batch_expired"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)


async def test_missing_input_file_fails_the_batch(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    record = bench.begin("a")
    os.unlink(bench.store.path(record.batch.input_file_id))
    bench.runner.start()
    batch = await bench.ended(record)
    await bench.runner.close()
    assert batch.status == "failed"
    assert batch.errors is not None and batch.errors.data[0].code == "file_not_found"


async def test_full_disk_loses_no_request_of_a_batch_and_repeats_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path)
    record = bench.begin("a", "b", "c")
    left = {"writes": 40}

    def write_whole(out: Any, data: bytes) -> None:
        if left["writes"] and bench.received_requests:
            left["writes"] -= 1
            out.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        out.write(data)

    monkeypatch.setattr(store, "write_whole", write_whole)
    bench.runner.start()
    batch = await bench.ended(record)
    await bench.runner.close()
    assert left["writes"] == 0
    assert (batch.status, batch.request_counts.completed) == ("completed", 3)
    assert sorted(bench.received_requests) == ["a", "b", "c"], "no request is repeated"
    assert set(bench.lines(batch.output_file_id)) == {"a", "b", "c"}
    assert "No space left on device" in caplog.text and "Traceback" not in caplog.text
    assert not [name for name in os.listdir(tmp_path / "batches") if name.endswith(".part")]


async def test_batch_with_repeated_failures_ends_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path)
    record = bench.begin("a")

    def broken(*values: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(bench.store, "results", broken)
    bench.runner.start()
    began = bench.clock.now()
    batch = await bench.ended(record)
    await bench.runner.close()
    assert batch.status == "failed" and batch.errors is not None
    assert bench.clock.now() - began >= REST_S * (FAILURES_MAX - 1)
    assert caplog.text.count("Traceback") == FAILURES_MAX


def damage(path: str) -> None:
    """Overwrite the second of three lines."""
    lines = list(lines_of(path))
    Path(path).write_bytes(b"".join([lines[0], b"\0" * 20 + b"\n", lines[2]]))


async def test_batch_with_a_damaged_input_ends_as_failed_and_keeps_its_results(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.hold = {"b"}
    record = bench.begin("a", "b", "c")
    bench.runner.start()
    await bench.until(lambda: len(bench.store.results(record.batch.id)[0]) >= 1)
    await bench.runner.close()
    damage(bench.store.path(record.batch.input_file_id))
    again = Bench(tmp_path, bench.clock)
    again.runner.start()
    batch = await again.ended(record)
    await again.runner.close()
    assert batch.status == "failed" and batch.failed_at is not None and batch.errors is not None
    assert (batch.errors.data[0].line, batch.errors.data[0].code) == (2, "invalid_json_line")
    found = {**again.lines(batch.output_file_id), **again.lines(batch.error_file_id)}
    assert {"a", "c"} <= set(found)


async def test_second_process_runs_batches_after_the_first_one_ends(tmp_path: Path) -> None:
    first = Bench(tmp_path)
    first.runner.start()
    await first.until(lambda: first.store._lock is not None)
    second = Bench(tmp_path, first.clock)
    second.runner.start()
    record = second.begin("a")
    await first.ended(record)
    assert (first.received_requests, second.received_requests) == (["a"], [])
    await first.runner.close()
    record = second.begin("b")
    await second.ended(record)
    assert second.received_requests == ["b"]
    await second.runner.close()


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_every_line_has_one_result_after_any_sequence_of_process_restarts(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any responses, restarts, cancellation or expiry."""
    asyncio.run(run_randomly(data, tmp_path_factory.mktemp("batches")))


def has_ended(steps: Iterator[int]) -> bool:
    return next(steps, None) is None


async def run_randomly(data: st.DataObject, folder: Path) -> None:
    output = st.sampled_from(
        [LineResponse(200, b"{}", "r"), LineResponse(500, b"{}", "r"), LineResponse(503, b"", "r", 0.0)]
    )
    ids = [f"l{place}" for place in range(data.draw(st.integers(1, 12)))]
    answers = {one: [*data.draw(st.lists(output, max_size=3)), LineResponse(200, b"{}", "r")] for one in ids}
    clock = ManualClock(wall=1000.0)
    bench = Bench(folder, clock)
    record = bench.begin(*ids, expires_at=data.draw(st.sampled_from([1003, 10_000])))
    known: set[str] = set()
    for _ in range(data.draw(st.integers(0, 3))):
        bench = Bench(folder, clock)
        bench.answers = answers
        bench.runner.start()
        steps = iter(range(data.draw(st.integers(0, 20))))
        await repeat(lambda: clock.advance(STEP_S), partial(has_ended, steps))
        await bench.runner.close()
        assert not known & set(bench.received_requests), "a line with a result was asked again"
        if not bench.state(record).output_file_id:
            known = set.union(*bench.store.results(record.batch.id))
    if data.draw(st.booleans()):
        bench.store.cancel(record.batch.id)
    bench = Bench(folder, clock)
    bench.answers = answers
    bench.runner.start()
    batch = await bench.ended(record)
    await bench.runner.close()
    files = (batch.output_file_id, batch.error_file_id)
    lines = [json.loads(line) for one in files if one is not None for line in lines_of(bench.store.path(one))]
    assert sorted(line["custom_id"] for line in lines) == sorted(ids)
    assert len({line["id"] for line in lines}) == len(ids)
    counts = batch.request_counts
    assert (counts.total, counts.completed + counts.failed) == (len(ids), len(ids))
    assert bench.store.results(batch.id) == (set(), set()), "what is in files is nowhere else"
