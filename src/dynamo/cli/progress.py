"""Progress: the state of an operation that takes a while, as a rewritten line on a terminal and as lines in a log."""

import contextlib
import sys
import time
from typing import TextIO

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


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
            self._write(f"\r\x1b[2K{turn} {state} ({self.elapsed_s:.1f} s)")
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
