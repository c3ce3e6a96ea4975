"""Progress: a rewritten line on a terminal, plain lines in a log."""

import io
import time

from dynamo.cli.progress import ProgressLine


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
