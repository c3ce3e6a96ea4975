"""Shared usage: counts of API keys in a file that all frontend processes of one port map (`--http-workers`).

A row has a key's name as a digest, what is left of its two rate limits and when, and the requests in progress of each process.
A short lock protects each change; a process that is stopped while it holds the lock does not stop the others.
"""

import contextlib
import fcntl
import hashlib
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from dynamo.http.server.access import UsageRow

FILE = "key-usage"
PROCESSES_MAX = 256
ROWS_MAX = 4096
"""Keys with shared counts; further ones have limits of their own in each process. The file is sparse."""
DIGEST_BYTES = 16
STATE = struct.Struct("=dddd")
COUNT = struct.Struct("=I")
COUNTS = struct.Struct(f"={PROCESSES_MAX}I")
ROW_BYTES = DIGEST_BYTES + STATE.size + COUNTS.size
FREE = bytes(DIGEST_BYTES)
LOCK_TRIES = 2000
"""Attempts to get the lock, for about a millisecond; after that the counts are changed without it."""


class SharedUsage:
    """Usage of the keys of all processes, seen by one of them."""

    def __init__(self, folder: str, index: int) -> None:
        """`index` is the process's number among those that share the port. Requests in progress of an earlier one are dropped."""
        assert 0 <= index < PROCESSES_MAX, "a process has one of the columns"
        self._own = DIGEST_BYTES + STATE.size + index * COUNT.size
        self._file = os.open(Path(folder) / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, ROWS_MAX * ROW_BYTES)
        self._data = mmap.mmap(self._file, ROWS_MAX * ROW_BYTES)
        self._places: dict[str, int | None] = {}
        with self._locked():
            for place in range(0, ROWS_MAX * ROW_BYTES, ROW_BYTES):
                if self._data[place : place + DIGEST_BYTES] == FREE:
                    break
                COUNT.pack_into(self._data, place + self._own, 0)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[UsageRow | None]:
        """Yield the usage of a key, which is stored when the block is left; None if there are too many keys."""
        with self._locked():
            place = self._place(name)
            if place is None:
                yield None
                return
            state = STATE.unpack_from(self._data, place + DIGEST_BYTES)
            counts = COUNTS.unpack_from(self._data, place + DIGEST_BYTES + STATE.size)
            row = UsageRow((state[0], state[1]), (state[2], state[3]), sum(counts))
            yield row
            STATE.pack_into(self._data, place + DIGEST_BYTES, *row.requests, *row.tokens)
            if row.begun:
                (own,) = COUNT.unpack_from(self._data, place + self._own)
                COUNT.pack_into(self._data, place + self._own, max(own + row.begun, 0))

    def close(self) -> None:
        """Release the file."""
        self._data.close()
        os.close(self._file)

    def _place(self, name: str) -> int | None:
        """Return the place of a key's row, which is made for its first use; called with the lock."""
        if name not in self._places:
            digest = hashlib.blake2b(name.encode(), digest_size=DIGEST_BYTES).digest()
            found = None
            for place in range(0, ROWS_MAX * ROW_BYTES, ROW_BYTES):
                seen = self._data[place : place + DIGEST_BYTES]
                if seen in (digest, FREE):
                    self._data[place : place + DIGEST_BYTES] = digest
                    found = place
                    break
            self._places[name] = found
        return self._places[name]

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        is_locked = False
        for _ in range(LOCK_TRIES):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            is_locked = True
            break
        try:
            yield
        finally:
            if is_locked:
                fcntl.flock(self._file, fcntl.LOCK_UN)
