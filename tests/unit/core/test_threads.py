"""Threads that do not delay the end of the process."""

import asyncio
import subprocess
import sys
import threading

import pytest
from tests.settle import turns

from dynamo.core.threads import in_daemon_thread, in_few_threads


async def test_daemon_thread_returns_the_result_or_raises_the_error() -> None:
    def fail() -> int:
        raise ValueError("boom")

    assert await in_daemon_thread(lambda: threading.current_thread().name, "mine") == "mine"
    with pytest.raises(ValueError, match="boom"):
        await in_daemon_thread(fail, "mine")


async def test_daemon_thread_continues_after_its_caller_is_cancelled() -> None:
    go, done = threading.Event(), threading.Event()

    def work() -> None:
        go.wait(5)
        done.set()

    task = asyncio.ensure_future(in_daemon_thread(work, "mine"))
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    assert await asyncio.to_thread(done.wait, 5)
    await turns()


def test_process_exits_while_a_daemon_thread_is_blocked() -> None:
    code = (
        "import asyncio, threading\n"
        "from dynamo.core.threads import in_daemon_thread\n"
        "async def main():\n"
        "    task = asyncio.ensure_future(in_daemon_thread(threading.Event().wait, 'stuck'))\n"
        "    await asyncio.to_thread(lambda: None)\n"
        "    task.cancel()\n"
        "asyncio.run(main())\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=10, check=False).returncode == 0


async def test_few_threads_run_that_many_works_at_a_time() -> None:
    running, seen, lock = 0, [], threading.Lock()
    both = threading.Barrier(2)

    def work() -> None:
        nonlocal running
        with lock:
            running += 1
            seen.append(running)
        both.wait(5)  # Only two at the same time pass.
        with lock:
            running -= 1

    await asyncio.gather(*(in_few_threads(work, "few", 2) for _ in range(8)))
    assert max(seen) == 2
    with pytest.raises(ValueError, match="boom"):
        await in_few_threads(lambda: int("boom"), "few", 2)
