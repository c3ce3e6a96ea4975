"""Task owner: work that is watched."""

import asyncio
import logging

import pytest
from tests.settle import turns

from dynamo.core.clock import ManualClock
from dynamo.core.errors import DynamoException
from dynamo.core.tasks import PROVEN_S, RESTART_FIRST_S, TaskOwner


async def test_task_owner_logs_a_crash_with_traceback_and_reports_it(caplog: pytest.LogCaptureFixture) -> None:
    crashes: list[tuple[str, BaseException]] = []
    owner = TaskOwner("owner", lambda name, error: crashes.append((name, error)))

    async def crash() -> None:
        raise ValueError("boom")

    with caplog.at_level(logging.ERROR):
        owner.start(crash(), "work")
        assert await owner.wait(1.0)
    assert [(name, str(error)) for name, error in crashes] == [("owner.work", "boom")]
    assert "boom" in caplog.text
    assert "Traceback" in caplog.text
    assert len(owner) == 0


async def test_task_owner_keeps_other_tasks_running_after_a_crash() -> None:
    owner = TaskOwner("owner")
    go = asyncio.Event()
    done: list[str] = []

    async def crash() -> None:
        raise ValueError

    async def survive() -> None:
        await go.wait()
        done.append("survived")

    owner.start(crash(), "crash")
    owner.start(survive(), "survive")
    await turns()
    go.set()
    assert await owner.wait(1.0)
    assert done == ["survived"]


async def test_task_owner_cancels_tasks_on_close_and_refuses_new_ones() -> None:
    owner = TaskOwner("owner")
    task = owner.start(asyncio.Event().wait(), "forever")  # type: ignore[arg-type]
    await owner.cancel_and_wait()
    assert task.cancelled()
    with pytest.raises(DynamoException, match="closed"):
        owner.start(turns(), "late")


async def test_task_owner_wait_reports_a_timeout() -> None:
    owner = TaskOwner("owner")
    owner.start(asyncio.Event().wait(), "forever")  # type: ignore[arg-type]
    assert not await owner.wait(0.0)
    await owner.cancel_and_wait()


async def test_task_owner_names_and_abandons_a_task_that_ignores_cancellation(caplog: pytest.LogCaptureFixture) -> None:
    owner = TaskOwner("owner")
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    task = owner.start(stubborn(), "stubborn")
    await turns()
    await owner.cancel_and_wait(timeout_s=0.0)
    assert "owner.stubborn did not end" in caplog.text
    release.set()
    await task


async def test_task_owner_can_be_closed_by_one_of_its_tasks() -> None:
    owner = TaskOwner("owner")
    task = owner.start(owner.cancel_and_wait(), "suicide")
    await task
    assert len(owner) <= 1


# Supervision -------------------------------------------------------------------------------------------------------


class Fragile:
    """Work that fails a given number of times, then runs until it is released."""

    def __init__(self, deaths: int) -> None:
        self.deaths = deaths
        self.begun = 0
        self.go = asyncio.Event()

    async def run(self) -> None:
        self.begun += 1
        if self.begun <= self.deaths:
            raise ValueError(f"death {self.begun}")
        await self.go.wait()


async def settle() -> None:
    await turns(10)


async def test_supervised_task_restarts_after_a_crash_and_is_unhealthy_until_proven() -> None:
    owner, clock, work = TaskOwner("owner"), ManualClock(), Fragile(deaths=2)
    owner.supervise(work.run, "watch", clock=clock)
    await settle()
    assert (work.begun, owner.is_sound, owner.down) == (1, False, {"watch"})
    clock.advance(RESTART_FIRST_S)
    await settle()
    assert (work.begun, owner.is_sound) == (2, False)
    clock.advance(2 * RESTART_FIRST_S)
    await settle()
    assert (work.begun, owner.is_sound) == (3, False)
    clock.advance(PROVEN_S)
    await settle()
    assert owner.is_sound
    assert owner.restarts == 2
    work.go.set()
    assert await owner.wait(1.0)


async def test_supervised_task_is_not_restarted_after_it_returns() -> None:
    owner, work = TaskOwner("owner"), Fragile(deaths=0)
    work.go.set()
    owner.supervise(work.run, "watch", clock=ManualClock())
    assert await owner.wait(1.0)
    assert (work.begun, owner.is_sound) == (1, True)


@pytest.mark.parametrize("deaths", [0, 1])
async def test_task_owner_close_ends_a_supervised_task_that_crashed(deaths: int) -> None:
    owner, clock, work = TaskOwner("owner"), ManualClock(), Fragile(deaths)
    owner.supervise(work.run, "watch", clock=clock)
    await settle()
    clock.advance(1.0)
    await settle()
    assert work.begun == deaths + 1
    await owner.cancel_and_wait()
    assert len(owner) == 0
    await settle()
    assert len(asyncio.all_tasks()) == 1
