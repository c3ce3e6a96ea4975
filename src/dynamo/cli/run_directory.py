"""Run directory: the temporary files of one `dynamo serve` (discovery records, logs), and the removal of old ones."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

PREFIX = "dynamo-serve-"
UNLOCKED_PREFIX = "dynamo-starting-"  # Not matched by the clean-up, because its lock may not be held yet.
LOCK = "lock"
KEPT_LOGS = 5  # Runs whose logs are kept: enough to compare a crash with the ones before it.


class RunDirectory:
    """A private directory (0700) of one running `dynamo serve`, locked for as long as the process lives."""

    def __init__(self, parent: str | None = None) -> None:
        """Create the directory and remove what earlier, ended runs of this user left behind."""
        folder = Path(parent or tempfile.gettempdir())
        unlocked = Path(tempfile.mkdtemp(prefix=UNLOCKED_PREFIX, dir=folder))
        self._lock = os.open(unlocked / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = unlocked.rename(folder / unlocked.name.replace(UNLOCKED_PREFIX, PREFIX))
        self.logs.mkdir()
        remove_ended(folder, kept=KEPT_LOGS)

    @property
    def discovery(self) -> Path:
        """Return the directory of the discovery records, when the graph has its own."""
        return self.path / "discovery"

    @property
    def logs(self) -> Path:
        """Return the directory of the processes' logs."""
        return self.path / "logs"

    def close(self, *, keep_logs: bool) -> None:
        """Remove the directory; with `keep_logs` remove everything except the logs."""
        shutil.rmtree(self.discovery if keep_logs else self.path, ignore_errors=True)
        os.close(self._lock)


def remove_ended(folder: Path, *, kept: int) -> None:
    """Remove the directories of ended runs of this user in `folder`; keep the logs of the `kept` most recent ones."""
    ended: list[tuple[float, Path]] = []
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # Removed concurrently, or not readable because it belongs to another user.
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not _is_locked(path):
                ended.append((found.st_mtime, path))
    for rank, (_, path) in enumerate(sorted(ended, reverse=True)):
        has_logs = any(log.stat().st_size for log in path.glob("logs/*.log"))
        shutil.rmtree(path / "discovery" if has_logs and rank < kept else path, ignore_errors=True)


def _is_locked(path: Path) -> bool:
    """Return whether the process that made this directory lives: it holds the lock."""
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
