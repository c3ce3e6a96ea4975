"""Signals: the stop event of a process, set by SIGTERM and SIGINT; a second signal ends the process at once."""

import asyncio
import os
import signal

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
