"""Locked directory: a temporary directory locked by its process, so that those of ended processes can be removed."""

import contextlib
import fcntl
import os
import stat
import tempfile
from pathlib import Path

from dynamo.core.boundaries import Rollback
from dynamo.core.private_paths import FILE_MODE, temporary_directory, user_id

STARTING = "dynamo-starting-"
"""Prefix until the lock is held; the clean-up skips such directories."""
LOCK = "lock"
LOGS = "logs"


class LockedDirectory:
    """A private directory (0700), locked while this process lives, and the children that inherit `lock`."""

    def __init__(self, prefix: str, parent: str | None = None, *, logs_kept: int = 0) -> None:
        """Create the directory; remove those of the same prefix of this user's ended processes.

        With `logs_kept` the directory has a subdirectory `logs`, which stays in that many of the ended ones. Raise `OSError`,
        or `StartupError` if the system has no usable temporary directory.
        """
        folder = Path(parent or temporary_directory())
        starting = Path(tempfile.mkdtemp(prefix=STARTING, dir=folder))
        with Rollback(lambda: _remove_tree(starting)):
            self.lock = os.open(starting / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, FILE_MODE)
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            if logs_kept:
                (starting / LOGS).mkdir()
            self.path = starting.rename(folder / starting.name.replace(STARTING, prefix))
        remove_ended(prefix, folder, logs_kept=logs_kept)

    @property
    def logs(self) -> Path:
        """Return the subdirectory of the logs."""
        return self.path / LOGS

    def close(self, *, keep_logs: bool = False) -> None:
        """Remove the directory, with `keep_logs` everything in it except the logs; safe to call twice."""
        _remove(self.path, keep_logs=keep_logs)
        with contextlib.suppress(OSError):
            os.close(self.lock)
        self.lock = -1


def remove_ended(prefix: str, folder: Path, *, logs_kept: int = 0) -> None:
    """Remove directories of this user whose lock no process holds; one without a lock is left alone.

    The `logs_kept` most recent ones that have logs keep them.
    """
    ended: list[tuple[float, Path]] = []
    for path in folder.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # Removed concurrently, or not readable because it belongs to another user.
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == user_id() and _has_ended(path):
                ended.append((found.st_mtime, path))
    for rank, (_, path) in enumerate(sorted(ended, reverse=True)):
        has_logs = any(log.stat().st_size for log in path.glob(f"{LOGS}/*.log"))
        _remove(path, keep_logs=has_logs and rank < logs_kept)


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a directory. Raise `OSError` where there is none."""
    return not _has_ended(path)


def _remove(path: Path, *, keep_logs: bool) -> None:
    if not keep_logs:
        _remove_tree(path)
        return
    with contextlib.suppress(OSError):
        for entry in path.iterdir():
            if entry.name not in {LOCK, LOGS}:
                _remove_tree(entry)


def _has_ended(path: Path) -> bool:
    """Return whether the lock is there and free. Raise `OSError` where there is none."""
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def remove_abandoned_files(directory: str, prefix: str, age_s: float) -> None:
    """Remove files of this user that a killed process left unfinished: those older than `age_s`.

    The age is computed with the file system's clock, which may differ from another host's.
    """
    try:
        handle, probe = tempfile.mkstemp(prefix=prefix, dir=directory)
    except OSError:  # A full disk, for example; the next start retries.
        return
    try:
        now = os.fstat(handle).st_mtime
    finally:
        os.close(handle)
        os.unlink(probe)
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if not entry.name.startswith(prefix):
                continue
            with contextlib.suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == user_id()
                if is_ours and now - found.st_mtime > age_s:
                    os.unlink(entry.path)


def _remove_tree(path: Path) -> None:
    """Remove a directory with its content; ignore errors."""
    import shutil  # With the modules for archives, which take a megabyte; most processes find nothing to remove.

    shutil.rmtree(path, ignore_errors=True)
