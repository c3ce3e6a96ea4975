"""Disk: blocks at fixed offsets of one file, each after a header that identifies it.

    page 0       the file's own header: fingerprint, bytes per slot
    slot n       a page with the block's header, then its bytes up to a page boundary

A block is valid if the checksums of its header and of its bytes match, which detects blocks half written at a crash;
valid blocks are reused after a restart. One process uses a file at a time; further processes use further files.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import stat
import struct
from collections.abc import Sequence
from typing import Any, TypeVar

from dynamo.core.boundaries import Rollback
from dynamo.core.errors import ConfigError
from dynamo.core.private_paths import FILE_MODE, user_id
from dynamo.kvbm.logical.blocks import BlockIdentity
from dynamo.kvbm.physical.layout import (
    PAGE_BYTES,
    BlockLayout,
    Bytes,
    CorruptBlock,
    pack_header,
    parents_first,
    unpack_header,
)

logger = logging.getLogger(__name__)

FILES_MAX = 64  # Processes that share a directory, each with its own file.
TOGETHER_MAX = 64  # Adjacent slots read or written by one call; far below the system's limit (IOV_MAX).
Placed = TypeVar("Placed", bound=tuple[int, Any, Any])
"""A tuple that begins with a slot."""
_FILE = struct.Struct("<8sQQ")
_MAGIC = b"DYNKVFS1"


class DiskFull(Exception):
    """The file system is full."""


class Disk:
    """A file of blocks."""

    def __init__(
        self,
        directory: str,
        layout: BlockLayout,
        blocks: int,
        *,
        is_direct: bool = True,
        fills_with_zeros: bool = False,
        syncs: bool = False,
    ) -> None:
        """Raise `ConfigError` for an unusable directory, `DiskFull` if there is too little space."""
        self.layout = layout
        self.blocks = blocks
        self.syncs = syncs
        self._fingerprint = layout.fingerprint
        self._stride = PAGE_BYTES + layout.stride_bytes
        self._headers = mmap.mmap(-1, TOGETHER_MAX * PAGE_BYTES)  # For writing; page-aligned.
        self.path, self._file = _own_file(directory, self._fingerprint)
        with Rollback(lambda: os.close(self._file)):
            self._prepare(fills_with_zeros=fills_with_zeros)
            self.is_direct = is_direct and self._go_direct()

    @property
    def size_bytes(self) -> int:
        return PAGE_BYTES + self.blocks * self._stride

    def restore(self) -> dict[int, BlockIdentity]:
        """Return the content of the slots from before, parents first. Block bytes are checked only when they are read."""
        found: list[tuple[int, BlockIdentity]] = []
        page = mmap.mmap(-1, PAGE_BYTES)
        for slot in range(self.blocks):
            if os.preadv(self._file, [page], self._place(slot)) < PAGE_BYTES:
                break
            with contextlib.suppress(CorruptBlock):
                header = unpack_header(page[:256], self._fingerprint)
                if header.length == self.layout.block_bytes:
                    found.append((slot, header.identity))
        return parents_first(found)

    def write(self, blocks: Sequence[tuple[int, BlockIdentity, Bytes]]) -> None:
        """Write blocks, given with their bytes padded to a page boundary. Raise `DiskFull` and `OSError`."""
        for run in _runs(blocks):
            parts: list[memoryview] = []
            for number, (_, identity, data) in enumerate(run):
                start = number * PAGE_BYTES
                header = pack_header(identity, data[: self.layout.block_bytes], self._fingerprint)
                self._headers[start : start + len(header)] = header
                parts += [memoryview(self._headers)[start : start + PAGE_BYTES], data.data]
            try:
                written = os.pwritev(self._file, parts, self._place(run[0][0]))
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise DiskFull(str(error)) from error
                raise
            finally:
                for part in parts:
                    part.release()
            if written < len(run) * self._stride:
                raise DiskFull(f"{self.path}: wrote {written} of {len(run) * self._stride} bytes")
        if self.syncs:
            os.fdatasync(self._file)

    def read(self, blocks: Sequence[tuple[int, int, Bytes]]) -> list[CorruptBlock | None]:
        """Read slots, given with their sequence hashes and buffers; return the error of each, or None.

        Raise `OSError`.
        """
        outcomes: list[CorruptBlock | None] = []
        for run in _runs(blocks):
            headers = mmap.mmap(-1, len(run) * PAGE_BYTES)
            parts: list[memoryview] = []
            for number, (_, _, data) in enumerate(run):
                parts += [memoryview(headers)[number * PAGE_BYTES : (number + 1) * PAGE_BYTES], data.data]
            os.preadv(self._file, parts, self._place(run[0][0]))  # Beyond the end of the file, headers stay empty.
            for number, (_, sequence_hash, data) in enumerate(run):
                try:
                    header = unpack_header(parts[2 * number], self._fingerprint)
                    header.check(data[: self.layout.block_bytes], sequence_hash)
                except CorruptBlock as error:
                    outcomes.append(error)
                else:
                    outcomes.append(None)
            for part in parts:
                part.release()
            headers.close()
        return outcomes

    def erase(self, slot: int) -> None:
        """Invalidate a slot's content, also for later restarts. Raise `OSError`."""
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.pwritev(self._file, [page], self._place(slot))

    def clear(self) -> None:
        """Drop all blocks, also for later restarts. Raise `OSError`."""
        os.ftruncate(self._file, PAGE_BYTES)
        os.ftruncate(self._file, self.size_bytes)

    def discard(self) -> None:
        """Remove the file; its space is free at once. Errors are ignored, and leave the file in place."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        self.close()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _place(self, slot: int) -> int:
        return PAGE_BYTES + slot * self._stride

    def _prepare(self, *, fills_with_zeros: bool) -> None:
        """Set the file's size, and clear a file of another layout."""
        mark = _FILE.pack(_MAGIC, self._fingerprint, self._stride)
        if os.pread(self._file, len(mark), 0) != mark:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, mark.ljust(PAGE_BYTES, b"\0"), 0)
        if os.fstat(self._file).st_size > self.size_bytes:
            os.ftruncate(self._file, self.size_bytes)
        try:
            os.posix_fallocate(self._file, 0, self.size_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise DiskFull(f"{self.path}: no space for {self.size_bytes} bytes") from error
            if fills_with_zeros:
                self._fill()
            else:
                os.ftruncate(self._file, self.size_bytes)
                logger.warning("%s: cannot reserve space (%s); writes may fail later on a full disk", self.path, error)

    def _fill(self) -> None:
        zeros = bytes(1 << 20)
        at = os.fstat(self._file).st_size
        while at < self.size_bytes:
            at += os.pwrite(self._file, zeros[: self.size_bytes - at], at)

    def _go_direct(self) -> bool:
        """Bypass the page cache, which would store everything twice; return False if the file system does not support it."""
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT)
            with mmap.mmap(-1, PAGE_BYTES) as page:
                os.preadv(self._file, [page], 0)
        except OSError:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags)
            logger.info("%s: the file system does not support direct I/O", self.path)
            return False
        return True


def _own_file(directory: str, fingerprint: int) -> tuple[str, int]:
    """Open this user's first file of this fingerprint that no other process uses. Raise `ConfigError`."""
    try:
        os.makedirs(directory, exist_ok=True)
        for number in range(FILES_MAX):
            path = os.path.join(directory, f"dynamo-kvbm-{fingerprint:016x}-{number}.blocks")
            try:
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.ELOOP, errno.EISDIR) and os.path.lexists(path):
                    continue  # Another user's file, or not a regular file.
                raise
            if not _is_own(file):
                logger.warning("ignored %s: other users own it or can write to it", path)
                os.close(file)
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                continue
            return path, file
    except OSError as error:
        raise ConfigError(f"DYN_KVBM_DISK_CACHE_DIR={directory!r}: {error.strerror}") from None
    raise ConfigError(
        f"DYN_KVBM_DISK_CACHE_DIR={directory!r}: used by {FILES_MAX} processes, or contains other users' files"
    )


def _is_own(file: int) -> bool:
    """Return whether only this user can have written the file, so that its blocks can be trusted."""
    found = os.fstat(file)
    return stat.S_ISREG(found.st_mode) and found.st_uid == user_id() and not found.st_mode & 0o022


def _runs(blocks: Sequence[Placed]) -> list[list[Placed]]:
    """Group adjacent slots."""
    runs: list[list[Placed]] = []
    for block in blocks:
        if runs and runs[-1][-1][0] + 1 == block[0] and len(runs[-1]) < TOGETHER_MAX:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs
