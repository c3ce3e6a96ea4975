"""Threads: blocking work that may hang, in a daemon thread that does not delay the exit of the process."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class _DaemonThreads(concurrent.futures.Executor):
    """Runs each job in a new daemon thread, for which neither the loop nor the interpreter waits at exit."""

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[T]:
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        outcome.set_running_or_notify_cancel()  # From here on a cancelled caller does not cancel the work.

        def run() -> None:
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - raised in the waiting task
                outcome.set_exception(error)
            else:
                outcome.set_result(result)

        threading.Thread(target=run, name=self._name, daemon=True).start()
        return outcome


async def in_daemon_thread(work: Callable[[], T], name: str) -> T:
    """Return the result of `work`, run in a daemon thread.

    Unlike `asyncio.to_thread` it does not use the loop's thread pool, and neither the loop nor the interpreter waits
    for it at exit. If the caller is cancelled, the thread continues and its result is dropped.
    """
    return await asyncio.get_running_loop().run_in_executor(_DaemonThreads(name), work)
