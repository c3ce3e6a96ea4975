"""S3 sink of the request trace: compressed JSON lines, one object per batch, under a key with the time of the batch.

    <prefix>/date=2026-01-31/hour=23/5901-000000-<host>-<run>.jsonl.gz

The key has the released frontend's format: Athena and Glue read `date` and `hour` as partitions. Credentials, region and
endpoint are read from the environment, as by the AWS tools (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, …).
"""

import asyncio
import contextlib
import logging
import socket
import time
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from dynamo.core.codec import json_encode
from dynamo.core.errors import ConfigError
from dynamo.core.tasks import TaskOwner
from dynamo.serving.request_trace.sinks import Row

logger = logging.getLogger(__name__)

WAITING_MAX = 4  # Compressed batches that wait for a slow store; further ones are dropped and counted.
ATTEMPT_TIMEOUT_S = 30.0  # Of one HTTP request.
UPLOAD_TIMEOUT_S = 60.0  # Of one object with its retries.
RETRIES = 3
CANCEL_S = 0.5  # Wait for a cancelled upload.
GZIP = 31  # zlib's window bits for a gzip header.


class S3Options(msgspec.Struct, frozen=True, kw_only=True):
    """Destination and size of the objects."""

    bucket: str
    region: str = ""
    """Region; empty to use the AWS environment."""
    prefix: str = ""
    roll_bytes: int = 64 << 20
    """Size of a batch before compression."""
    flush_s: float = 10.0
    """Maximum age of a batch before it is uploaded."""


class ObjectWriter(Protocol):
    """Object store."""

    async def put(self, key: str, body: bytes) -> None:
        """Write an object. Raise `OSError`."""


class S3Writer:
    """Bucket of S3 or of a store with S3's protocol."""

    def __init__(self, options: S3Options) -> None:
        """Raise `ConfigError` if the store's client cannot be created."""
        try:
            import obstore
            from obstore.exceptions import BaseError
            from obstore.store import S3Store
        except ImportError:
            raise ConfigError(
                "DYN_REQUEST_TRACE_SINKS=s3: the package obstore is missing: pip install 'dynamo-serve[s3]'"
            ) from None
        self._obstore, self._error = obstore, BaseError
        region: dict[str, Any] = {"region": options.region} if options.region else {}
        try:
            self._store = S3Store(
                options.bucket,
                client_options={"timeout": f"{ATTEMPT_TIMEOUT_S:g}s", "allow_http": True},
                retry_config={"max_retries": RETRIES},
                **region,
            )
        except (BaseError, ValueError) as error:
            raise ConfigError(f"DYN_REQUEST_TRACE_S3_BUCKET={options.bucket}: {first_line(error)}") from None

    async def put(self, key: str, body: bytes) -> None:
        try:
            await self._obstore.put_async(self._store, key, body, use_multipart=False)
        except self._error as error:
            raise OSError(0, first_line(error)) from error


def first_line(error: Exception) -> str:
    """Return the first line of a store's error, which otherwise has a page of debugging output."""
    return str(error).strip().partition("\n")[0]


class _Batch(NamedTuple):
    """Compressed rows, and the time at which the first was written."""

    body: bytes
    rows: int
    began_s: float


class S3Sink:
    """Sink that compresses rows as they arrive and uploads them in a separate task."""

    name = "s3"

    def __init__(
        self,
        options: S3Options,
        writer: ObjectWriter,
        on_loss: Callable[[int], None],
        *,
        wall_clock: Callable[[], float] = time.time,
        host: str | None = None,
        run: str | None = None,
    ) -> None:
        """`on_loss` is given the number of rows of a batch that could not be uploaded."""
        self._options = options
        self._writer = writer
        self._on_loss = on_loss
        self._wall_clock = wall_clock
        self._host = host or socket.gethostname() or "unknown"
        self._run = run or uuid.uuid4().hex
        self._waiting: deque[_Batch] = deque()
        self._number = 0
        self._wake = asyncio.Event()
        self._lock = asyncio.Lock()
        """Guards the batch, which a thread compresses."""
        self._is_closing = False
        self._tasks = TaskOwner("request trace s3")
        self._begin()

    def start(self) -> None:
        """Start to upload."""
        self._tasks.start(self._upload(), "upload")

    async def write(self, rows: Sequence[Row]) -> None:
        """Add rows to the batch. Raise `OSError` if too many batches wait for the store."""
        if len(self._waiting) >= WAITING_MAX:
            raise OSError(0, f"the store is too slow: {WAITING_MAX} batches wait to be uploaded")
        async with self._lock:
            await asyncio.to_thread(self._compress, rows)
        self._wake.set()

    async def flush(self) -> None:
        """Do nothing: objects become visible as they are uploaded, after `flush_s` at the latest."""

    async def close(self) -> None:
        """Upload the rest. The caller limits the time."""
        try:
            async with self._lock:
                self._seal()
            self._is_closing = True
            self._wake.set()
            await self._tasks.wait(UPLOAD_TIMEOUT_S)
        finally:
            await self._tasks.cancel_and_wait(CANCEL_S)

    def _begin(self) -> None:
        self._gzip = zlib.compressobj(6, zlib.DEFLATED, GZIP)
        self._parts: list[bytes] = []
        self._bytes = self._rows = 0
        self._began_s = 0.0

    def _compress(self, rows: Sequence[Row]) -> None:
        for row in rows:
            line = json_encode(row.event) + b"\n"
            if not self._rows:
                self._began_s = self._wall_clock()
            self._parts.append(self._gzip.compress(line))
            self._bytes += len(line)
            self._rows += 1
            if self._bytes >= self._options.roll_bytes:
                self._seal()

    def _seal(self) -> None:
        """Finish the batch, if it has rows, and begin the next."""
        if self._rows:
            self._parts.append(self._gzip.flush())
            self._waiting.append(_Batch(b"".join(self._parts), self._rows, self._began_s))
            self._begin()

    async def _upload(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._due_s()):
                    await self._wake.wait()
            self._wake.clear()
            async with self._lock:
                if self._due_s() == 0:
                    self._seal()
            while self._waiting:
                await self._put(self._waiting.popleft())
            if self._is_closing and not self._waiting:
                return

    def _due_s(self) -> float | None:
        """Return the seconds until the batch is old enough to be uploaded; None if it has no rows."""
        if not self._rows:
            return None
        return max(0.0, self._began_s + self._options.flush_s - self._wall_clock())

    async def _put(self, batch: _Batch) -> None:
        key = self._key(batch.began_s)
        try:
            async with asyncio.timeout(UPLOAD_TIMEOUT_S):
                await self._writer.put(key, batch.body)
        except OSError as error:  # Includes `TimeoutError`.
            self._on_loss(batch.rows)
            logger.warning("request trace: failed to upload %s with %d rows: %s", key, batch.rows, error or "timed out")

    def _key(self, began_s: float) -> str:
        moment = time.gmtime(began_s)
        prefix = self._options.prefix.strip("/")
        name = f"{time.strftime('%M%S', moment)}-{self._number:06d}-{self._host}-{self._run}.jsonl.gz"
        self._number += 1
        path = f"date={time.strftime('%Y-%m-%d', moment)}/hour={time.strftime('%H', moment)}/{name}"
        return f"{prefix}/{path}" if prefix else path
