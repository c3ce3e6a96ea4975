"""Controllers: keys are reconciled until they succeed, and failures are logged once."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.settle import turns, until

from dynamo.core.clock import ManualClock
from dynamo.core.errors import DynamoException
from dynamo.k8s.client import KubeRefused, KubeUnavailable
from dynamo.k8s.controller import Controller, FailureLog, ReconcileResult
from dynamo.k8s.workqueue import RetryLimits, WorkQueue

LIMITS = RetryLimits(first_s=1.0, max_s=8.0, per_s=1000.0, burst=1000)


class Controlled:
    """A controller whose reconcile function does what a test sets."""

    def __init__(self, workers: int = 2, deadline_s: float = 60.0) -> None:
        self.clock = ManualClock()
        self.queue = WorkQueue[str](LIMITS, clock=self.clock)
        self.results: list[ReconcileResult[str]] = []
        self.error: Exception | None = None
        self.again_s: float | None = None
        self.takes_s = 0.0
        self.running: list[str] = []
        self.reconciled: list[str] = []
        self.during: Callable[[str], object] = lambda _: None
        self.hook_error: Exception | None = None
        self.controller = Controller(
            "graph",
            self._reconcile,
            self.queue,
            workers,
            deadline_s=deadline_s,
            on_result=self._on_result,
            clock=self.clock,
        )

    async def _reconcile(self, key: str) -> float | None:
        assert key not in self.running, "a key is reconciled twice at the same time"
        self.running.append(key)
        try:
            self.during(key)
            await self.clock.sleep(self.takes_s)
            if self.error:
                raise self.error
            self.reconciled.append(key)
            return self.again_s
        finally:
            self.running.remove(key)

    def _on_result(self, result: ReconcileResult[str]) -> None:
        self.results.append(result)
        if self.hook_error:
            raise self.hook_error

    async def advance(self, seconds: float = 0.0) -> None:
        await turns(10)
        self.clock.advance(seconds)
        await turns(20)

    @property
    def outcomes(self) -> list[str]:
        return [one.outcome for one in self.results]


@asynccontextmanager
async def controlled(workers: int = 2, deadline_s: float = 60.0) -> AsyncIterator[Controlled]:
    made = Controlled(workers, deadline_s)
    made.controller.start()
    yield made
    await made.controller.stop(0.0)


async def test_each_key_is_reconciled_and_reported() -> None:
    async with controlled() as made:
        made.takes_s = 3.0
        made.queue.add("a")
        made.queue.add("b")
        await made.advance(3.0)
        assert made.reconciled == ["a", "b"]
        assert made.results == [ReconcileResult("a", "success", 3.0), ReconcileResult("b", "success", 3.0)]
        assert made.controller.is_sound


async def test_at_most_as_many_keys_run_as_there_are_workers() -> None:
    async with controlled(workers=2) as made:
        made.takes_s = 1.0
        for key in "abc":
            made.queue.add(key)
        await made.advance()
        assert (made.running, made.queue.depth) == (["a", "b"], 1)
        await made.advance(1.0)
        assert made.running == ["c"]
        await made.advance(1.0)


async def test_returned_seconds_requeue_the_key_once_for_each_result() -> None:
    async with controlled() as made:
        made.again_s = 30.0
        made.queue.add("a")
        await made.advance()
        await made.advance(29.0)
        assert made.outcomes == ["requeue"]
        made.again_s = None
        await made.advance(1.0)
        await made.advance(100.0)
        assert made.outcomes == ["requeue", "success"]


@pytest.mark.parametrize(
    "error",
    [
        KubeRefused(409, "Conflict", "the object has been modified"),
        KubeUnavailable("gone"),
        DynamoException("no"),
        KeyError("x"),
        TimeoutError("own"),
    ],
)
async def test_failed_key_is_retried_with_growing_delays_and_logged_once(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with controlled() as made:
        made.error = error
        made.queue.add("a")
        for _ in range(15):
            await made.advance(1.0)
        assert made.outcomes == ["error"] * 5
        assert made.results[0].error is error
        made.error = None
        for _ in range(16):
            await made.advance(1.0)
        assert made.outcomes == [*["error"] * 5, "success"]
        assert made.queue.failures("a") == 0
    is_defect = not isinstance(error, DynamoException)
    assert [one.levelno for one in caplog.records] == [logging.ERROR if is_defect else logging.WARNING]
    assert (caplog.records[0].exc_info is not None) == is_defect
    assert "controller graph: failed to reconcile a: " in caplog.text


def test_message_is_logged_again_after_every_key_recovered(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureLog("graph")
    away, other = KubeUnavailable("away"), KubeUnavailable("other")
    for key in "abc":
        failures.failed(key, away)
    failures.failed("a", other)
    failures.failed("a", other)
    assert [one.args[1] for one in caplog.records if isinstance(one.args, tuple)] == ["a", "a"]
    for key in "abc":
        failures.succeeded(key)
    caplog.clear()
    failures.failed("b", away)
    assert "failed to reconcile b: KubeUnavailable: away" in caplog.text


async def test_reconciliation_beyond_the_deadline_is_ended_and_retried(caplog: pytest.LogCaptureFixture) -> None:
    async with controlled(deadline_s=0.01) as made:
        made.takes_s = 1000.0
        made.queue.add("a")
        await until(lambda: made.results)
        assert made.outcomes == ["error"]
        assert made.queue.delayed == 1
    assert "failed to reconcile a: ReconcileTimeout: no result within 0.01 s" in caplog.text


async def test_cancellation_inside_a_reconciliation_does_not_end_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    async with controlled(workers=1) as made:
        cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        cancelled.cancel()
        made.during = lambda _: cancelled.result()
        made.queue.add("a")
        await made.advance()
        assert made.outcomes == ["error"]
        made.during = lambda _: None
        await made.advance(1.0)
        assert made.outcomes == ["error", "success"]
    assert "an operation that the reconciliation awaited was cancelled" in caplog.text


async def test_failing_hook_does_not_end_the_worker() -> None:
    async with controlled(workers=1) as made:
        made.hook_error = ValueError("hook")
        made.queue.add("a")
        await made.advance()
        made.hook_error = None
        made.queue.add("b")
        await made.advance(1.0)
        assert made.reconciled == ["a", "b"]


async def test_key_that_changes_during_its_reconciliation_is_reconciled_again_afterwards() -> None:
    async with controlled() as made:
        made.takes_s = 1.0
        made.queue.add("a")
        await made.advance()
        made.queue.add("a")
        await made.advance(1.0)
        assert (made.reconciled, made.running) == (["a"], ["a"])
        await made.advance(1.0)
        assert made.reconciled == ["a", "a"]


async def test_stop_waits_for_running_reconciliations_and_starts_no_further_ones() -> None:
    made = Controlled(workers=1)
    made.controller.start()
    made.takes_s = 1.0
    made.queue.add("a")
    made.queue.add("b")
    await made.advance()
    stopping = asyncio.ensure_future(made.controller.stop(10.0))
    await made.advance(1.0)
    assert await stopping
    assert made.reconciled == ["a"]


async def test_stop_cancels_reconciliations_that_do_not_end(caplog: pytest.LogCaptureFixture) -> None:
    made = Controlled(workers=1)
    made.controller.start()
    made.takes_s = 1000.0
    made.queue.add("a")
    await made.advance()
    assert not await made.controller.stop(0.001)
    assert (made.reconciled, made.running) == ([], [])
    assert "controller graph: reconciliations still run after 0.001 s" in caplog.text


@given(st.lists(st.sampled_from(["a", "b", "c", "fail", "recover", "pass"]), max_size=40), st.integers(1, 3))
def test_last_change_of_every_object_is_reconciled_despite_failures(steps: list[str], workers: int) -> None:
    async def run() -> None:
        versions: dict[str, int] = {}
        read: dict[str, int] = {}
        async with controlled(workers) as made:
            made.takes_s = 0.5

            def during(key: str) -> None:
                read[key] = versions[key]

            made.during = during
            for step in steps:
                match step:
                    case "fail":
                        made.error = KubeUnavailable("gone")
                    case "recover":
                        made.error = None
                    case "pass":
                        await made.advance(1.0)
                    case _:
                        versions[step] = versions.get(step, 0) + 1
                        made.queue.add(step)
            made.error = None
            for _ in range(16):
                await made.advance(1.0)
            assert set(made.reconciled) == set(versions)
            assert read == versions
            assert (made.queue.depth, made.queue.delayed, made.queue.processing) == (0, 0, 0)

    asyncio.run(run())
