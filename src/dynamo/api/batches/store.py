"""BatchStore: files and batches in a directory. All methods do blocking file I/O: call them off the loop.

    DIR/files/file-….json, .data         a file: its record, its bytes
    DIR/batches/batch_….json             a batch; written by its creator, then by the runner alone
    DIR/batches/batch_….cancel           cancellation requested
    DIR/batches/batch_….output, .errors  the lines of its results so far
    DIR/runner.lock                      held by the process that runs batches

Several frontends of a machine may share a directory: each record has one writer at a time, and is replaced atomically.
"""

import contextlib
import fcntl
import io
import logging
import os
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from hashlib import blake2b
from typing import IO, Any, TypeVar

import msgspec

from dynamo.api.batches.limits import KEPT_S, StorageLimits
from dynamo.api.batches.records import (
    BATCH_ID,
    CANCELLING,
    FILE_ID,
    FINALIZING,
    PRODUCED,
    BatchRecord,
    FileObject,
    FileRecord,
)
from dynamo.core.boundaries import Rollback
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.codec import UNREADABLE, json_decoder, json_encode
from dynamo.core.errors import ConfigError, HttpError, NotFound
from dynamo.core.private_paths import unlink_all

logger = logging.getLogger(__name__)

OWNER_PREFIX = "key:"
OwnerOfName = Callable[[str], str | None]
"""Returns the owner of stored objects for a key's name; None for an unknown name."""

Record = TypeVar("Record", FileRecord, BatchRecord)

PIECE_BYTES = 1 << 20
LEFTOVER_S = 3600.0  # Age at which an unfinished file is considered abandoned.
RESULTS = ("output", "errors")


class BatchStore:
    """All files and batches of one directory."""

    def __init__(
        self,
        folder: str,
        limits: StorageLimits | None = None,
        clock: Clock | None = None,
        *,
        owner_of_name: OwnerOfName | None = None,
    ) -> None:
        """Create the directory if it is missing.

        `owner_of_name` returns the owner for a key's name, which earlier releases stored. Raise `ConfigError`.
        """
        self._owner_of_name = owner_of_name
        self.limits = limits or StorageLimits()
        self._clock = clock or SystemClock()
        self._unreadable: set[str] = set()
        """Records that have been reported as unreadable."""
        self._ended: set[str] = set()
        """Batches that have ended and need no further reads."""
        self._files = os.path.join(folder, "files")
        self._batches = os.path.join(folder, "batches")
        self._lock_path = os.path.join(folder, "runner.lock")
        self._lock: int | None = None
        try:
            for one in (folder, self._files, self._batches):
                os.makedirs(one, mode=0o700, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError("must be writable")
        except OSError as error:
            raise ConfigError(f"--batch-dir {folder}: {error}") from None

    # The runner's lock.

    def try_lock(self) -> bool:
        """Return whether this process holds the runner's lock, after trying to take it."""
        if self._lock is None:
            file = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(file)
                return False
            self._lock = file
        return True

    def unlock(self) -> None:
        """Release the lock, so that another process can run batches."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # Files.

    def add_file(self, source: IO[bytes], file: FileObject, owner: str | None) -> FileObject:
        """Store a file, which may have any name. Raise `HttpError` (413) if a storage limit is reached."""
        used, count = self.usage()
        if count >= self.limits.files_max:
            raise HttpError(413, f"--batch-files: limit of {count} files reached; delete some")
        unfinished = os.path.join(self._files, f"{secrets.token_hex(8)}.part")
        with Rollback(lambda: unlink_all(unfinished, self.path(file.id))):
            with open_private(unfinished) as out:
                while piece := source.read(PIECE_BYTES):
                    used += len(piece)
                    self._require_space(used)
                    write_whole(out, piece)
                file.bytes = out.tell()
                os.fsync(out.fileno())
            os.replace(unfinished, self.path(file.id))
            self._write(self._record_path(self._files, file.id), FileRecord(file=file, owner=owner))
        return file

    def _require_space(self, used: int) -> None:
        if used > self.limits.bytes_max:
            raise HttpError(413, "--batch-storage-bytes: not enough space for the file; delete others")

    def file(self, file_id: str, owner: str | None) -> FileObject:
        """Return a file's record. Raise `NotFound` if it does not exist, has another owner, or has expired."""
        record = self._read(self._files, file_id, FileRecord) if FILE_ID.fullmatch(file_id) else None
        if record is None or record.owner != owner or is_over(record.file, self._clock.wall()):
            raise NotFound(f"No such File object: {file_id}", param="id", code="file_not_found")
        return record.file

    def files(self, owner: str | None) -> list[FileObject]:
        """Return all files of an owner, newest first."""
        now = self._clock.wall()
        found = [one.file for one in self._all(self._files, FileRecord) if one.owner == owner]
        return sorted((one for one in found if not is_over(one, now)), key=lambda one: (-one.created_at, one.id))

    def delete_file(self, file_id: str, owner: str | None) -> None:
        """Delete a file. Raise `NotFound`, or `HttpError` (409) for the input of a batch that has not ended."""
        self.file(file_id, owner)
        user = next((one for one in self.open_batches() if one.batch.input_file_id == file_id), None)
        if user is not None:
            raise HttpError(409, f"{file_id} is the input of {user.batch.id}, which is {user.batch.status}")
        self._forget(file_id)

    def path(self, file_id: str) -> str:
        """Return the path of a file's bytes."""
        return os.path.join(self._files, f"{file_id}.data")

    def usage(self) -> tuple[int, int]:
        """Return the bytes in use, including unfinished results, and the number of files."""
        size = count = 0
        for folder in (self._files, self._batches):
            with os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        size += entry.stat().st_size
                        count += folder == self._files and entry.name.endswith(".data")
        return size, count

    # Batches.

    def add_batch(self, record: BatchRecord) -> None:
        """Add a new batch. Raise `HttpError` (429) if too many have not ended."""
        if len(self.open_batches()) >= self.limits.open_batches_max:
            raise HttpError(429, f"{self.limits.open_batches_max} batches have not ended yet; try again later")
        self.save(record)

    def save(self, record: BatchRecord) -> None:
        """Store the batch's present state."""
        self._write(self._record_path(self._batches, record.batch.id), record)

    def batch(self, batch_id: str, owner: str | None) -> BatchRecord:
        """Return a batch. Raise `NotFound` if it does not exist or has another owner."""
        record = self._read(self._batches, batch_id, BatchRecord) if BATCH_ID.fullmatch(batch_id) else None
        if record is None or record.owner != owner:
            raise NotFound(f"No such Batch object: {batch_id}", param="batch_id", code="batch_not_found")
        if not record.has_ended and record.batch.status != FINALIZING and (since := self.cancelled_s(batch_id)):
            record.batch.status, record.batch.cancelling_at = CANCELLING, since
        return record

    def batches(self, owner: str | None) -> list[BatchRecord]:
        """Return all batches of an owner, newest first."""
        found = [one for one in self._all(self._batches, BatchRecord) if one.owner == owner]
        return sorted(found, key=lambda one: (-one.batch.created_at, one.batch.id))

    def open_batches(self) -> list[BatchRecord]:
        """Return all batches that have not ended, oldest first."""
        found = []
        for one in self._all(self._batches, BatchRecord, self._ended):
            if one.has_ended:
                self._ended.add(one.batch.id)
            else:
                found.append(one)
        return sorted(found, key=lambda one: (one.batch.created_at, one.batch.id))

    def cancel(self, batch_id: str) -> None:
        """Request cancellation of a batch from the runner, in whichever process it runs."""
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self._mark(batch_id), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))

    def cancelled_s(self, batch_id: str) -> int | None:
        """Return the time at which cancellation was requested; None if it was not."""
        try:
            return int(os.stat(self._mark(batch_id)).st_mtime)
        except FileNotFoundError:
            return None

    # Results.

    def append_result(self, batch_id: str, line: dict[str, Any], is_error: bool) -> None:
        """Append a result; it is on disk on return. Raise `OSError`, in which case nothing was appended."""
        self.append_results(batch_id, [line], is_error)

    def append_results(self, batch_id: str, lines: Sequence[dict[str, Any]], is_error: bool) -> None:
        """Append several results, all or none of them."""
        path = self._result_path(batch_id, RESULTS[is_error])
        is_new = not os.path.exists(path)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(file, "ab", buffering=0) as out:
            before = os.fstat(file).st_size
            with Rollback(lambda: os.ftruncate(file, before)):  # A later line must not be appended to a partial one.
                write_whole(out, b"".join(json_encode(line) + b"\n" for line in lines))
                os.fsync(file)
        if is_new:
            sync_folder(self._batches)

    def results(self, batch_id: str) -> tuple[set[str], set[str]]:
        """Return the custom ids with a response, and those that failed; unreadable lines are removed."""
        completed, failed = (self._ids(self._result_path(batch_id, kind)) for kind in RESULTS)
        return completed, failed - completed

    def publish(self, record: BatchRecord) -> None:
        """Publish the results as files. Idempotent: the ids of the files are derived from the batch's."""
        batch = record.batch
        for kind, field in zip(RESULTS, ("output_file_id", "error_file_id"), strict=True):
            file_id = f"file-{blake2b(f'{batch.id}.{kind}'.encode(), digest_size=12).hexdigest()}"
            source = self._result_path(batch.id, kind)
            if os.path.exists(source):
                now = int(self._clock.wall())
                file = FileObject(
                    id=file_id,
                    bytes=os.path.getsize(source),
                    created_at=now,
                    filename=f"{batch.id}_{kind}.jsonl",
                    purpose=PRODUCED,
                    expires_at=now + (record.output_expires_after_s or KEPT_S),
                )
                self._write(self._record_path(self._files, file_id), FileRecord(file=file, owner=record.owner))
                os.replace(source, self.path(file_id))
                sync_folder(self._files)
            if os.path.exists(self.path(file_id)):
                setattr(batch, field, file_id)

    # Expiry.

    def sweep(self) -> None:
        """Delete expired files, old ended batches, and abandoned unfinished files."""
        now = self._clock.wall()
        inputs = {one.batch.input_file_id for one in self.open_batches()}
        for record in self._all(self._files, FileRecord):
            if is_over(record.file, now) and record.file.id not in inputs:
                self._forget(record.file.id)
        for batch in self._all(self._batches, BatchRecord):
            if batch.has_ended and batch.batch.created_at + KEPT_S < now:
                self._ended.discard(batch.batch.id)
                for path in (self._record_path(self._batches, batch.batch.id), self._mark(batch.batch.id)):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
        with os.scandir(self._files) as entries:
            leftovers = [one.path for one in entries if one.name.endswith(".part")]
        for path in leftovers:
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_mtime + LEFTOVER_S < now:
                    os.unlink(path)

    def _forget(self, file_id: str) -> None:
        for path in (self._record_path(self._files, file_id), self.path(file_id)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def _mark(self, batch_id: str) -> str:
        return os.path.join(self._batches, f"{batch_id}.cancel")

    def _result_path(self, batch_id: str, kind: str) -> str:
        return os.path.join(self._batches, f"{batch_id}.{kind}")

    def _record_path(self, folder: str, key: str) -> str:
        return os.path.join(folder, f"{key}.json")

    def _ids(self, path: str) -> set[str]:
        ids, damaged = set[str](), 0
        try:
            with open(path, "r+b") as file:
                whole = 0
                for line in file:
                    if not line.endswith(b"\n"):
                        file.truncate(whole)  # The process stopped while writing this line.
                        break
                    whole += len(line)
                    custom_id = id_of(line)
                    if custom_id is None:
                        damaged += 1
                    else:
                        ids.add(custom_id)
        except FileNotFoundError:
            return set()
        if damaged:
            logger.warning("%s: removing %d unreadable lines; their requests are repeated", path, damaged)
            self._replace(path, b"".join(line for line in lines_of(path) if id_of(line) is not None))
        return ids

    def _write(self, path: str, record: FileRecord | BatchRecord) -> None:
        self._replace(path, json_encode(record))

    def _replace(self, path: str, data: bytes) -> None:
        """Replace a file atomically; the data is on disk on return. Raise `OSError`."""
        unfinished = f"{path}-{secrets.token_hex(4)}.part"
        with Rollback(lambda: unlink_all(unfinished)):
            with open_private(unfinished) as out:
                write_whole(out, data)
                os.fsync(out.fileno())
            os.replace(unfinished, path)
        sync_folder(os.path.dirname(path))

    def _read(self, folder: str, key: str, kind: type[Record]) -> Record | None:
        try:
            with open(self._record_path(folder, key), "rb") as file:
                record: Record = json_decoder(kind).decode(file.read())
        except FileNotFoundError:
            return None
        except (OSError, *UNREADABLE) as error:
            if key not in self._unreadable:  # Log once: records are read every few seconds.
                self._unreadable.add(key)
                logger.warning("%s in %s cannot be read: %s", key, folder, error)
            return None
        if record.owner is not None and not record.owner.startswith(OWNER_PREFIX) and self._owner_of_name is not None:
            record.owner = self._owner_of_name(record.owner) or record.owner
        return record

    def _all(self, folder: str, kind: type[Record], passed: Collection[str] = ()) -> Iterator[Record]:
        with os.scandir(folder) as entries:
            keys = [one.name.removesuffix(".json") for one in entries if one.name.endswith(".json")]
        for key in keys:
            if key in passed:
                continue
            record = self._read(folder, key, kind)
            if record is not None:
                yield record


class ResultId(msgspec.Struct):
    """Fields read from a result."""

    custom_id: str


_decode_id = json_decoder(ResultId).decode


def id_of(line: bytes) -> str | None:
    """Return the custom id of a result's line; None for an unreadable line."""
    try:
        found: str = _decode_id(line).custom_id
    except UNREADABLE:
        return None
    return found


def open_private(path: str) -> io.FileIO:
    """Create a new file that other users may not read."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0)


def write_whole(out: io.FileIO, data: bytes) -> None:
    """Write all of the data. Raise `OSError`."""
    rest = memoryview(data)
    while rest:
        rest = rest[out.write(rest) :]


def sync_folder(folder: str) -> None:
    """Flush directory entries to disk: without it a new file may be lost. Raise `OSError`."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def is_over(file: FileObject, now: float) -> bool:
    """Return whether the file has expired."""
    return file.expires_at is not None and file.expires_at <= now


def lines_of(path: str) -> Iterator[bytes]:
    """Yield the lines of a file."""
    with open(path, "rb") as file:
        yield from file
