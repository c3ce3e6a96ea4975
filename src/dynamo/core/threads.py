"""Threads: blocking work that may hang, in a daemon thread that does not delay the exit of the process."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(work: Callable[[], T], name: str) -> T:
    """Return the result of `work`, run in a daemon thread.

    Unlike `asyncio.to_thread` it does not use the loop's thread pool, and neither the loop nor the interpreter waits
    for it at exit. If the caller is cancelled, the thread continues and its result is dropped.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def set_outcome(result: T | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # The loop is closed, so the result has no receiver.
            loop.call_soon_threadsafe(set_outcome, result, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await outcome
