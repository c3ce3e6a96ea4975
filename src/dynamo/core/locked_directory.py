"""Locked directory: a temporary directory locked by its process, so that those of ended processes can be removed."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile

from dynamo.core.private_paths import FILE_MODE, user_id

STARTING = "dynamo-starting-"
"""Prefix until the lock is held; the clean-up skips such directories."""
LOCK = "lock"


class LockedDirectory:
    """A private directory (0700), locked while this process lives, and the children that inherit `lock`."""

    def __init__(self, prefix: str, parent: str | None = None) -> None:
        """Create the directory; remove those of the same prefix of this user's ended processes. Raise `OSError`."""
        parent = parent or tempfile.gettempdir()
        remove_ended(prefix, parent)
        starting = tempfile.mkdtemp(prefix=STARTING, dir=parent)
        try:
            self.lock = os.open(os.path.join(starting, LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, FILE_MODE)
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            self.path = os.path.join(parent, prefix + os.path.basename(starting).removeprefix(STARTING))
            os.rename(starting, self.path)
        except BaseException:
            shutil.rmtree(starting, ignore_errors=True)
            raise

    def close(self) -> None:
        """Remove the directory; safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self.lock)
        self.lock = -1


def remove_ended(prefix: str, parent: str) -> None:
    """Remove directories of this user whose lock no process holds; one without a lock is left alone."""
    try:
        names = [name for name in os.listdir(parent) if name.startswith(prefix)]
    except OSError:
        return
    for name in names:
        path = os.path.join(parent, name)
        with contextlib.suppress(OSError):  # Removed meanwhile, or not ours.
            found = os.lstat(path)
            if stat.S_ISDIR(found.st_mode) and found.st_uid == user_id() and _has_ended(path):
                shutil.rmtree(path, ignore_errors=True)


def _has_ended(path: str) -> bool:
    """Return whether the lock is there and free. Raise `OSError` where there is none."""
    lock = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
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
