"""HTTP connection to one etcd member for one request at a time or one stream."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Mapping

from dynamo.core.errors import Disconnected
from dynamo.core.http_client import Deadlines, HttpResponse
from dynamo.runtime.transports.etcd.options import Address
from dynamo.runtime.transports.etcd.protocol import EtcdUnavailable, refusal

UNLIMITED = Deadlines(0.0, None, None)  # Requests have a timeout as a whole; a watch is endless.
MESSAGE_BYTES_MAX = 64 << 20  # Page of a listing or message of a watch; etcd's own limit for a value is 1.5 MiB.
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 10, 5, 3
"""A watch may be silent for hours: the kernel detects a vanished peer within half a minute."""


class HttpConnection:
    """HTTP connection created by `open`. It is unusable after any error."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: Address) -> None:
        self._reader = reader
        self._writer = writer
        self._address = address
        self._busy = asyncio.Lock()

    @classmethod
    async def open(cls, address: Address, tls: ssl.SSLContext | None, timeout_s: float) -> "HttpConnection":
        """Connect. Raise `EtcdUnavailable`, or `ssl.SSLCertVerificationError` for an untrusted member."""
        context = tls if address.is_tls else None
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
        except TimeoutError:
            raise EtcdUnavailable(f"no connection within {timeout_s:.1f} s") from None
        except ssl.SSLCertVerificationError:
            raise
        except OSError as error:
            raise EtcdUnavailable(f"no connection: {_reason(error)}") from None
        _watch_the_other_end(writer)
        return cls(reader, writer, address)

    async def post(self, path: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> bytes:
        """Send one request and return the response body. Raise `EtcdRefused` or `EtcdUnavailable`."""
        response = HttpResponse(self._reader, UNLIMITED)
        try:
            async with asyncio.timeout(timeout_s), self._busy:
                await self._send_request(path, body, headers)
                await response.begin()
                content = await response.read(MESSAGE_BYTES_MAX)
        except TimeoutError:
            raise EtcdUnavailable(f"no response to {path} within {timeout_s:.1f} s") from None
        except (OSError, Disconnected) as error:
            raise _unavailable(error) from None
        finally:
            if not response.is_whole:  # The rest of this response must not be read as the next one.
                self.close()
        if response.status != 200:
            raise refusal(response.status, content)
        return content

    async def stream(self, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        """Send one request and yield the lines of its endless response. Raise `EtcdRefused` or `EtcdUnavailable`."""
        response = HttpResponse(self._reader, UNLIMITED)
        async with self._busy:
            try:
                await self._send_request(path, body, headers)
                await response.begin()
                if response.status != 200:
                    raise refusal(response.status, await response.read(MESSAGE_BYTES_MAX))
                unread = bytearray()
                while (part := await response.part()) is not None:
                    unread += part
                    while (end := unread.find(b"\n")) >= 0:
                        line = bytes(unread[:end])
                        del unread[: end + 1]
                        yield line
                    if len(unread) > MESSAGE_BYTES_MAX:
                        raise EtcdUnavailable(f"response of more than {MESSAGE_BYTES_MAX} bytes")
            except (OSError, Disconnected) as error:
                raise _unavailable(error) from None

    def close(self) -> None:
        """Abort the connection and its request."""
        self._writer.transport.abort()

    async def _send_request(self, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        lines = [f"POST {path} HTTP/1.1", f"Host: {self._address.host}:{self._address.port}"]
        lines += [f"Content-Length: {len(body)}", "Content-Type: application/json"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await self._writer.drain()


def _unavailable(error: OSError | Disconnected) -> EtcdUnavailable:
    """Return the error of a member whose connection broke, or whose response is unusable."""
    return EtcdUnavailable(str(error) if isinstance(error, Disconnected) else f"connection lost: {_reason(error)}")


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"{error.reason or error} (ETCD_AUTH_CA, ETCD_AUTH_CLIENT_CERT, ETCD_AUTH_CLIENT_KEY)"
    return error.strerror or str(error)


def _watch_the_other_end(writer: asyncio.StreamWriter) -> None:
    plug = writer.get_extra_info("socket")
    options = {
        "SO_KEEPALIVE": (socket.SOL_SOCKET, 1),
        "TCP_KEEPIDLE": (socket.IPPROTO_TCP, KEEPALIVE_IDLE_S),
        "TCP_KEEPINTVL": (socket.IPPROTO_TCP, KEEPALIVE_INTERVAL_S),
        "TCP_KEEPCNT": (socket.IPPROTO_TCP, KEEPALIVE_PROBES),
    }
    for name, (level, value) in options.items():
        if hasattr(socket, name):  # Not available on every platform.
            with contextlib.suppress(OSError):
                plug.setsockopt(level, getattr(socket, name), value)
