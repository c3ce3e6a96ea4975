"""Processes: whether SGLang's children live, and the signal by which they say that one of them does not."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

GONE = "ZX"
"""States of a process that has ended and that nobody has asked for yet."""


def state_of(pid: int, proc: Path = Path("/proc")) -> str | None:
    """The letter of a process's state; None for one that is not there."""
    try:
        text = (proc / str(pid) / "stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()[0]  # Behind the name, which may hold anything.


def check_alive(pids: Iterable[int], proc: Path = Path("/proc")) -> None:
    """Raises `RuntimeError` that names the first of them that has ended."""
    for pid in pids:
        state = state_of(pid, proc)
        if state is None or state in GONE:
            raise RuntimeError(f"process {pid} of the engine has ended")


@contextlib.contextmanager
def deaths_told(loop: asyncio.AbstractEventLoop, on_death: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """SGLang's children tell the failure of one of them by SIGQUIT, which unheard would end this process on the spot.

    Gives what hears it again, for SGLang's manager puts its own in the place.
    """

    def listen() -> None:
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):  # Only the main thread hears signals.
            loop.add_signal_handler(signal.SIGQUIT, on_death)

    listen()
    try:
        yield listen
    finally:
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
            loop.remove_signal_handler(signal.SIGQUIT)
