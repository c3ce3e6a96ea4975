"""BatchRunner: background worker that runs batches line by line with the capacity that clients leave unused.

Of all processes that share a directory, the one with the lock runs its batches. All progress is stored in the directory:
after a restart, of this process or another one, only lines without a result are requested.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from dynamo.api.batches.lines import LineResponse, RequestLine, Review, read_line, review
from dynamo.api.batches.records import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    VALIDATING,
    BatchRecord,
    LineError,
    LineErrors,
    RequestCounts,
    new_id,
    result_line,
)
from dynamo.api.batches.slots import Slots
from dynamo.api.batches.store import BatchStore, lines_of
from dynamo.core.backoff import Backoff
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.codec import UNREADABLE
from dynamo.core.errors import Cancelled, Overloaded
from dynamo.core.tasks import TaskOwner
from dynamo.core.threads import in_daemon_thread
from dynamo.serving.bodies import check_slow

logger = logging.getLogger(__name__)

POLL_S = 2.0  # Maximum delay before another process's new batch or cancellation is noticed.
SWEEP_S = 600.0
SAVE_S = 1.0  # Maximum age of the counts shown to clients.
REVIEWS_MAX = 2  # Files reviewed at the same time: each thread delays the event loop's, and holds a line in memory.
REVIEW_RETRY_S = 5.0  # Delay before a file is reviewed again that found all child processes in use.
REST_S = 30.0  # Delay before a batch that failed because of a server error is retried.
BEGUN_MAX = 64  # Lines of a batch in memory; more than there are slots, so that a waiting line delays no other.
RETRY_FIRST_S, RETRY_MAX_S = 0.5, 30.0  # Delays between attempts of a line while no worker accepts it.
UNANSWERED = {
    EXPIRED: ("batch_expired", "This request could not be answered before the completion window ended."),
    FAILED: ("batch_failed", "The batch failed before this request was answered: its input file cannot be read."),
    CANCELLED: ("batch_cancelled", "The batch was cancelled before this request was answered."),
}


FAILURES_MAX = 5  # Consecutive failures of a batch, after which it ends as failed.
REST_LINES = 500  # Results written at a time if a batch ends early.

R = TypeVar("R")


class DamagedInput(Exception):
    """A line of a validated input file can no longer be decoded."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"line {number} of the input file can no longer be decoded")


class Wanted(Struct):
    """Whether a computation in a thread is still wanted."""

    is_so: bool = True


NOT_NOW = LineResponse(503, b"", "", 0.0)

SendLine = Callable[[RequestLine, str | None], Awaitable[LineResponse]]
"""Sends a line on behalf of the owner of its batch and returns the response."""


class BatchRunner:
    """Runner of all batches of one directory."""

    def __init__(
        self,
        store: BatchStore,
        send_line: SendLine,
        slots: Slots,
        *,
        may_run: Callable[[], bool] = lambda: True,
        clock: Clock | None = None,
    ) -> None:
        """`may_run`: whether new lines may be started."""
        self._store = store
        self._send = send_line
        self._slots = slots
        self._may_run = may_run
        self._clock = clock or SystemClock()
        self._tasks = TaskOwner("batches")
        self._reviews = asyncio.Semaphore(REVIEWS_MAX)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._resting: dict[str, float] = {}
        self._blocked: set[str] = set()
        """Batches that wait until the disk is writable."""
        self._failures: dict[str, int] = {}
        """Consecutive internal failures of each batch."""
        self._nudged = asyncio.Event()
        self._swept_s = float("-inf")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        """Single thread for all records and results, so that older data never replaces newer data."""

    @property
    def running(self) -> int:
        """Number of batches run by this process."""
        return len(self._running)

    def start(self) -> None:
        """Start the runner; a crashed task is restarted."""
        self._tasks.supervise(self._keep, "runner", clock=self._clock)

    def nudge(self) -> None:
        """Wake up the runner: batches have changed."""
        self._nudged.set()

    async def close(self) -> None:
        """Stop at once: started lines without a result are requested again after the next start."""
        await self._tasks.cancel_and_wait()
        await asyncio.to_thread(self._thread.shutdown)
        self._store.unlock()

    async def _keep(self) -> None:
        while True:
            self._nudged.clear()
            try:
                if await self._in_order(self._store.try_lock):
                    await self.look()
            except OSError as error:
                logger.warning("failed to look for batches: %s; trying again in %g s", error, POLL_S)
            with contextlib.suppress(TimeoutError):
                await self._wait_nudged()

    async def _wait_nudged(self) -> None:
        nudged = asyncio.ensure_future(self._nudged.wait())
        later = asyncio.ensure_future(self._clock.sleep(POLL_S))
        try:
            await asyncio.wait({nudged, later}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            nudged.cancel()
            later.cancel()

    async def look(self) -> None:
        """Start every open batch that is not running yet."""
        now_s = self._clock.now()
        if now_s - self._swept_s > SWEEP_S:
            self._swept_s = now_s
            await self._in_order(self._store.sweep)
        for record in await self._in_order(self._store.open_batches):
            key = record.batch.id
            if key not in self._running and self._resting.get(key, now_s) <= now_s and self._may_run():
                self._resting.pop(key, None)
                self._running[key] = self._tasks.start(self._guard(record), key)

    async def _guard(self, record: BatchRecord) -> None:
        key = record.batch.id
        try:
            await self.run(record)
            self._failures.pop(key, None)
        except OSError as error:
            logger.warning("batch %s: %s; trying again in %g s", key, error, REST_S)
            self._resting[key] = self._clock.now() + REST_S
        except Exception:  # Task owner: other batches are run.
            self._failures[key] = self._failures.get(key, 0) + 1
            if self._failures[key] < FAILURES_MAX:
                logger.exception("batch %s failed; trying again in %g s", key, REST_S)
                self._resting[key] = self._clock.now() + REST_S
            else:
                logger.exception("batch %s failed %d times in a row and ends", key, FAILURES_MAX)
                await self._give_up(record)
        finally:
            self._blocked.discard(key)
            del self._running[key]
            self._nudged.set()

    async def _give_up(self, record: BatchRecord) -> None:
        """End a batch that repeatedly failed because of a server error."""
        batch = record.batch
        self._failures.pop(batch.id, None)
        batch.status, batch.failed_at = FAILED, int(self._clock.wall())
        batch.errors = LineErrors(data=[LineError(code="internal_error", message="The batch could not be answered")])
        await self._persist(record, self._store.save, record)

    # One batch.

    async def run(self, record: BatchRecord) -> None:
        """Run a batch from its present state to its end."""
        batch = record.batch
        if batch.status == VALIDATING and not await self._validate(record):
            return
        if batch.status == IN_PROGRESS:
            try:
                end = await self._answer(record)
            except* DamagedInput as group:
                end = FAILED
                error = first_of(group)
                message = f"line {error.number} of {batch.input_file_id} can no longer be decoded"
                batch.errors = LineErrors(
                    data=[LineError(code="invalid_json_line", message=message, line=error.number)]
                )
                logger.warning("batch %s: %s", batch.id, message)
            if end != COMPLETED:
                await self._persist(record, self._fail_rest, record, end)
            batch.status, batch.finalizing_at = FINALIZING, int(self._clock.wall())
            if end == CANCELLED:
                batch.cancelling_at = self._store.cancelled_s(batch.id)
                batch.status = CANCELLING
            elif end == EXPIRED:
                batch.expired_at = int(self._clock.wall())
            await self._count(record)  # Must run before the results become files, which are not counted.
            await self._save(record)
        await self._finalize(record)

    async def _validate(self, record: BatchRecord) -> bool:
        """Validate the input file; return whether the batch continues: with its lines, or with its end if it was cancelled."""
        batch = record.batch
        try:
            found = await self._review(record)
        except FileNotFoundError:
            error = LineError(code="file_not_found", message=f"{batch.input_file_id} no longer exists")
            batch.errors = LineErrors(data=[error])
        else:
            if found is None:
                await self._begin_to_cancel(record)
                return True
            batch.request_counts.total = found.total
            batch.model = found.model
            batch.errors = LineErrors(data=found.errors) if found.errors else None
        now = int(self._clock.wall())
        if batch.errors is not None:
            batch.status, batch.failed_at = FAILED, now
            batch.request_counts = RequestCounts()
            logger.info("batch %s failed: %s", batch.id, batch.errors.data[0].message)
        else:
            batch.status, batch.in_progress_at = IN_PROGRESS, now
        await self._save(record)
        return batch.errors is None

    async def _review(self, record: BatchRecord) -> Review | None:
        """Return the errors of the input file; None if the batch is cancelled while it waits, for its turn or for the check of a slow line.

        While all child processes for slow lines are in use, wait and start again. Raise `Overloaded` if that lasts until the batch
        expires, and `FileNotFoundError`.
        """
        batch = record.batch
        try:
            while True:
                turn = asyncio.ensure_future(self._reviews.acquire())
                try:
                    await self._wait_a_second({turn})
                    while not turn.done():
                        if self._is_cancelled(record):
                            return None
                        await self._wait_a_second({turn})
                    return await self._review_now(record)
                except Overloaded:
                    if self._clock.wall() >= batch.expires_at:
                        raise
                finally:
                    if not turn.cancel():
                        self._reviews.release()
                retry_s = self._clock.now() + REVIEW_RETRY_S
                while self._clock.now() < retry_s:
                    if self._is_cancelled(record):
                        return None
                    await self._wait_a_second(set())
        except Cancelled:
            return None

    async def _review_now(self, record: BatchRecord) -> Review:
        """Review the input file in a thread. Raise `Cancelled` if the batch is cancelled during the check of a slow line."""
        path, wanted = self._store.path(record.batch.input_file_id), Wanted()

        def check(line: bytes) -> None:
            check_slow(line, "batch_line", lambda: wanted.is_so)

        work = in_daemon_thread(lambda: review(lines_of(path), record.batch.endpoint, check), "batch review")
        reviewing = asyncio.ensure_future(work)
        try:
            while not reviewing.done():
                wanted.is_so = not self._is_cancelled(record)
                await self._wait_a_second({reviewing})
            return await reviewing
        finally:
            wanted.is_so = False  # If this task is cancelled, the thread does not wait for a child any more.

    async def _wait_a_second(self, tasks: "set[asyncio.Future[Any]]") -> None:
        """Wait `SAVE_S`, or until one of the tasks is done."""
        tick: asyncio.Future[Any] = asyncio.ensure_future(self._clock.sleep(SAVE_S))
        try:
            await asyncio.wait({*tasks, tick}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            tick.cancel()

    async def _begin_to_cancel(self, record: BatchRecord) -> None:
        batch = record.batch
        batch.status, batch.cancelling_at = CANCELLING, self._store.cancelled_s(batch.id)
        await self._save(record)

    async def _answer(self, record: BatchRecord) -> str:
        """Request all lines without a result; return the final status."""
        asking = asyncio.ensure_future(self._run_lines(record))
        try:
            while not asking.done():
                end = self._ended_early(record)
                if end is not None:
                    return end
                await self._wait_a_second({asking})
            await asking
            return COMPLETED
        finally:
            asking.cancel()
            await asyncio.wait({asking})

    def _is_cancelled(self, record: BatchRecord) -> bool:
        return self._store.cancelled_s(record.batch.id) is not None

    def _ended_early(self, record: BatchRecord) -> str | None:
        if self._is_cancelled(record):
            return CANCELLED
        return EXPIRED if self._clock.wall() >= record.batch.expires_at else None

    async def _run_lines(self, record: BatchRecord) -> None:
        batch = record.batch
        completed, failed = await self._in_order(self._store.results, batch.id)
        batch.request_counts.completed, batch.request_counts.failed = len(completed), len(failed)
        done = completed | failed
        saving = asyncio.ensure_future(self._save_now_and_then(record))
        begun = asyncio.Semaphore(BEGUN_MAX)
        lines = self._lines(batch.input_file_id)
        try:
            async with asyncio.TaskGroup() as group:
                while (found := await asyncio.to_thread(next, lines, None)) is not None:
                    number, data = found
                    try:
                        line = read_line(data)
                    except UNREADABLE:
                        raise DamagedInput(number) from None
                    if line.custom_id not in done:
                        await begun.acquire()
                        task = group.create_task(self._run_line(record, line), name=line.custom_id)
                        task.add_done_callback(lambda _: begun.release())
        finally:
            saving.cancel()
            await asyncio.wait({saving})

    def _lines(self, file_id: str) -> Iterator[tuple[int, bytes]]:
        """Yield the lines of an input with their numbers; none if the file was removed from the directory."""
        try:
            yield from (found for found in enumerate(lines_of(self._store.path(file_id)), 1) if found[1].strip())
        except FileNotFoundError:
            logger.warning("the input file %s no longer exists", file_id)

    async def _run_line(self, record: BatchRecord, line: RequestLine) -> None:
        """Request one line until it has a result."""
        backoff = Backoff(RETRY_FIRST_S, RETRY_MAX_S)
        while True:
            await self._slots.take()
            try:
                answer = await self._send(line, record.owner) if self._may_run() else NOT_NOW
            finally:
                self._slots.give_back()
            if answer.retry_after_s is None:
                await self._keep_result(record, line, answer)
                return
            await self._clock.sleep(max(backoff.next(random.random()), answer.retry_after_s))

    async def _keep_result(self, record: BatchRecord, line: RequestLine, answer: LineResponse) -> None:
        response = {
            "status_code": answer.status,
            "request_id": answer.request_id,
            "body": msgspec.Raw(answer.body),
        }
        result_record = result_line(new_id("batch_req_"), line.custom_id, response=response, error=None)
        is_error = answer.status >= 400
        await self._persist(record, self._store.append_result, record.batch.id, result_record, is_error)
        counts = record.batch.request_counts
        counts.failed += is_error
        counts.completed += not is_error

    async def _save_now_and_then(self, record: BatchRecord) -> None:
        saved = -1
        while True:
            counts = record.batch.request_counts
            if counts.completed + counts.failed != saved:
                with contextlib.suppress(OSError):  # Results are authoritative; the counts are saved again later.
                    await self._save(record)
                    saved = counts.completed + counts.failed
            await self._clock.sleep(SAVE_S)

    def _fail_rest(self, record: BatchRecord, end: str) -> None:
        """Write an error result for every line without a result."""
        batch = record.batch
        completed, failed = self._store.results(batch.id)
        code, message = UNANSWERED[end]
        error: dict[str, Any] = {"code": code, "message": message}
        unanswered: list[dict[str, Any]] = []
        for _, data in self._lines(batch.input_file_id):
            try:
                custom_id = read_line(data).custom_id
            except UNREADABLE:
                continue
            if custom_id not in completed and custom_id not in failed:
                unanswered.append(result_line(new_id("batch_req_"), custom_id, response=None, error=error))
        for place in range(0, len(unanswered), REST_LINES):
            self._store.append_results(batch.id, unanswered[place : place + REST_LINES], is_error=True)

    async def _count(self, record: BatchRecord) -> None:
        """Count the results; if they have already become files, keep the counts."""
        completed, failed = await self._persist(record, self._store.results, record.batch.id)
        if completed or failed:
            counts = record.batch.request_counts
            counts.completed, counts.failed = len(completed), len(failed)

    async def _finalize(self, record: BatchRecord) -> None:
        """Publish the results as files and end the batch."""
        batch = record.batch
        await self._count(record)
        await self._persist(record, self._store.publish, record)
        now = int(self._clock.wall())
        if batch.errors is not None:
            batch.status, batch.failed_at = FAILED, now
        elif batch.status == CANCELLING:
            batch.status, batch.cancelled_at = CANCELLED, now
        elif batch.expired_at is not None:
            batch.status = EXPIRED
        else:
            batch.status, batch.completed_at = COMPLETED, now
        await self._persist(record, self._store.save, record)
        counts = batch.request_counts
        logger.info(
            "batch %s ended: %s, %d answered, %d failed", batch.id, batch.status, counts.completed, counts.failed
        )

    def _in_order(self, work: Callable[..., R], *values: Any) -> "asyncio.Future[R]":
        """Run work on the store's thread; it completes even if the caller is cancelled."""
        return asyncio.get_running_loop().run_in_executor(self._thread, work, *values)

    async def _persist(self, record: BatchRecord, work: Callable[..., R], *values: Any) -> R:
        """Run work on the store's thread until the disk accepts it: on a full disk no response is lost or requested again.

        Started work completes, even if the batch ends.
        """
        backoff = Backoff(RETRY_FIRST_S, RETRY_MAX_S)
        while True:
            try:
                result = await asyncio.shield(self._in_order(work, *values))
            except OSError as error:
                if record.batch.id not in self._blocked:  # Log once per batch: all of its lines wait.
                    self._blocked.add(record.batch.id)
                    logger.warning("batch %s: waiting until the disk is writable: %s", record.batch.id, error)
                await self._clock.sleep(backoff.next(random.random()))
            else:
                self._blocked.discard(record.batch.id)
                return result

    async def _save(self, record: BatchRecord) -> None:
        await self._in_order(self._store.save, record)


def first_of(group: BaseExceptionGroup[DamagedInput]) -> DamagedInput:
    """Return the first error of a group, at any depth."""
    first = group.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first
