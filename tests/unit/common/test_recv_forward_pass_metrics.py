"""Recorder of forward-pass metrics."""

import logging
import queue
from pathlib import Path

import msgspec
import pytest

from dynamo.common import recv_forward_pass_metrics as recorder
from dynamo.common.forward_pass_metrics import ForwardPassMetrics, encode


class Subscriber:
    """Messages of a list, then the end."""

    def __init__(self, *messages: bytes) -> None:
        self.messages: queue.Queue[bytes | None] = queue.Queue()
        for message in (*messages, None):
            self.messages.put(message)

    def recv(self) -> bytes | None:
        return self.messages.get()

    def shutdown(self) -> None:
        self.messages.put(None)


def message(counter: int) -> bytes:
    return encode(ForwardPassMetrics(worker_id="1", counter_id=counter, wall_time=0.01))


async def test_output_has_a_line_for_each_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = recorder._parse_args(["--output", str(tmp_path / "fpm.jsonl")])
    with caplog.at_level(logging.INFO):
        await recorder._run_recv(Subscriber(message(20), b"\xc1", message(22)), args)
    lines = [msgspec.json.decode(line) for line in args.output.read_bytes().splitlines()]
    assert [line["metrics"]["counter_id"] for line in lines] == [20, 22]
    assert "messages=2 rejected=1 streams=1 counter_gaps=1" in caplog.text
    assert "[worker=" not in caplog.text
    with pytest.raises(FileExistsError):
        await recorder._run_recv(Subscriber(), args)


async def test_messages_are_logged_without_output(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        await recorder._run_recv(Subscriber(message(0)), recorder._parse_args([]))
    assert "[worker=1 dp=0 counter=0]" in caplog.text


def test_counters_are_compared_within_a_rank() -> None:
    stats = recorder._RecordingStats()
    for worker, counter in (("1", 100), ("1", 103), ("2", 7), ("1", 0), ("1", 104)):
        stats.observe(ForwardPassMetrics(worker_id=worker, counter_id=counter))
    assert (stats.messages, stats.counter_gaps, stats.non_increasing_counters) == (5, 2, 1)


@pytest.mark.parametrize("argv", [["--flush-interval", "nan"], ["--mode", "tracking", "--output", "file"]])
def test_invalid_arguments_are_usage_errors(argv: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        recorder._parse_args(argv)
