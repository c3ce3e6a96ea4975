"""DirectoryStore: responses as files of a directory, which several frontends may share.

    DIR/0a1b…(24 digits).json      one record, readable by its owner alone

One thread does all file I/O of a store in order, so that a `get` finds what an earlier `put` wrote. Files are replaced
atomically. A file's modification time is its last use, by which every process that sweeps the directory expires it.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from dynamo.api.responses.store import Dropped, StoreLimits
from dynamo.core.boundaries import Rollback
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.errors import ConfigError
from dynamo.core.private_paths import unlink_all

logger = logging.getLogger(__name__)

WRITES_PENDING_MAX = 1024  # Bounds memory if the disk is too slow; further writes are dropped.
SWEEP_WRITES = 64  # Writes between sweeps: scanning thousands of files costs more than a write.
SWEEP_S = 60.0
FILL_AFTER_SWEEP = 0.9  # Fill level after a sweep, so that not every write needs one.
GRACE_S = 0.5  # Another frontend may just have responded, and its file may not be written yet.
GRACE_STEP_S = 0.05
LEFTOVER_S = 3600.0  # Age at which an unfinished file is considered abandoned.

SUFFIX, UNFINISHED = ".json", ".part"


class _File(Struct):
    path: str
    size: int
    used_s: float


class _Swept(Struct, frozen=True):
    """Number of records removed by a sweep, by reason."""

    expired: int = 0
    full: int = 0


class DirectoryStore:
    """Records in a directory."""

    def __init__(
        self,
        folder: str,
        limits: StoreLimits,
        dropped: Dropped,
        clock: Clock | None = None,
        *,
        grace_s: float = GRACE_S,
    ) -> None:
        """Create the directory if it is missing. Raise `ConfigError`."""
        self._folder = folder
        self._limits = limits
        self._dropped = dropped
        self._clock = clock or SystemClock()
        self._grace_s = grace_s
        self._pending = 0
        self._writes = 0
        self._swept_s = float("-inf")
        self._entries = 0
        self._bytes = 0
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            self._count(self._sweep())
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError("must be writable")
        except OSError as error:
            raise ConfigError(f"--responses-store {folder}: {error.strerror or error}") from None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="responses-store")

    @property
    def entries(self) -> int:
        """Return the number of records at the last sweep, plus those written here since."""
        return self._entries

    @property
    def size(self) -> int:
        return self._bytes

    def put(self, key: str, record: bytes) -> None:
        if self._pending >= WRITES_PENDING_MAX or len(record) > self._limits.bytes_max:
            self._dropped.count("full")
            return
        self._pending += 1
        loop = asyncio.get_running_loop()
        writing = loop.run_in_executor(self._thread, self._write, key, record)
        writing.add_done_callback(self._written)

    async def get(self, key: str) -> bytes | None:
        loop = asyncio.get_running_loop()
        until_s = self._clock.now() + self._grace_s
        while True:
            record = await loop.run_in_executor(self._thread, self._read, key)
            if record is not None or self._clock.now() >= until_s:
                return record
            await self._clock.sleep(GRACE_STEP_S)

    async def delete(self, key: str) -> bool:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._remove, key)

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)

    def _written(self, writing: "asyncio.Future[_Swept]") -> None:
        self._pending -= 1
        try:
            self._count(writing.result())
        except OSError as error:
            self._dropped.count("failed")
            logger.warning("failed to store a response: %s", error)

    def _count(self, swept: _Swept) -> None:
        """Update the metrics, on the loop's thread."""
        self._dropped.count("expired", swept.expired)
        self._dropped.count("full", swept.full)

    # On the store's thread.

    def _path(self, key: str) -> str:
        return os.path.join(self._folder, key + SUFFIX)

    def _write(self, key: str, record: bytes) -> _Swept:
        unfinished = os.path.join(self._folder, f"{key}-{secrets.token_hex(4)}{UNFINISHED}")
        file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with Rollback(lambda: unlink_all(unfinished)):
            with open(file, "wb") as out:
                out.write(record)
            self._stamp(unfinished)
            os.replace(unfinished, self._path(key))
        self._entries += 1
        self._bytes += len(record)
        self._writes += 1
        if self._writes % SWEEP_WRITES == 0 or self._clock.now() - self._swept_s > SWEEP_S:
            return self._sweep()
        return _Swept()

    def _read(self, key: str) -> bytes | None:
        path = self._path(key)
        try:
            if self._clock.wall() - os.stat(path).st_mtime > self._limits.unused_s:
                return None
            with open(path, "rb") as file:
                record = file.read()
            self._stamp(path)
        except OSError:
            return None
        return record

    def _remove(self, key: str) -> bool:
        try:
            os.unlink(self._path(key))
        except OSError:
            return False
        self._entries = max(0, self._entries - 1)
        return True

    def _stamp(self, path: str) -> None:
        """Mark a file as used now."""
        now_s = self._clock.wall()
        os.utime(path, (now_s, now_s))

    def _sweep(self) -> _Swept:
        """Delete expired records, then the least recently used ones beyond the limits."""
        self._swept_s = self._clock.now()
        files, leftovers = self._files()
        now_s = self._clock.wall()
        for one in leftovers:
            if time.time() - one.used_s > LEFTOVER_S:
                self._forget(one)
        kept = [one for one in files if now_s - one.used_s <= self._limits.unused_s]
        expired = [one for one in files if now_s - one.used_s > self._limits.unused_s]
        kept.sort(key=lambda one: one.used_s)
        total, count = sum(one.size for one in kept), len(kept)
        excess: list[_File] = []
        if total > self._limits.bytes_max or count > self._limits.entries_max:
            for one in kept:
                if (
                    total <= FILL_AFTER_SWEEP * self._limits.bytes_max
                    and count <= FILL_AFTER_SWEEP * self._limits.entries_max
                ):
                    break
                excess.append(one)
                total -= one.size
                count -= 1
        self._entries, self._bytes = count, total
        return _Swept(sum(map(self._forget, expired)), sum(map(self._forget, excess)))

    def _files(self) -> tuple[list[_File], list[_File]]:
        """Return the records and the unfinished files."""
        records: list[_File] = []
        leftovers: list[_File] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if not entry.name.endswith((SUFFIX, UNFINISHED)):
                    continue
                with contextlib.suppress(OSError):  # Another frontend may have deleted the file.
                    facts = entry.stat(follow_symlinks=False)
                    one = _File(entry.path, facts.st_size, facts.st_mtime)
                    (records if entry.name.endswith(SUFFIX) else leftovers).append(one)
        return records, leftovers

    def _forget(self, one: _File) -> bool:
        try:
            os.unlink(one.path)
        except OSError:
            return False
        return True
