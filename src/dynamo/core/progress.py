"""Progress: the state of an operation that takes a while, as a rewritten line on a terminal and as lines in a log."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
DELAY_S = 1.0  # An operation that ends earlier shows nothing.
PLAIN_DELAY_S = 2.0  # The same for output that is not a terminal.
REDRAW_S = 0.1
COLUMNS = 80  # Of a terminal that does not report its size.


class ProgressLine:
    """Display of the state of an operation that takes a while."""

    def __init__(self, stream: TextIO | None = None, started: float | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._started = time.monotonic() if started is None else started
        self._shown = ""

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since creation, or since the given start."""
        return time.monotonic() - self._started

    def show(self, state: str) -> None:
        """Show the current state. If the output is not a terminal, print a line for each change."""
        if self._is_terminal:
            turn = SPINNER[int(self.elapsed_s * 10) % len(SPINNER)]
            text = f"{turn} {state} ({self.elapsed_s:.1f} s)"
            self._write(f"\r\x1b[2K{text[: columns(self._stream) - 1]}")  # A longer line would not be rewritten.
        elif state != self._shown:
            self._write(f"{state}\n")
        self._shown = state

    def print_line(self, text: str = "") -> None:
        """Print a permanent line."""
        self.clear()
        self._write(f"{text}\n")

    def clear(self) -> None:
        """Clear the rewritten line, and the ^C that a terminal echoes."""
        if self._is_terminal:
            self._write("\r\x1b[2K")
        self._shown = ""

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # A closed terminal or pipe must not end the running graph.
            self._stream.write(text)
            self._stream.flush()


@contextlib.contextmanager
def activity(state: str, *, is_quiet: bool = False, stream: TextIO | None = None) -> Iterator[Callable[[str], None]]:
    """Show a state and its duration while the block runs, and yield a function that changes the state.

    The line appears after `DELAY_S` on a terminal, by default that of the standard error, and is removed at the end. Elsewhere
    the state is a line after `PLAIN_DELAY_S`, and again when it differs after the same time. Nothing is written with `is_quiet`, as for `--json`. A thread
    draws it, so that the block may wait in any call.
    """
    output = sys.stderr if stream is None else stream
    current = [state]

    def change(text: str) -> None:
        current[0] = text

    if is_quiet:
        yield change
        return
    line, ended = ProgressLine(output), threading.Event()
    delay_s, redraw_s = (DELAY_S, REDRAW_S) if output.isatty() else (PLAIN_DELAY_S, PLAIN_DELAY_S)

    def draw() -> None:
        if ended.wait(delay_s):
            return
        line.show(current[0])
        while not ended.wait(redraw_s):
            line.show(current[0])
        line.clear()

    thread = threading.Thread(target=draw, name="progress", daemon=True)
    thread.start()
    try:
        yield change
    finally:
        ended.set()
        thread.join()


def columns(stream: TextIO) -> int:
    """Return the width of a terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or COLUMNS
    except (OSError, ValueError):
        return COLUMNS
