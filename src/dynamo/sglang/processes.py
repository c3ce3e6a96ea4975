"""Processes: liveness of SGLang's child processes, and the signal by which they report a failure."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

GONE = "ZX"
"""States of a process that has ended and that its parent has not reaped."""


def state_of(pid: int, proc: Path = Path("/proc")) -> str | None:
    """Return the state letter of a process; None if it does not exist."""
    try:
        text = (proc / str(pid) / "stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()[0]  # After the name, which may contain any character.


def check_alive(pids: Iterable[int], proc: Path = Path("/proc")) -> None:
    """Raise `RuntimeError` that names the first process that has ended."""
    for pid in pids:
        state = state_of(pid, proc)
        if state is None or state in GONE:
            raise RuntimeError(f"process {pid} of the engine has ended")


@contextlib.contextmanager
def sigquit_handler(loop: asyncio.AbstractEventLoop, on_death: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Handle SIGQUIT, by which SGLang's children report a failure and which would otherwise kill this process.

    Yields a function that installs the handler again, because SGLang's manager replaces it.
    """

    def install() -> None:
        with contextlib.suppress(
            ValueError, RuntimeError, NotImplementedError
        ):  # Only the main thread handles signals.
            loop.add_signal_handler(signal.SIGQUIT, on_death)

    install()
    try:
        yield install
    finally:
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
            loop.remove_signal_handler(signal.SIGQUIT)
