"""Where the rows of a trace go."""

import gzip
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.serving.request_trace.sinks import FileOptions, FileSink, NatsSink, Row, StderrSink


def rows(*numbers: int) -> list[Row]:
    return [Row(number, {"n": number}) for number in numbers]


def read(path: Path) -> list[Any]:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    return [json.loads(line) for line in text.splitlines()]


async def test_file_sink_writes_one_line_per_row_with_its_timestamp(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trace"
    sink = FileSink(FileOptions(path=str(path), gzip=False))
    await sink.write(rows(1, 2))
    await sink.flush()
    assert read(path) == [{"timestamp": 1, "event": {"n": 1}}, {"timestamp": 2, "event": {"n": 2}}]
    await sink.close()


async def test_file_sink_rolls_by_lines_and_does_not_overwrite_existing_files(tmp_path: Path) -> None:
    (tmp_path / "trace.000001.jsonl.gz").write_bytes(b"old")
    sink = FileSink(FileOptions(path=str(tmp_path / "trace"), roll_lines=2))
    await sink.write(rows(1, 2, 3))
    await sink.close()
    assert (tmp_path / "trace.000001.jsonl.gz").read_bytes() == b"old"
    assert [one["timestamp"] for one in read(tmp_path / "trace.000000.jsonl.gz")] == [1, 2]
    assert [one["timestamp"] for one in read(tmp_path / "trace.000002.jsonl.gz")] == [3]


async def test_file_sink_rolls_by_bytes(tmp_path: Path) -> None:
    sink = FileSink(FileOptions(path=str(tmp_path / "trace"), roll_bytes=40))
    await sink.write(rows(1, 2, 3))
    await sink.close()
    assert len(os.listdir(tmp_path)) == 3


async def test_file_sink_flushed_rows_are_readable_before_close(tmp_path: Path) -> None:
    sink = FileSink(FileOptions(path=str(tmp_path / "trace")))
    await sink.write(rows(1))
    await sink.flush()
    packed = (tmp_path / "trace.000000.jsonl.gz").read_bytes()
    assert b'"n":1' in zlib.decompressobj(31).decompress(packed)
    await sink.close()


async def test_file_sink_without_rows_creates_no_file(tmp_path: Path) -> None:
    sink = FileSink(FileOptions(path=str(tmp_path / "trace")))
    await sink.flush()
    await sink.close()
    assert os.listdir(tmp_path) == []


def test_unwritable_trace_path_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "trace"):
        with pytest.raises(ConfigError, match="DYN_REQUEST_TRACE_FILE_PATH"):
            FileSink(FileOptions(path=str(path)))


async def test_stderr_sink_writes_only_rows(capsys: pytest.CaptureFixture[str]) -> None:
    sink = StderrSink()
    await sink.write(rows(1, 2))
    await sink.flush()
    await sink.close()
    assert capsys.readouterr().err == '{"n":1}\n{"n":2}\n'


class Nats:
    """Connection that records its messages."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.calls: list[str] = []
        self.takes = True

    def publish(self, subject: str, data: bytes) -> bool:
        self.sent.append((subject, data))
        return self.takes

    async def flush(self) -> None:
        self.calls.append("flush")

    async def close(self) -> None:
        self.calls.append("close")


async def test_nats_sink_publishes_one_message_per_row() -> None:
    nats = Nats()
    sink = NatsSink(nats, "subject")
    await sink.write(rows(1))
    await sink.flush()
    await sink.close()
    assert nats.sent == [("subject", b'{"n":1}')] and nats.calls == ["flush", "close"]
    nats.takes = False
    with pytest.raises(OSError, match="accepts no more messages"):
        await sink.write(rows(2))
