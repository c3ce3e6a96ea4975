"""Progress: a rewritten line on a terminal, plain lines in a log."""

import io
import time

from dynamo.cli.progress import ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_log_a_state_is_written_once_per_change() -> None:
    stream = io.StringIO()
    progress = ProgressLine(stream)
    for state in ("loading", "loading", "nearly", "loading"):
        progress.show(state)
    progress.print_line("done")
    assert stream.getvalue() == "loading\nnearly\nloading\ndone\n"


def test_on_a_terminal_the_state_is_rewritten_and_gone_before_a_line_that_stays() -> None:
    stream = Terminal()
    progress = ProgressLine(stream)
    progress.show("loading")
    progress.show("loading")
    progress.print_line("done")
    assert stream.getvalue().count("\r\x1b[2K") == 3
    assert stream.getvalue().endswith("\r\x1b[2Kdone\n")


def test_on_a_terminal_a_line_that_stays_takes_the_place_of_an_echoed_key() -> None:
    stream = Terminal()
    ProgressLine(stream).print_line("done")
    assert stream.getvalue() == "\r\x1b[2Kdone\n"


def test_progress_line_counts_from_the_given_start() -> None:
    assert ProgressLine(io.StringIO(), started=time.monotonic() - 60).elapsed_s >= 60


def test_a_reader_that_left_does_not_end_what_runs() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    ProgressLine(Closed()).print_line("done")
