"""Threads: work that may hang, in a daemon thread that does not delay the exit; work that many requests have, in a few threads."""

import asyncio
import concurrent.futures
import functools
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


async def in_few_threads(work: Callable[[], T], name: str, threads: int) -> T:
    """Return the result of `work`, run in one of so many threads of that name, which all callers share.

    For computations that hold the interpreter lock: each more that runs at the same time delays the event loop's thread.
    """
    return await asyncio.get_running_loop().run_in_executor(_threads(name, threads), work)


def start_in_few_threads(work: Callable[[], object], name: str, threads: int) -> None:
    """Run `work`, for whose result nothing waits, in one of so many threads of that name."""
    _threads(name, threads).submit(work)


@functools.cache
def _threads(name: str, threads: int) -> concurrent.futures.Executor:
    return concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix=name)
