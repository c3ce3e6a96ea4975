"""Directory events from Linux inotify by ctypes; elsewhere `DirectoryEvents.open` returns None, so callers poll."""

import asyncio
import os
import sys
from collections.abc import Callable

IN_CLOSE_WRITE, IN_MOVED_FROM, IN_MOVED_TO, IN_DELETE = 0x008, 0x040, 0x080, 0x200
CHANGES = IN_CLOSE_WRITE | IN_MOVED_FROM | IN_MOVED_TO | IN_DELETE  # Without IN_ATTRIB: refreshes are not changes.
READ_BYTES = 65536


class DirectoryEvents:
    """Callback on the loop after any change in one of its directories."""

    def __init__(
        self, descriptor: int, add_watch: Callable[[int, bytes, int], int], on_change: Callable[[], None]
    ) -> None:
        self._descriptor = descriptor
        self._add_watch = add_watch
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(descriptor, self._read)

    @classmethod
    def open(cls, on_change: Callable[[], None]) -> "DirectoryEvents | None":
        """Start listening; return None if inotify is missing or its limits are exhausted."""
        if not sys.platform.startswith("linux"):
            return None
        import ctypes

        try:
            libc = ctypes.CDLL(None, use_errno=True)
            descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            add_watch = libc.inotify_add_watch
        except (OSError, AttributeError):
            return None
        return cls(descriptor, add_watch, on_change) if descriptor >= 0 else None

    def add(self, path: str) -> None:
        """Watch one more directory. On failure, its changes are found by the regular scan."""
        self._add_watch(self._descriptor, os.fsencode(path), CHANGES)

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _read(self) -> None:
        try:
            os.read(self._descriptor, READ_BYTES)
        except BlockingIOError:
            return
        self._on_change()
