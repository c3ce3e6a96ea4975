"""AccessLog: one JSON line per request, in a file that `/reopen_logs` opens again after a rotation."""

import logging
from datetime import UTC, datetime
from io import TextIOWrapper

from dynamo.core.codec import json_encode
from dynamo.core.errors import ConfigError
from dynamo.runtime.json_service import Served

logger = logging.getLogger(__name__)


class AccessLog:
    """The access log file. Raises `ConfigError` if it cannot be opened."""

    def __init__(self, path: str, trace_id_header: str, *, is_local_time: bool = False) -> None:
        self._path = path
        self._header = trace_id_header.lower()
        self._is_local_time = is_local_time
        self._file = self._open()

    def _open(self) -> TextIOWrapper:
        try:
            return open(self._path, "a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError(f"--access-log {self._path}: {error.strerror}") from None

    def note(self, served: Served) -> None:
        """Write the line of a request. A write error is logged and does not affect the request."""
        now = datetime.now().astimezone() if self._is_local_time else datetime.now(UTC)
        line = {
            "time": now.isoformat(timespec="milliseconds"),
            "method": served.method,
            "path": served.route,
            "status": served.status,
            "duration_ms": round(served.seconds * 1e3, 3),
            "trace_id": served.headers.get(self._header),
        }
        try:
            self._file.write(json_encode(line).decode() + "\n")
        except OSError as error:
            logger.warning("--access-log %s: %s", self._path, error)

    def reopen(self) -> None:
        """Continue in a new file of the same name."""
        self._file.close()
        self._file = self._open()

    def close(self) -> None:
        self._file.close()
