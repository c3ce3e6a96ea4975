"""WebSocket: messages over a connection that began as an HTTP request (RFC 6455), no extensions.

`MessageDecoder` is pure: bytes in, messages and control frames out. `WebSocket` takes the connection over from its
HTTP protocol, which still maintains the metrics of the connection.
"""

import asyncio
import base64
import binascii
import enum
import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from dynamo.http.server.protocol import Exchange

logger = logging.getLogger(__name__)

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
MESSAGE_BYTES_MAX = 16 << 20  # Minutes of sound; a longer message is an error.
CONTROL_BYTES_MAX = 125  # Limit of the standard.
PING_S = 20.0  # Interval of pings; a client that is silent for one interval after a ping is disconnected.
CLOSE_S = 5.0  # Maximum wait for the client's close frame after the server's.


class Op(enum.IntEnum):
    """Opcodes of frames."""

    CONTINUATION = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


OPS = frozenset(op.value for op in Op)


class Closing(enum.IntEnum):
    """Close codes."""

    NORMAL = 1000
    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002
    NOT_UTF8 = 1007
    TOO_BIG = 1009


class ProtocolError(Exception):
    """Violation of the protocol by the peer; `code` is the close code to send."""

    def __init__(self, code: Closing, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Message:
    """A complete message, or a control frame."""

    op: Op
    data: bytes


class MessageDecoder:
    """Decoder of a client's frames, which assembles messages."""

    def __init__(self, bytes_max: int = MESSAGE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._data = bytearray()
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._op: Op | None = None
        """Opcode of the message that has begun."""

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that are complete. Raise `ProtocolError`."""
        self._data += data
        while (found := self._frame()) is not None:
            is_last, op, payload = found
            if op >= Op.CLOSE:
                yield Message(op, payload)
                continue
            if (op is Op.CONTINUATION) is (self._op is None):
                raise ProtocolError(
                    Closing.PROTOCOL_ERROR,
                    "data frame out of order: new message within another, or no message to continue",
                )
            self._op = self._op if op is Op.CONTINUATION else op
            self._parts.append(payload)
            self._parts_bytes += len(payload)
            if is_last:
                assert self._op is not None, "a message has an opcode"
                whole, kind = b"".join(self._parts), self._op
                self._parts, self._parts_bytes, self._op = [], 0, None
                yield Message(kind, whole)

    def _frame(self) -> tuple[bool, Op, bytes] | None:
        """Return the next frame and remove it from the data; None if it is incomplete."""
        data = self._data
        if len(data) < 2:
            return None
        first, second = data[0], data[1]
        if first & 0x70 or first & 0x0F not in OPS or not second & 0x80:
            raise ProtocolError(
                Closing.PROTOCOL_ERROR, "frame is unmasked, has an unknown opcode, or uses an extension"
            )
        op, size, start = Op(first & 0x0F), second & 0x7F, 2
        if op >= Op.CLOSE and (size > CONTROL_BYTES_MAX or not first & 0x80):
            raise ProtocolError(Closing.PROTOCOL_ERROR, "control frame is too long or fragmented")
        if size >= 126:
            start += 2 if size == 126 else 8
            if len(data) < start:
                return None
            size = int.from_bytes(data[2:start], "big")
        if size + self._parts_bytes > self._bytes_max:
            raise ProtocolError(Closing.TOO_BIG, f"message exceeds {self._bytes_max >> 20} MB")
        if len(data) < start + 4 + size:
            return None
        payload = unmasked(bytes(data[start + 4 : start + 4 + size]), bytes(data[start : start + 4]))
        del data[: start + 4 + size]
        return bool(first & 0x80), op, payload


def unmasked(data: bytes, mask: bytes) -> bytes:
    """Return the payload with the mask removed, or applied: the operation is its own inverse. Faster than a loop."""
    size = len(data)
    key = int.from_bytes((mask * (size // 4 + 1))[:size], "big")
    return (int.from_bytes(data, "big") ^ key).to_bytes(size, "big")


def frame(op: Op, data: bytes) -> bytes:
    """Return a server's frame: complete and unmasked."""
    size = len(data)
    if size < 126:
        return bytes((0x80 | op, size)) + data
    if size < 1 << 16:
        return bytes((0x80 | op, 126)) + size.to_bytes(2, "big") + data
    return bytes((0x80 | op, 127)) + size.to_bytes(8, "big") + data


def close_frame(code: int, reason: str) -> bytes:
    """Return a close frame."""
    return frame(Op.CLOSE, code.to_bytes(2, "big") + reason.encode()[: CONTROL_BYTES_MAX - 2])


def accept_key(exchange: Exchange) -> bytes | None:
    """Return the accept value for the client's key; None for a request that opens no WebSocket."""
    words = (exchange.header(b"connection") or b"").lower().split(b",")
    if b"upgrade" not in [word.strip() for word in words]:
        return None
    if (exchange.header(b"upgrade") or b"").lower() != b"websocket":
        return None
    key = exchange.header(b"sec-websocket-key") or b""
    try:
        is_key = len(base64.b64decode(key, validate=True)) == 16
    except (binascii.Error, ValueError):
        return None
    if not is_key or exchange.header(b"sec-websocket-version") != b"13":
        return None
    return base64.b64encode(hashlib.sha1(key + GUID, usedforsecurity=False).digest())


class Listener(Protocol):
    """Receiver of a WebSocket's messages. All methods are called on the loop."""

    def on_message(self, message: Message) -> None:
        """Handle a text or a binary message."""

    def on_close(self) -> None:
        """Handle the end of the connection, on either side; called once."""


class WebSocket(asyncio.Protocol):
    """An open connection. Readers use it for flow control: see `RequestFrames`."""

    def __init__(self, exchange: Exchange, key: bytes, subprotocol: bytes | None = None) -> None:
        """Complete the handshake; from here on the connection is no longer HTTP."""
        self._http = exchange.protocol
        self._transport: Any = exchange.transport
        self._loop = asyncio.get_running_loop()
        self._decoder = MessageDecoder()
        self._listener: Listener | None = None
        self._is_closing = False
        self._is_over = False
        self._has_received = True
        self._timer: asyncio.TimerHandle | None = None
        exchange.response_started = True
        head = (
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-accept: "
        )
        chosen = b"" if subprotocol is None else b"sec-websocket-protocol: %b\r\n" % subprotocol
        self._transport.write(head + key + b"\r\n" + chosen + exchange.header_bytes + b"\r\n")

    def listen(self, listener: Listener) -> None:
        """Forward messages to the listener from now on."""
        self._listener = listener
        self._transport.set_protocol(self)
        self._timer = self._loop.call_later(PING_S, self._ping)

    # Sending.

    def send(self, text: bytes) -> None:
        """Send a text message; disconnect a client that does not read."""
        if self._is_closing or self._is_over:
            return
        self._transport.write(frame(Op.TEXT, text))
        if self._transport.get_write_buffer_size() > self._http.limits.unsent_bytes:
            self._http.cut_slow_reader()

    def close(self, code: int = Closing.NORMAL, reason: str = "") -> None:
        """Send a close frame; the connection ends after the client's close frame, or after `CLOSE_S`."""
        if self._is_closing or self._is_over:
            return
        self._is_closing = True
        self._transport.write(close_frame(code, reason))
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(CLOSE_S, self._transport.abort)

    def pause_reading(self) -> None:
        """Stop reading because the consumer of the messages is behind."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again because the consumer of the messages has caught up."""
        if not self._is_over and not self._transport.is_closing():
            self._transport.resume_reading()

    # Receiving.

    def data_received(self, data: bytes) -> None:
        """Decode data of the client."""
        self._has_received = True
        try:
            for message in self._decoder.feed(data):
                self._apply(message)
        except ProtocolError as error:
            logger.info("closing WebSocket: protocol error by the client: %s", error)
            self.close(error.code, str(error))
            self._transport.close()

    def _apply(self, message: Message) -> None:
        if message.op is Op.PING:
            self._transport.write(frame(Op.PONG, message.data))
        elif message.op is Op.CLOSE:
            self.close(Closing.NORMAL)
            self._transport.close()
        elif message.op is not Op.PONG and not self._is_closing and self._listener is not None:
            self._listener.on_message(message)

    def connection_lost(self, error: Exception | None) -> None:
        """End the connection and notify the listener."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self._http.connection_lost(error)
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.on_close()

    def pause_writing(self) -> None:
        """Do nothing: `send` checks the number of unsent bytes."""

    def resume_writing(self) -> None:
        """Do nothing: `send` checks the number of unsent bytes."""

    def _ping(self) -> None:
        if not self._has_received:
            self._transport.abort()
            return
        self._has_received = False
        self._transport.write(frame(Op.PING, b""))
        self._timer = self._loop.call_later(PING_S, self._ping)
