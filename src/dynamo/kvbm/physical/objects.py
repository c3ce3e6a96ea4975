"""Objects: blocks in an object store that many workers share, each under its hash.

The store is opaque: blocks are written, read and looked up by name, and never deleted here. Every call has a deadline.
"""

import os
import tempfile
from typing import Protocol

import numpy as np

from dynamo.core.boundaries import Rollback
from dynamo.core.errors import ConfigError
from dynamo.core.locked_directory import remove_abandoned_files
from dynamo.core.private_paths import unlink_all
from dynamo.kvbm.logical.blocks import BlockIdentity
from dynamo.kvbm.physical.layout import (
    HEADER_BYTES,
    BlockLayout,
    Bytes,
    CorruptBlock,
    pack_header,
    unpack_header,
)

UNFINISHED = ".unfinished"
"""Directory for objects being written; on the same file system, so that they can be renamed into place."""
NEW = "new-"
ABANDONED_S = 3600.0  # Writing an object takes less than a second: older files were left by killed processes.


class ObjectFailure(Exception):
    """The object store timed out or returned an error."""


class ObjectStore(Protocol):
    """Bytes by name. All methods raise `ObjectFailure`, and return within about `timeout_s`."""

    def put(self, name: str, parts: tuple[bytes, memoryview], timeout_s: float) -> None:
        """Write an object atomically; an existing object is left unchanged."""

    def get(self, name: str, size: int, timeout_s: float) -> bytes | None:
        """Return an object of at most `size` bytes; None if it does not exist."""

    def has(self, name: str, timeout_s: float) -> bool:
        """Return whether an object exists."""

    def close(self) -> None:
        """Close the connections."""


class LocalObjects:
    """Object store in a local or network directory; its deadlines are those of the file system."""

    def __init__(self, directory: str) -> None:
        """Raise `ConfigError` for an unusable directory."""
        self._directory = directory
        try:
            self._unfinished = os.path.join(directory, UNFINISHED)
            os.makedirs(self._unfinished, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"object store {directory!r}: {error.strerror}") from None
        remove_abandoned_files(self._unfinished, NEW, ABANDONED_S)

    def put(self, name: str, parts: tuple[bytes, memoryview], timeout_s: float) -> None:
        path = os.path.join(self._directory, name)
        if os.path.exists(path):
            return
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            file, temporary = tempfile.mkstemp(dir=self._unfinished, prefix=NEW)
            with Rollback(lambda: unlink_all(temporary)):
                with os.fdopen(file, "wb") as out:
                    out.writelines(parts)
                os.replace(temporary, path)
        except OSError as error:
            raise ObjectFailure(f"{path}: {error.strerror}") from error

    def get(self, name: str, size: int, timeout_s: float) -> bytes | None:
        path = os.path.join(self._directory, name)
        try:
            with open(path, "rb") as file:
                return file.read(size)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ObjectFailure(f"{path}: {error.strerror}") from error

    def has(self, name: str, timeout_s: float) -> bool:
        return os.path.exists(os.path.join(self._directory, name))

    def close(self) -> None: ...


class ObjectBlocks:
    """Blocks as objects: header and bytes, named by the layout's fingerprint and the block's hash."""

    def __init__(self, store: ObjectStore, layout: BlockLayout, timeout_s: float) -> None:
        self.store = store
        self.layout = layout
        self.timeout_s = timeout_s
        self._fingerprint = layout.fingerprint

    def name(self, sequence_hash: int) -> str:
        return f"{self._fingerprint:016x}/{sequence_hash:016x}"

    def write(self, identity: BlockIdentity, data: Bytes) -> int:
        """Write a block and return the number of bytes written. Raise `ObjectFailure`."""
        header = pack_header(identity, data, self._fingerprint)
        self.store.put(self.name(identity.sequence_hash), (header, data.data), self.timeout_s)
        return len(header) + data.nbytes

    def read(self, sequence_hash: int, data: Bytes, timeout_s: float) -> int:
        """Read a block into `data`; return the number of bytes, 0 if it does not exist. Raise `ObjectFailure`, `CorruptBlock`."""
        size = HEADER_BYTES + data.nbytes
        found = self.store.get(self.name(sequence_hash), size + 1, min(timeout_s, self.timeout_s))
        if found is None:
            return 0
        if len(found) != size:
            raise CorruptBlock(f"wrong size: {len(found)} bytes, expected {size}")
        header = unpack_header(found[:HEADER_BYTES], self._fingerprint)
        bytes_found = np.frombuffer(found, np.uint8, offset=HEADER_BYTES)
        header.check(bytes_found, sequence_hash)
        data[:] = bytes_found
        return size
