"""WebSocket: messages over a connection that began as an HTTP request (RFC 6455), no extensions.

`MessageDecoder` is pure: bytes in, messages and control frames out. `WebSocket` takes the connection over from its
HTTP protocol, which stays responsible for what is counted of connections.
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
MESSAGE_BYTES_MAX = 16 << 20  # Minutes of sound; more in one message is a mistake.
CONTROL_BYTES_MAX = 125  # By the standard.
PING_S = 20.0  # Who says nothing for so long is asked whether it lives, and has as long again to answer.
CLOSE_S = 5.0  # For the client's own word after ours.


class Op(enum.IntEnum):
    """What a frame is."""

    CONTINUATION = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


OPS = frozenset(op.value for op in Op)


class Closing(enum.IntEnum):
    """Why a connection ends."""

    NORMAL = 1000
    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002
    NOT_UTF8 = 1007
    TOO_BIG = 1009


class ProtocolError(Exception):
    """The peer does not speak as it should; `code` is what it is told."""

    def __init__(self, code: Closing, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Message:
    """A whole message, or a control frame."""

    op: Op
    data: bytes


class MessageDecoder:
    """A client's frames, put together."""

    def __init__(self, bytes_max: int = MESSAGE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._data = bytearray()
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._op: Op | None = None
        """Of the message that has begun."""

    def feed(self, data: bytes) -> Iterator[Message]:
        """What is complete now. Raises `ProtocolError`."""
        self._data += data
        while (found := self._frame()) is not None:
            is_last, op, payload = found
            if op >= Op.CLOSE:
                yield Message(op, payload)
                continue
            if (op is Op.CONTINUATION) is (self._op is None):
                raise ProtocolError(Closing.PROTOCOL_ERROR, "a message begins within another, or goes on without one")
            self._op = self._op if op is Op.CONTINUATION else op
            self._parts.append(payload)
            self._parts_bytes += len(payload)
            if is_last:
                assert self._op is not None, "a message has a kind"
                whole, kind = b"".join(self._parts), self._op
                self._parts, self._parts_bytes, self._op = [], 0, None
                yield Message(kind, whole)

    def _frame(self) -> tuple[bool, Op, bytes] | None:
        """The next frame, taken out of the data; None until it is there."""
        data = self._data
        if len(data) < 2:
            return None
        first, second = data[0], data[1]
        if first & 0x70 or first & 0x0F not in OPS or not second & 0x80:
            raise ProtocolError(Closing.PROTOCOL_ERROR, "a frame is unmasked, of no known kind, or extended")
        op, size, start = Op(first & 0x0F), second & 0x7F, 2
        if op >= Op.CLOSE and (size > CONTROL_BYTES_MAX or not first & 0x80):
            raise ProtocolError(Closing.PROTOCOL_ERROR, "a control frame is too long, or one of several")
        if size >= 126:
            start += 2 if size == 126 else 8
            if len(data) < start:
                return None
            size = int.from_bytes(data[2:start], "big")
        if size + self._parts_bytes > self._bytes_max:
            raise ProtocolError(Closing.TOO_BIG, f"a message exceeds {self._bytes_max >> 20} MB")
        if len(data) < start + 4 + size:
            return None
        payload = unmasked(bytes(data[start + 4 : start + 4 + size]), bytes(data[start : start + 4]))
        del data[: start + 4 + size]
        return bool(first & 0x80), op, payload


def unmasked(data: bytes, mask: bytes) -> bytes:
    """The payload without its mask; the same puts it on. Whole numbers are quicker than a loop."""
    size = len(data)
    key = int.from_bytes((mask * (size // 4 + 1))[:size], "big")
    return (int.from_bytes(data, "big") ^ key).to_bytes(size, "big")


def frame(op: Op, data: bytes) -> bytes:
    """A server's frame: whole and unmasked."""
    size = len(data)
    if size < 126:
        return bytes((0x80 | op, size)) + data
    if size < 1 << 16:
        return bytes((0x80 | op, 126)) + size.to_bytes(2, "big") + data
    return bytes((0x80 | op, 127)) + size.to_bytes(8, "big") + data


def close_frame(code: int, reason: str) -> bytes:
    """The last frame."""
    return frame(Op.CLOSE, code.to_bytes(2, "big") + reason.encode()[: CONTROL_BYTES_MAX - 2])


def accept_key(exchange: Exchange) -> bytes | None:
    """What answers the client's key; None for a request that opens no WebSocket."""
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
    """Who hears a WebSocket. Everything is called on the loop."""

    def heard(self, message: Message) -> None:
        """A text or a binary message."""

    def closed(self) -> None:
        """The connection is over, whoever ended it; called once."""


class WebSocket(asyncio.Protocol):
    """An open connection. It is the tap of whoever reads its messages: see `RequestFrames`."""

    def __init__(self, exchange: Exchange, key: bytes, subprotocol: bytes | None = None) -> None:
        """Answers the handshake; from here on the connection is no HTTP."""
        self._http = exchange.protocol
        self._transport: Any = exchange.transport
        self._loop = asyncio.get_running_loop()
        self._decoder = MessageDecoder()
        self._listener: Listener | None = None
        self._is_closing = False
        self._is_over = False
        self._has_heard = True
        self._timer: asyncio.TimerHandle | None = None
        exchange.response_started = True
        head = (
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-accept: "
        )
        chosen = b"" if subprotocol is None else b"sec-websocket-protocol: %b\r\n" % subprotocol
        self._transport.write(head + key + b"\r\n" + chosen + exchange.header_bytes + b"\r\n")

    def listen(self, listener: Listener) -> None:
        """Tells what comes from now on."""
        self._listener = listener
        self._transport.set_protocol(self)
        self._timer = self._loop.call_later(PING_S, self._ask)

    # What is said.

    def send(self, text: bytes) -> None:
        """A text message; a client that does not read is cut."""
        if self._is_closing or self._is_over:
            return
        self._transport.write(frame(Op.TEXT, text))
        if self._transport.get_write_buffer_size() > self._http.limits.unsent_bytes:
            self._http.cut_slow_reader()

    def close(self, code: int = Closing.NORMAL, reason: str = "") -> None:
        """Says the last word; the connection ends when the client has said its own, or soon."""
        if self._is_closing or self._is_over:
            return
        self._is_closing = True
        self._transport.write(close_frame(code, reason))
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(CLOSE_S, self._transport.abort)

    def pause_reading(self) -> None:
        """Whoever reads the messages is behind."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Whoever reads the messages has caught up."""
        if not self._is_over and not self._transport.is_closing():
            self._transport.resume_reading()

    # What is heard.

    def data_received(self, data: bytes) -> None:
        """Some bytes of the client."""
        self._has_heard = True
        try:
            for message in self._decoder.feed(data):
                self._apply(message)
        except ProtocolError as error:
            logger.info("a WebSocket client does not speak as it should: %s", error)
            self.close(error.code, str(error))
            self._transport.close()

    def _apply(self, message: Message) -> None:
        if message.op is Op.PING:
            self._transport.write(frame(Op.PONG, message.data))
        elif message.op is Op.CLOSE:
            self.close(Closing.NORMAL)
            self._transport.close()
        elif message.op is not Op.PONG and not self._is_closing and self._listener is not None:
            self._listener.heard(message)

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is gone."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self._http.connection_lost(error)
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.closed()

    def pause_writing(self) -> None:
        """The client reads more slowly than is written: `send` watches how much waits."""

    def resume_writing(self) -> None:
        """It has caught up."""

    def _ask(self) -> None:
        if not self._has_heard:
            self._transport.abort()
            return
        self._has_heard = False
        self._transport.write(frame(Op.PING, b""))
        self._timer = self._loop.call_later(PING_S, self._ask)
