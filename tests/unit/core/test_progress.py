"""Progress: a rewritten line on a terminal, plain lines in a log."""

import io
import queue
import threading
import time

import pytest

from dynamo.core import progress as module
from dynamo.core.progress import COLUMNS, ProgressLine, activity


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_in_a_log_is_written_once_per_change() -> None:
    stream = io.StringIO()
    progress = ProgressLine(stream)
    for state in ("loading", "loading", "nearly", "loading"):
        progress.show(state)
    progress.print_line("done")
    assert stream.getvalue() == "loading\nnearly\nloading\ndone\n"


def test_progress_on_a_terminal_is_rewritten_and_cleared_before_a_permanent_line() -> None:
    stream = Terminal()
    progress = ProgressLine(stream)
    progress.show("loading")
    progress.show("loading")
    progress.print_line("done")
    assert stream.getvalue().count("\r\x1b[2K") == 3
    assert stream.getvalue().endswith("\r\x1b[2Kdone\n")


def test_permanent_line_on_a_terminal_overwrites_an_echoed_key() -> None:
    stream = Terminal()
    ProgressLine(stream).print_line("done")
    assert stream.getvalue() == "\r\x1b[2Kdone\n"


def test_progress_line_counts_from_the_given_start() -> None:
    assert ProgressLine(io.StringIO(), started=time.monotonic() - 60).elapsed_s >= 60


def test_closed_output_does_not_raise() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    ProgressLine(Closed()).print_line("done")


def test_line_longer_than_the_terminal_is_shortened() -> None:
    stream = Terminal()
    ProgressLine(stream).show("x" * 300)
    assert len(stream.getvalue().removeprefix("\r\x1b[2K")) == COLUMNS - 1


class Awaited(Terminal):
    """Terminal that reports when it has shown a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.shown = text, threading.Event()

    def write(self, text: str) -> int:
        if self.text in text:
            self.shown.set()
        return super().write(text)


class AwaitedLog(io.StringIO):
    """Output that is no terminal, and whose lines can be awaited."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[str] = queue.Queue()

    def write(self, text: str) -> int:
        self._lines.put(text)
        return super().write(text)

    def wait(self, line: str) -> bool:
        """Return whether the next line is this one, within 10 seconds."""
        return self._lines.get(timeout=10) == line


def test_activity_shows_its_latest_state_and_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DELAY_S", 0.0)
    monkeypatch.setattr(module, "REDRAW_S", 0.001)
    stream = Awaited("second")
    with activity("first", stream=stream) as show:
        show("second")
        assert stream.shown.wait(10)
    assert stream.getvalue().endswith("\r\x1b[2K")


def test_activity_that_is_short_or_quiet_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Terminal(), Terminal(), io.StringIO()
    for stream in streams:
        with activity("short", stream=stream):
            pass
    monkeypatch.setattr(module, "DELAY_S", 0.0)
    monkeypatch.setattr(module, "PLAIN_DELAY_S", 0.0)
    for stream in streams:
        with activity("json", is_quiet=True, stream=stream):
            pass
    assert [one.getvalue() for one in streams] == ["", "", ""]


def test_activity_away_from_a_terminal_is_a_line_for_each_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PLAIN_DELAY_S", 0.001)
    stream = AwaitedLog()
    with activity("first", stream=stream) as show:
        assert stream.wait("first\n")
        show("second")
        assert stream.wait("second\n")
    assert stream.getvalue() == "first\nsecond\n"
