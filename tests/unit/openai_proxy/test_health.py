"""HealthWatch: when a worker leaves for its server's sake, and when it returns."""

import asyncio

import pytest
from tests.settle import turns
from tests.unit.openai_proxy.hosts import DEADLINE_S, Host

from dynamo.core.clock import ManualClock
from dynamo.core.errors import CannotConnect
from dynamo.openai_proxy.health import FAILURES_MAX, HealthWatch


class Page:
    def __init__(self) -> None:
        self.status: int | None = 200
        self.received_requests = asyncio.Event()

    async def send_request(self) -> int:
        self.received_requests.set()
        if self.status is None:
            raise CannotConnect("connection refused")
        return self.status


def watch(page: Page, host: Host) -> HealthWatch:
    return HealthWatch(page.send_request, host, ManualClock(), 2.0, "the server")


@pytest.mark.parametrize("status", [None, 503, 404])
async def test_two_consecutive_failures_deregister_the_worker(status: int | None) -> None:
    page, host = Page(), Host()
    one = watch(page, host)
    page.status = status
    await one.look()
    assert host.service == []
    await one.look()
    await one.look()
    assert (host.service, one.is_up) == (["left"], False)
    page.status = 200
    await one.look()
    await one.look()
    assert (host.service, one.is_up) == (["left", "back"], True)


async def test_drained_worker_is_not_registered_after_recovery() -> None:
    page, host = Page(), Host()
    host.is_drained = True
    one = watch(page, host)
    for page.status in (503, 503, 200):
        await one.look()
    assert host.service == ["left"]


async def test_success_resets_the_failure_count() -> None:
    page, host = Page(), Host()
    one = watch(page, host)
    for _ in range(FAILURES_MAX * 3):
        page.status = 503 if page.status == 200 else 200
        await one.look()
    assert host.service == []


async def test_check_now_probes_the_server_at_once() -> None:
    page, host = Page(), Host()
    one = watch(page, host)
    task = asyncio.create_task(one.run())
    await turns(3)
    assert not page.received_requests.is_set()
    one.check_now()
    async with asyncio.timeout(DEADLINE_S):
        await page.received_requests.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
