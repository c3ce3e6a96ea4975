"""Request trace sinks: where rows go: files that roll, stderr, NATS. Disks are written to by a thread.

The sinks `s3` and `otel` are modules of their own.
"""

import asyncio
import gzip
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import msgspec

from dynamo.core.codec import json_encode
from dynamo.core.errors import ConfigError
from dynamo.core.private_paths import private_opener

SEGMENTS_MAX = 1_000_000  # Six digits; a name beyond them would no longer sort.


class Row(NamedTuple):
    """A row and when it was made."""

    timestamp_ms: int
    """Since the trace began."""
    event: Any


class FileOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the files are written."""

    path: str
    gzip: bool = True
    buffer_bytes: int = 1 << 20
    flush_s: float = 1.0
    roll_bytes: int = 256 << 20
    """The next file begins after so many bytes of text."""
    roll_lines: int = 0
    """The same in lines; 0: however many."""


class Sink(Protocol):
    """Takes batches of rows."""

    name: str

    async def write(self, rows: Sequence[Row]) -> None:
        """Takes them. Raises `OSError` when it cannot."""

    async def flush(self) -> None:
        """Whoever reads sees them."""

    async def close(self) -> None:
        """No more will come."""


class FileSink:
    """`<path>` in JSON lines, or `<path>.000000.jsonl.gz` and so on."""

    name = "file"

    def __init__(self, options: FileOptions) -> None:
        """Raises `ConfigError` where no file can be made. It is made with the first row."""
        self._options = options
        self._segment = 0
        self._bytes = 0
        self._lines = 0
        self._file: BinaryIO | None = None
        folder = Path(options.path).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"DYN_REQUEST_TRACE_FILE_PATH={options.path}: {error.strerror}") from None
        if Path(options.path).is_dir() or not os.access(folder, os.W_OK):
            raise ConfigError(f"DYN_REQUEST_TRACE_FILE_PATH={options.path}: no file can be written there")

    async def write(self, rows: Sequence[Row]) -> None:
        await asyncio.to_thread(self._write, rows)

    async def flush(self) -> None:
        if self._file is not None:
            await asyncio.to_thread(self._file.flush)

    async def close(self) -> None:
        if self._file is not None:
            await asyncio.to_thread(self._file.close)

    def _write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            line = json_encode({"timestamp": row.timestamp_ms, "event": row.event}) + b"\n"
            file = self._file
            if file is None or self._is_full(len(line)):
                if file is not None:
                    file.close()
                file = self._file = self._open()
            file.write(line)
            self._bytes += len(line)
            self._lines += 1

    def _is_full(self, more: int) -> bool:
        options = self._options
        if not options.gzip or not self._lines:
            return False
        return self._bytes + more > options.roll_bytes or 0 < options.roll_lines <= self._lines

    def _open(self) -> BinaryIO:
        """The next file; one that is there from before is left alone."""
        options = self._options
        self._bytes = self._lines = 0
        if not options.gzip:
            return open(options.path, "ab", buffering=options.buffer_bytes, opener=private_opener)
        while self._segment < SEGMENTS_MAX:
            path = f"{options.path}.{self._segment:06d}.jsonl.gz"
            self._segment += 1
            try:
                return Compressed(  # type: ignore[return-value]
                    open(path, "xb", buffering=options.buffer_bytes, opener=private_opener)
                )
            except FileExistsError:
                continue
        raise OSError(0, "no name for another file is left")


class Compressed:
    """A gzip file that can be read up to the last flush."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._gzip = gzip.GzipFile(fileobj=file, mode="wb", compresslevel=6)

    def write(self, data: bytes) -> int:
        return self._gzip.write(data)

    def flush(self) -> None:
        self._gzip.flush()
        self._file.flush()

    def close(self) -> None:
        self._gzip.close()
        self._file.close()


class StderrSink:
    """A line a row, without the time."""

    name = "stderr"

    async def write(self, rows: Sequence[Row]) -> None:
        text = "".join(json_encode(row.event).decode() + "\n" for row in rows)
        await asyncio.to_thread(_to_stderr, text)

    async def flush(self) -> None:
        """Every line was flushed as it was written."""

    async def close(self) -> None:
        """It is not ours to close."""


class NatsSink:
    """A message a row."""

    name = "nats"

    def __init__(self, connection: Any, subject: str) -> None:
        self._connection = connection
        self._subject = subject

    async def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if not self._connection.publish(self._subject, json_encode(row.event)):
                raise OSError(0, "the NATS server takes nothing more")

    async def flush(self) -> None:
        await self._connection.flush()

    async def close(self) -> None:
        await self._connection.close()


async def make_nats_sink(subject: str) -> Sink:
    """Return the sink of the NATS server that the environment names. Raises `ConfigError`."""
    from dynamo.runtime.config import nats_options
    from dynamo.runtime.transports.nats.connection import NatsConnection

    connection = NatsConnection(nats_options(), "request_trace", keeps_unsent=True)
    await connection.start()
    return NatsSink(connection, subject)


def _to_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
