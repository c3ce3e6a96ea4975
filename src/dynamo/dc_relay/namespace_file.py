"""NamespaceFile: the selected namespaces in a JSON file that is read again when it changes.

    {"version": 1, "connectionRevision": "7", "sources": [{"namespace": "production-llama"}]}

`connectionRevision` is optional and must equal the relay's own. A file that becomes invalid leaves the selection as it
is.
"""

import hashlib
from pathlib import Path

import msgspec

from dynamo.core.codec import UNREADABLE, json_decoder
from dynamo.core.errors import ConfigError

FORMAT_VERSION = 1
POLL_INTERVAL_S = 1.0


class _NamespaceSource(msgspec.Struct, forbid_unknown_fields=True):
    namespace: str


class _NamespaceDocument(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    version: int
    sources: list[_NamespaceSource]
    connection_revision: str | None = None


_decode = json_decoder(_NamespaceDocument).decode


class NamespaceFile:
    """File of the selected namespaces."""

    def __init__(self, path: str, connection_revision: str | None) -> None:
        self._path = Path(path)
        self._connection_revision = connection_revision
        self.namespaces: frozenset[str] = frozenset()
        self.desired_revision: str | None = None
        self.applied_revision: str | None = None
        self.last_error: str | None = None

    def load(self) -> bool:
        """Read the file and return whether the selection changed. Raises `ConfigError` if it cannot be used."""
        try:
            content = self._path.read_bytes()
        except OSError as error:
            raise ConfigError(f"sources_file {self._path}: {error.strerror}") from None
        self.desired_revision = hashlib.sha256(content).hexdigest()
        if self.desired_revision == self.applied_revision:
            self.last_error = None
            return False
        before, self.namespaces = self.namespaces, self._read(content)
        self.applied_revision, self.last_error = self.desired_revision, None
        return self.namespaces != before

    def reload(self) -> bool:
        """Read the file again and return whether the selection changed; keep the selection if it cannot be used."""
        try:
            return self.load()
        except ConfigError as error:
            self.last_error = str(error)
            return False

    def _read(self, content: bytes) -> frozenset[str]:
        try:
            file = _decode(content)
        except UNREADABLE as error:
            raise ConfigError(f"sources_file {self._path}: {error}") from None
        if file.version != FORMAT_VERSION:
            raise ConfigError(f"sources_file {self._path}: version {file.version}: must be {FORMAT_VERSION}")
        if file.connection_revision != self._connection_revision:
            raise ConfigError(
                f"sources_file {self._path}: connectionRevision {file.connection_revision!r}: must be"
                f" {self._connection_revision!r}"
            )
        names = [source.namespace for source in file.sources]
        if not all(names) or len(set(names)) != len(names):
            raise ConfigError(f"sources_file {self._path}: namespaces must be different and not empty")
        return frozenset(names)
