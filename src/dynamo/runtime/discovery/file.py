"""Discovery in a directory: one file per record, in exactly Dynamo's layout.

    <root>/v1/instances/dynamo%2Fbackend%2Fgenerate%2F62061240644c9367

The owner refreshes the modification time. A reader drops a record whose modification time has not changed for
`EXPIRY_S` of the reader's clock: times of other hosts are only compared with each other, except that a record
which is old when it is first seen is ignored until its owner refreshes it. A file is written in the root and renamed
into place, so that readers see complete records only. A record that was changed or removed by another process is
written again by its owner. A persistent record has no owner: its modification time is years ahead, and it does not expire.

Only this user may write to the directory: a process that can write records can redirect requests.
"""

import atexit
import contextlib
import errno
import itertools
import logging
import os
import stat
import string
from dataclasses import dataclass

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.config import setting
from dynamo.core.errors import ConfigError, InvalidArgument, StartupError
from dynamo.core.locked_directory import remove_abandoned_files
from dynamo.core.private_paths import (
    FILE_MODE,
    check_trusted_directory,
    make_private_directories,
    temporary_directory,
    user_id,
)
from dynamo.core.tasks import TaskOwner
from dynamo.runtime.discovery.base import View, Watch
from dynamo.runtime.discovery.inotify import DirectoryEvents

logger = logging.getLogger(__name__)

REFRESH_S = 3.0  # About Dynamo's interval; allows three attempts before a record expires.
EXPIRY_S = 10.0
REMOVE_S = 60.0  # Longer than network file systems cache modification times: expired records are removed after it.
REPAIR_S = 1.0  # Interval of the check for changed or removed own records.
RESCAN_S = 1.0  # Finds expired records and changes made on other machines, which cause no events.
POLL_S = 0.15  # Without inotify: short enough that a new worker appears without noticeable delay.
PERSISTENT_AHEAD_S, PERSISTENT_S = 9 * 365 * 86400, 4 * 365 * 86400
"""Modification time of a persistent record when it is written, and from which on it is one; some file systems end in 2038."""
NAME_BYTES_MAX = 255  # Limit of common file systems.
RECORD_BYTES_MAX = 4 << 20  # A model card has a few kilobytes; etcd's own limit is 1.5 MiB.
UNFINISHED = ".new-"  # Prefix of records that are being written.
ABANDONED_S = 3600.0  # Writing a record takes milliseconds: an older file was left by a killed process.
SUPERUSER = 0
VARIABLE = "DYN_FILE_KV"

_PLAIN = frozenset(string.ascii_letters + string.digits)


def encode_name(key: str) -> str:
    """Encode a key as a file name: every byte except ASCII letters and digits becomes %XX."""
    return "".join(char if char in _PLAIN else "".join(f"%{byte:02X}" for byte in char.encode()) for char in key)


def decode_name(name: str) -> str | None:
    """Decode a file name into its key, None for a name outside the encoding."""
    head, *parts = name.split("%")
    try:
        data = head.encode("ascii") + b"".join(bytes([int(part[:2], 16)]) + part[2:].encode("ascii") for part in parts)
        key = data.decode()
    except (ValueError, UnicodeError):
        return None
    return key if encode_name(key) == name else None


def default_root() -> str:
    """Return `DYN_FILE_KV`, or `dynamo_store_kv` in the system's temporary directory. Raise `StartupError` if it has none."""
    root = setting("DYN_FILE_KV", "", str)
    return root or os.path.join(temporary_directory(), "dynamo_store_kv")


Signature = tuple[int, int, int]
"""Modification time, size and inode: a file is read again only when they change."""


@dataclass(slots=True)
class _Seen:
    """State of one file as observed by this process."""

    modified_ns: int
    changed_at: float
    """Time of the last observed change of the modification time, by this process's monotonic clock."""
    is_alive: bool
    """Whether the owner refreshes the record."""
    signature: Signature | None = None
    """Signature of the last valid content."""
    value: bytes | None = None
    """Last valid content, None without any."""
    refused: Signature | None = None
    """Signature of invalid content that has been logged."""


class FileDiscovery:
    """Registry in one directory, shared by all processes that use it."""

    def __init__(self, root: str | None = None, clock: Clock | None = None) -> None:
        self.root = os.path.abspath(root or default_root())
        self._clock = clock or SystemClock()
        self._own: dict[tuple[str, str], bytes] = {}
        self._failing: set[tuple[str, str]] = set()
        """Own records whose last refresh failed and was logged."""
        self._views: dict[str, View] = {}
        self._seen: dict[str, dict[str, _Seen]] = {}
        self._tasks = TaskOwner("discovery.file")
        self._events: DirectoryEvents | None = None
        self._serial = itertools.count()
        self._last_look: float | None = None
        self._patient_until = 0.0
        self._is_frozen = False
        self._is_refreshing = False
        self._prepare(self.root)
        if not os.access(self.root, os.W_OK):
            raise StartupError(
                f"{VARIABLE}={self.root!r}: cannot write to the directory: no permission, or a read-only file system"
            )
        remove_abandoned_files(self.root, UNFINISHED, ABANDONED_S)

    @property
    def is_sound(self) -> bool:
        """Return False while a crashed refresh or scan task is being restarted."""
        return self._tasks.is_sound

    async def put(self, bucket: str, key: str, value: bytes) -> None:
        self._try_write(bucket, key, value)
        if not self._is_refreshing:
            self._is_refreshing = True
            self._tasks.supervise(self._refresh_forever, "refresh", clock=self._clock)
            atexit.register(self._remove_own)
        self._own[bucket, key] = value

    async def put_persistent(self, bucket: str, key: str, value: bytes) -> None:
        """Write a record that outlives this process; any process may overwrite it."""
        self._own.pop((bucket, key), None)
        self._try_write(bucket, key, value, ahead_s=PERSISTENT_AHEAD_S)

    async def delete(self, bucket: str, key: str) -> None:
        self._own.pop((bucket, key), None)
        _unlink(self._path(bucket, key))

    async def snapshot(self, bucket: str) -> dict[str, bytes]:
        view = self._views.get(bucket)
        if view is None:
            return self._read(bucket)
        self._look(bucket)
        return dict(view.records)

    def watch(self, bucket: str) -> Watch:
        view = self._views.get(bucket)
        if view is None:
            view = self._views[bucket] = View()
            self._prepare(self._directory(bucket))
            self._start_watching(bucket)
            self._look(bucket)
        return view.watch()

    async def close(self) -> None:
        self._remove_own()
        atexit.unregister(self._remove_own)
        for view in self._views.values():
            view.close()
        events, self._events = self._events, None
        if events is not None:
            events.close()
        await self._tasks.cancel_and_wait()

    def _remove_own(self) -> None:
        """Remove own records; also at interpreter exit, so that they do not outlive the process by `EXPIRY_S`."""
        own, self._own = self._own, {}
        for bucket, key in own:
            _unlink(self._path(bucket, key))

    def refresh(self) -> None:
        """Refresh own records; write removed or changed ones again."""
        self._tend(is_refresh=True)

    def repair(self) -> None:
        """Write own records again that another process removed or changed."""
        self._tend(is_refresh=False)

    def _tend(self, *, is_refresh: bool) -> None:
        for record, value in list(self._own.items()):
            try:
                self._tend_one(*record, value, is_refresh=is_refresh)
            except (OSError, ConfigError) as error:
                if record not in self._failing:
                    logger.warning("failed to refresh record %s/%s: %s; retrying", *record, error)
                self._failing.add(record)
            else:
                if record in self._failing:
                    logger.warning("record %s/%s refreshed again", *record)
                self._failing.discard(record)

    def _tend_one(self, bucket: str, key: str, value: bytes, *, is_refresh: bool) -> None:
        path = self._path(bucket, key)
        try:
            damage = "" if _read_file(path, len(value)) == value else "changed"
        except FileNotFoundError:
            damage = "removed"
        except (ValueError, OSError):  # Different length, missing file or missing permission: write a new file.
            damage = "changed"
        if damage:
            if (bucket, key) not in self._failing:
                logger.warning("record %s/%s was %s by another process; writing it again", bucket, key, damage)
            self._write(bucket, key, value)
        elif is_refresh:
            now = self._clock.wall()
            os.utime(path, (now, now), follow_symlinks=False)

    def look(self) -> None:
        """Compare every watched bucket with its directory."""
        self._note_pause()
        for bucket in self._views:
            self._look(bucket)

    def _look(self, bucket: str) -> None:
        try:
            records = self._read(bucket)
        except OSError as error:
            if not self._is_frozen:
                logger.warning("cannot read discovery directory %s (%s): keeping the last view", self.root, error)
            self._is_frozen = True
            return
        if self._is_frozen:
            logger.info("discovery directory %s readable again", self.root)
        self._is_frozen = False
        self._views[bucket].replace(records)

    def _read(self, bucket: str) -> dict[str, bytes]:
        """Return the live records of a bucket. Raise `OSError` when the directory cannot be read."""
        known = self._seen.get(bucket, {})
        now = self._clock.now()
        try:
            entries = list(os.scandir(self._directory(bucket)))
        except FileNotFoundError:
            if not os.path.isdir(self.root):
                raise
            # Another program removed the whole directory: owners get the expiry time to write their records again.
            found = {key: seen for key, seen in known.items() if now - seen.changed_at <= EXPIRY_S}
        else:
            found = {}
            for entry in entries:
                key = decode_name(entry.name)
                if key is None:
                    continue
                before = known.get(key)
                try:
                    seen = self._look_at(bucket, key, entry, before, now)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    logger.warning("cannot read record %s: %s", entry.path, error)
                    seen = before
                if seen is not None:
                    found[key] = seen
        self._seen[bucket] = found
        return {key: seen.value for key, seen in found.items() if seen.is_alive and seen.value is not None}

    def _look_at(
        self, bucket: str, key: str, entry: "os.DirEntry[str]", before: _Seen | None, now: float
    ) -> _Seen | None:
        """Return the updated state of a file; None for one that is not a record. Raise `OSError`."""
        status = entry.stat(follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):  # A damaged record is repaired by its owner.
            return before if before is not None and now - before.changed_at <= EXPIRY_S else None
        is_own = (bucket, key) in self._own
        seen = before
        if seen is None:
            is_fresh = self._clock.wall() - status.st_mtime <= EXPIRY_S
            seen = _Seen(status.st_mtime_ns, now, is_alive=is_fresh)
        elif status.st_mtime - self._clock.wall() > PERSISTENT_S or seen.modified_ns != status.st_mtime_ns:
            seen.modified_ns, seen.changed_at, seen.is_alive = status.st_mtime_ns, now, True
        elif seen.is_alive and now - seen.changed_at > EXPIRY_S and not is_own and not self._is_patient():
            logger.info("record %s/%s expired", bucket, key)
            seen.is_alive = False
        seen.is_alive = seen.is_alive or is_own
        if not seen.is_alive and now - seen.changed_at > REMOVE_S and not self._is_patient():
            with contextlib.suppress(OSError):  # Another process may have removed it, or permission is missing.
                os.unlink(entry.path)
            return None
        signature = (status.st_mtime_ns, status.st_size, status.st_ino)
        if seen.is_alive and seen.signature != signature and status.st_size:
            self._take_in(seen, entry.path, signature, status)
        return seen

    def _take_in(self, seen: _Seen, path: str, signature: Signature, status: os.stat_result) -> None:
        """Read a file's content; invalid content keeps the last valid one, until the owner has repaired the record."""
        try:
            if status.st_uid not in (user_id(), SUPERUSER):
                raise ValueError(f"owned by user {status.st_uid}")  # noqa: TRY301 - one place for rejections
            seen.value = _read_file(path, RECORD_BYTES_MAX)
            seen.signature = signature
        except ValueError as error:
            if seen.refused is None or seen.refused[1:] != signature[1:]:
                logger.warning("ignoring record %s: %s", path, error)
            seen.refused = signature

    def _note_pause(self) -> None:
        """Extend all records after this process was suspended, because it missed their refreshes."""
        now = self._clock.now()
        if self._last_look is not None and now - self._last_look > EXPIRY_S / 2:
            self._patient_until = now + 2 * REFRESH_S
        self._last_look = now

    def _is_patient(self) -> bool:
        return self._clock.now() < self._patient_until

    def _start_watching(self, bucket: str) -> None:
        if len(self._views) == 1:
            self._events = DirectoryEvents.open(self.look)
            interval_s = POLL_S if self._events is None else RESCAN_S
            self._tasks.supervise(lambda: self._look_forever(interval_s), "look", clock=self._clock)
        if self._events is not None:
            self._events.add(self._directory(bucket))

    async def _look_forever(self, interval_s: float) -> None:
        while True:
            await self._clock.sleep(interval_s)
            if self._events is not None:
                for bucket in self._views:  # A directory that was removed and created again needs a new watch.
                    self._events.add(self._directory(bucket))
            self.look()

    async def _refresh_forever(self) -> None:
        refresh_at = self._clock.now() + REFRESH_S
        while True:
            await self._clock.sleep(REPAIR_S)
            if self._clock.now() >= refresh_at:
                self.refresh()
                refresh_at = self._clock.now() + REFRESH_S
            else:
                self.repair()

    def _try_write(self, bucket: str, key: str, value: bytes, ahead_s: float = 0.0) -> None:
        """Write a record. Raise `InvalidArgument` for a large one, `ConfigError` if it cannot be written."""
        if len(value) > RECORD_BYTES_MAX:
            raise InvalidArgument(f"discovery record {key!r}: {len(value)} bytes, must be at most {RECORD_BYTES_MAX}")
        try:
            self._write(bucket, key, value, ahead_s)
        except OSError as error:
            raise ConfigError(f"DYN_FILE_KV={self.root!r}: cannot write a record: {error.strerror}") from None

    def _write(self, bucket: str, key: str, value: bytes, ahead_s: float = 0.0) -> None:
        """Write a record; `ahead_s` is added to its modification time. Raise `OSError`."""
        path = self._path(bucket, key)
        temporary = os.path.join(self.root, f"{UNFINISHED}{os.getpid()}-{id(self):x}-{next(self._serial)}")
        self._prepare(os.path.dirname(path))
        try:
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
            with open(file, "wb") as writer:
                writer.write(value)
            if ahead_s:
                time_s = self._clock.wall() + ahead_s
                os.utime(temporary, (time_s, time_s))
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _prepare(self, directory: str) -> None:
        """Create a directory at or below the root. Raise `ConfigError` on failure or if other users can write to it."""
        try:
            make_private_directories(directory)
        except (FileExistsError, NotADirectoryError):
            raise StartupError(
                f"{VARIABLE}={self.root!r}: must be a directory; it, or a part of its path, is a file"
            ) from None
        except OSError as error:
            raise StartupError(f"{VARIABLE}={self.root!r}: cannot create the directory: {error.strerror}") from None
        while len(directory) > len(self.root):
            check_trusted_directory(directory, VARIABLE)
            directory = os.path.dirname(directory)
        check_trusted_directory(self.root, VARIABLE)

    def _directory(self, bucket: str) -> str:
        return os.path.join(self.root, bucket)

    def _path(self, bucket: str, key: str) -> str:
        name = encode_name(key)
        if not 0 < len(name) <= NAME_BYTES_MAX:
            raise InvalidArgument(f"discovery key {key!r}: file name has {len(name)} bytes, must be 1 to 255")
        return os.path.join(self.root, bucket, name)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("cannot remove record %s: %s", path, error)


def _read_file(path: str, bytes_max: int) -> bytes:
    """Return a file's content. Raise `ValueError` for an oversized or irregular file, and `OSError`."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError("symbolic link") from None
        raise
    with open(file, "rb") as reader:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("not a regular file")
        if found.st_size > bytes_max:
            raise ValueError(f"{found.st_size} bytes: must be at most {bytes_max}")
        content = reader.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise ValueError(f"more than {bytes_max} bytes")
    return content
