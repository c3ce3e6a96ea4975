"""Request trace sinks: rolling files, stderr and NATS. A thread writes to disk.

The sinks `s3` and `otel` are separate modules.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import msgspec

from dynamo.core.codec import json_encode
from dynamo.core.errors import ConfigError
from dynamo.core.private_paths import private_opener

SEGMENTS_MAX = 1_000_000  # Six digits: longer names would not sort correctly.


class Row(NamedTuple):
    """A row and its time."""

    timestamp_ms: int
    """Milliseconds since the trace began."""
    event: Any


class FileOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Format and size of the files."""

    path: str
    gzip: bool = True
    buffer_bytes: int = 1 << 20
    flush_s: float = 1.0
    roll_bytes: int = 256 << 20
    """Bytes of uncompressed text per file."""
    roll_lines: int = 0
    """Lines per file; 0: unlimited."""


class Sink(Protocol):
    """Destination of batches of rows."""

    name: str

    async def write(self, rows: Sequence[Row]) -> None:
        """Write the rows. Raise `OSError` on failure."""

    async def flush(self) -> None:
        """Make the written rows visible to readers."""

    async def close(self) -> None:
        """Close the sink: no more rows follow."""


class FileSink:
    """Files `<path>` in JSON lines, or `<path>.000000.jsonl.gz` and so on."""

    name = "file"

    def __init__(self, options: FileOptions) -> None:
        """Raise `ConfigError` if no file can be created. The file is created with the first row."""
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
            raise ConfigError(f"DYN_REQUEST_TRACE_FILE_PATH={options.path}: must be a writable file path")

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
        """Open the next file; existing files are kept."""
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
        raise OSError(0, "no unused file name is left")


class Compressed:
    """Gzip file that can be read up to the last flush."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        import gzip  # Only where a trace is written.

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
    """Standard error: one line per row, without the time."""

    name = "stderr"

    async def write(self, rows: Sequence[Row]) -> None:
        text = "".join(json_encode(row.event).decode() + "\n" for row in rows)
        await asyncio.to_thread(_to_stderr, text)

    async def flush(self) -> None:
        """Do nothing: each line is flushed when it is written."""

    async def close(self) -> None:
        """Do nothing: stderr stays open."""


class NatsSink:
    """NATS subject: one message per row."""

    name = "nats"

    def __init__(self, connection: Any, subject: str) -> None:
        self._connection = connection
        self._subject = subject

    async def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if not self._connection.publish(self._subject, json_encode(row.event)):
                raise OSError(0, "the NATS server accepts no more messages")

    async def flush(self) -> None:
        await self._connection.flush()

    async def close(self) -> None:
        await self._connection.close()


async def make_nats_sink(subject: str) -> Sink:
    """Return the sink of the NATS server that the environment names. Raise `ConfigError`."""
    from dynamo.runtime.config import nats_options
    from dynamo.runtime.transports.nats.connection import NatsConnection

    connection = NatsConnection(nats_options(), "request_trace", keeps_unsent=True)
    await connection.start()
    return NatsSink(connection, subject)


def _to_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
