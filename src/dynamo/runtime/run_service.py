"""Service runner: runs one service as the process, from its start to SIGTERM or SIGINT and the end of its shutdown."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

from dynamo.core import logging as logs
from dynamo.core.interpreter import configure_interpreter
from dynamo.core.parent import die_with_parent

if TYPE_CHECKING:
    from dynamo.runtime.config import RuntimeOptions
    from dynamo.runtime.distributed import DistributedRuntime

EXIT_AT_ONCE = 70  # The same status as workers.


def stop_event() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set. A second signal ends the process immediately."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(EXIT_AT_ONCE)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stop


def run_service(component: str, service: AbstractAsyncContextManager[None]) -> int:
    """Run a service until it is stopped; return the exit status.

    Entering `service` starts it, leaving it drains and closes it; `component` names it in logs and traces.
    """
    logs.setup(component=component)
    die_with_parent()
    import uvloop

    return uvloop.run(_run_until_stopped(service))


async def _run_until_stopped(service: AbstractAsyncContextManager[None]) -> int:
    stop = stop_event()
    async with service:
        configure_interpreter()
        await stop.wait()
    return 0


@asynccontextmanager
async def open_runtime(options: "RuntimeOptions") -> AsyncIterator["DistributedRuntime"]:
    """Return a connected runtime with a system server; shut it down at the end of the block."""
    from dynamo.runtime.distributed import DistributedRuntime  # 2 MB, which the operator does not use.

    runtime = DistributedRuntime.from_options(options)
    try:
        await runtime.connect()
        await runtime.start_system_server()
        yield runtime
    finally:
        await runtime.shutdown(drain_timeout_s=0.0)
