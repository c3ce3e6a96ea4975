"""S3: an object store over HTTP, with the operations that blocks and files need: put if absent, get, head."""

import hashlib
import http.client
import ssl
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import BinaryIO
from urllib.parse import quote, urlsplit

from dynamo.core.errors import ConfigError
from dynamo.kvbm.physical.objects import ObjectFailure
from dynamo.kvbm.physical.sigv4 import EMPTY_SHA256, Credentials, signed

READ_BYTES = 1 << 18  # Bytes read between two checks of the deadline.


class S3Objects:
    """One bucket, with path-style addresses. Each thread keeps one connection."""

    def __init__(
        self,
        endpoint: str,
        bucket: str,
        credentials: Credentials,
        *,
        wall_clock: Callable[[], float] = time.time,
        variable: str = "DYN_KVBM_OBJECT_ENDPOINT",
    ) -> None:
        """Raise `ConfigError` for an invalid endpoint, naming its variable `variable`."""
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{variable}={endpoint!r}: must be http(s)://host[:port] or file:///path")
        if not bucket:
            raise ConfigError("DYN_KVBM_OBJECT_BUCKET: must be set to the bucket's name")
        self._is_secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._authority = parts.netloc.rsplit("@", 1)[-1]
        self._prefix = f"{parts.path.rstrip('/')}/{bucket}"
        self._credentials = credentials
        self._wall_clock = wall_clock
        self._local = threading.local()
        self._lock = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()

    def put(self, name: str, parts: tuple[bytes, memoryview], timeout_s: float) -> None:
        body = b"".join(parts)
        status, _ = self._request("PUT", name, timeout_s, body, {"if-none-match": "*"})
        if status not in (HTTPStatus.OK, HTTPStatus.CREATED, HTTPStatus.PRECONDITION_FAILED, HTTPStatus.CONFLICT):
            raise ObjectFailure(f"PUT {name}: status {status}")

    def get(self, name: str, size: int, timeout_s: float) -> bytes | None:
        status, body = self._request("GET", name, timeout_s, size=size)
        if status == HTTPStatus.NOT_FOUND:
            return None
        if status != HTTPStatus.OK:
            raise ObjectFailure(f"GET {name}: status {status}")
        return body

    def download(self, name: str, file: BinaryIO, size: int, timeout_s: float) -> bool:
        """Download an object of at most `size` bytes to a file; return False if none exists. Raise `ObjectFailure`."""
        status, _ = self._request("GET", name, timeout_s, size=size, into=file)
        if status not in (HTTPStatus.OK, HTTPStatus.NOT_FOUND):
            raise ObjectFailure(f"GET {name}: status {status}")
        return status == HTTPStatus.OK

    def has(self, name: str, timeout_s: float) -> bool:
        status, _ = self._request("HEAD", name, timeout_s)
        if status not in (HTTPStatus.OK, HTTPStatus.NOT_FOUND):
            raise ObjectFailure(f"HEAD {name}: status {status}")
        return status == HTTPStatus.OK

    def close(self) -> None:
        with self._lock:
            for connection in self._open:
                connection.close()
            self._open.clear()

    def _request(
        self,
        method: str,
        name: str,
        timeout_s: float,
        body: bytes | None = None,
        more: dict[str, str] | None = None,
        size: int = 1 << 16,
        into: BinaryIO | None = None,
    ) -> tuple[int, bytes]:
        """Send one request; retry once if a kept connection was closed. Raise `ObjectFailure`."""
        deadline = time.monotonic() + timeout_s
        for is_last in (False, True):
            connection, is_fresh = self._connection(max(0.001, deadline - time.monotonic()))
            try:
                return self._exchange(connection, method, f"{self._prefix}/{name}", body, more, size, deadline, into)
            except (OSError, http.client.HTTPException) as error:
                self._drop(connection)
                is_stale = not is_fresh and isinstance(error, http.client.RemoteDisconnected | ConnectionError)
                if is_last or not is_stale:
                    raise ObjectFailure(f"{method} {name}: {error or type(error).__name__}") from error
        raise AssertionError("unreachable: the second try returns or raises")

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes | None,
        more: dict[str, str] | None,
        size: int,
        deadline: float,
        into: BinaryIO | None,
    ) -> tuple[int, bytes]:
        """Return the status and body of the response; a successful body is written to `into` if given."""
        digest = EMPTY_SHA256 if body is None else hashlib.sha256(body).hexdigest()
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._wall_clock()))
        headers = {"host": self._authority, **(more or {})}
        headers = signed(method, path, headers, digest, self._credentials, stamp)
        connection.request(method, quote(path, safe="/-_.~"), body, headers)
        response = connection.getresponse()
        announced = None if method == "HEAD" else response.length
        if into is not None:
            into.seek(0)
            into.truncate()
        pieces: list[bytes] = []
        read = 0
        while piece := response.read(READ_BYTES):
            read += len(piece)
            if into is not None and response.status == HTTPStatus.OK:
                into.write(piece)
            else:
                pieces.append(piece)
            if read > size:
                raise http.client.HTTPException(f"more than {size} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError("response not complete before the deadline")
        if announced is not None and read != announced:
            raise http.client.HTTPException(f"truncated response: {read} of {announced} bytes")
        return response.status, b"".join(pieces)

    def _connection(self, timeout_s: float) -> tuple[http.client.HTTPConnection, bool]:
        """Return the connection of the current thread, and whether it is new."""
        known: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if known is not None and known.sock is not None:
            known.sock.settimeout(timeout_s)
            return known, False
        fresh: http.client.HTTPConnection
        if self._is_secure:
            fresh = http.client.HTTPSConnection(
                self._host, self._port, timeout=timeout_s, context=ssl.create_default_context()
            )
        else:
            fresh = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        self._local.connection = fresh
        with self._lock:
            self._open.add(fresh)
        return fresh, True

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        connection.close()
        self._local.connection = None
        with self._lock:
            self._open.discard(connection)
