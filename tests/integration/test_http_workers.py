"""Processes that share a port, started and ended by one."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from dynamo.frontend.workers import Workers

pytestmark = pytest.mark.integration

LIVE = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); signal.pause()"


def script(tmp_path: Path, text: str) -> list[str]:
    """Notes its start in a file, then does as it is told."""
    log = tmp_path / "log"
    head = f"import os; open({str(log)!r}, 'a').write(os.environ['DYN_HTTP_WORKER_INDEX'] + os.linesep);"
    return [sys.executable, "-c", head + text]


async def started(tmp_path: Path, count: int) -> list[str]:
    """Which workers have started, once there were so many."""
    log = tmp_path / "log"
    async with asyncio.timeout(60):
        while not log.exists() or len(log.read_text().split()) < count:  # noqa: ASYNC110 - another process writes
            await asyncio.sleep(0.02)
    return sorted(log.read_text().split())


async def test_all_are_started_and_end_when_told_to(tmp_path: Path) -> None:
    workers = Workers(script(tmp_path, LIVE), 2, drain_s=30)
    running = asyncio.ensure_future(workers.run(os.getpid()))
    assert await started(tmp_path, 2) == ["0", "1"]
    folder = workers._folder.path
    workers._stopping.set()
    assert await running == 0
    assert not workers._running()
    assert os.path.basename(folder) not in os.listdir(os.path.dirname(folder))


async def test_one_that_ends_is_started_again(tmp_path: Path) -> None:
    workers = Workers(script(tmp_path, "os._exit(1)"), 1, drain_s=30)
    running = asyncio.ensure_future(workers.run(os.getpid()))
    assert await started(tmp_path, 2) == ["0", "0"]
    workers._stopping.set()
    assert await running == 0


async def test_what_no_worker_can_do_ends_all_with_its_status(tmp_path: Path) -> None:
    assert await Workers(script(tmp_path, "os._exit(2)"), 2, drain_s=30).run(os.getpid()) == 2
