"""WebSocket: messages over a connection that began as an HTTP request, with the protocol of `websockets`.

`WebSocket` takes the connection over from its HTTP protocol, which still maintains the metrics of the connection. The library
is imported for the first WebSocket: most frontends never have one.
"""

import asyncio
import base64
import binascii
import enum
import hashlib
import logging
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from dynamo.http.server.exchange import Exchange
from dynamo.http.server.long_frames import LONG_BYTES, LongFrames
from dynamo.http.server.paced_input import InputTurns, PacedInput

if TYPE_CHECKING:
    from websockets.frames import Frame

logger = logging.getLogger(__name__)

MESSAGE_BYTES_MAX = 16 << 20  # Minutes of sound; a longer message is an error.
SLICE_BYTES_MIN, SLICE_BYTES_MAX = 512, 4 << 10
"""Bytes parsed at a time: the smaller ones contain 85 empty frames, the larger ones are used while frames are large."""
FEW_FRAMES = 4
REASON_BYTES_MAX = 123  # Limit of the standard.
PING_S = 20.0  # Interval of pings; a client that is silent for one interval after a ping is disconnected.
CLOSE_S = 5.0  # Maximum wait for the client's close frame after the server's.

ACCEPT_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3.

_protocol_logger = logging.getLogger(f"{__name__}.protocol")
_protocol_logger.setLevel(logging.INFO)  # At DEBUG it would log the content of requests.


class Op(enum.IntEnum):
    """Opcodes of RFC 6455."""

    CONT = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


class Closing(enum.IntEnum):
    """Close codes."""

    NORMAL = 1000
    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002
    NOT_UTF8 = 1007
    TOO_BIG = 1009


class WebSocketMessage(Struct, frozen=True):
    """A complete message."""

    op: Op
    data: bytes | bytearray


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
    return base64.b64encode(hashlib.sha1(key + ACCEPT_GUID, usedforsecurity=False).digest())


class WebSocketListener(Protocol):
    """Receiver of a WebSocket's messages. All methods are called on the loop."""

    def on_message(self, message: WebSocketMessage) -> None:
        """Handle a text or a binary message."""

    def on_close(self) -> None:
        """Handle the end of the connection, on either side; called once."""


class WebSocket(asyncio.Protocol):
    """An open connection. Readers use it for flow control: see `RequestFrames`."""

    def __init__(self, exchange: Exchange, key: bytes, subprotocol: bytes | None = None) -> None:
        """Complete the handshake; from here on the connection is no longer HTTP."""
        from websockets.frames import Frame
        from websockets.protocol import OPEN, SERVER
        from websockets.protocol import Protocol as WebSocketProtocol

        self._frame_type, self._open_state = Frame, OPEN
        self._http = exchange.protocol
        self._transport: Any = exchange.transport
        self._loop = asyncio.get_running_loop()
        self._protocol = WebSocketProtocol(SERVER, max_size=MESSAGE_BYTES_MAX, logger=_protocol_logger)
        self._frames = LongFrames(MESSAGE_BYTES_MAX)
        self._op = Op.TEXT
        """Opcode of the message whose frames are being received."""
        self._data = bytearray()
        """Data of that message."""
        self._listener: WebSocketListener | None = None
        self._is_closing = False
        """Whether this side has begun to close."""
        self._is_over = False
        self._has_received = True
        self._paused_by: set[str] = set()
        """Consumers of the messages that are behind."""
        self._is_held = False
        """Whether received data waits to be parsed."""
        self._slice_bytes = SLICE_BYTES_MIN
        self._input = PacedInput(self, self._http.turns or InputTurns())
        self._timer: asyncio.TimerHandle | None = None
        exchange.response_started = True
        head = (
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-accept: "
        )
        chosen = b"" if subprotocol is None else b"sec-websocket-protocol: %b\r\n" % subprotocol
        self._transport.write(head + key + b"\r\n" + chosen + exchange.header_bytes + b"\r\n")

    def listen(self, listener: WebSocketListener) -> None:
        """Forward messages to the listener from now on."""
        self._listener = listener
        self._transport.set_protocol(self)
        self._timer = self._loop.call_later(PING_S, self._ping)

    # Sending.

    def send(self, text: bytes) -> None:
        """Send a text message; disconnect a client that does not read."""
        if not self._is_open:
            return
        self._protocol.send_text(text)
        self._write()
        if self._transport.get_write_buffer_size() > self._http.limits.unsent_bytes:
            self._http.cut_slow_reader()

    def close(self, code: int = Closing.NORMAL, reason: str = "") -> None:
        """Send a close frame; the connection ends after the client's close frame, or after `CLOSE_S`."""
        if not self._is_open:
            return
        self._is_closing = True
        self._protocol.send_close(code, reason.encode()[:REASON_BYTES_MAX].decode(errors="ignore"))
        self._write()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(CLOSE_S, self._transport.abort)

    @property
    def _is_open(self) -> bool:
        return not self._is_over and self._protocol.state is self._open_state

    def _write(self) -> None:
        """Write the protocol's output: frames, and an empty part where the connection is to be closed."""
        for data in self._protocol.data_to_send():
            if data:
                self._transport.write(data)
            else:
                self._transport.close()

    def pause_reading(self, consumer: str = "") -> None:
        """Stop reading because a consumer of the messages is behind."""
        self._paused_by.add(consumer)
        self._transport.pause_reading()

    def resume_reading(self, consumer: str = "") -> None:
        """Read again once every consumer of the messages has caught up."""
        self._paused_by.discard(consumer)
        if not self._paused_by:
            self._input.resume()
            self._read_again()

    def _read_again(self) -> None:
        if not (self._paused_by or self._is_held or self._is_over or self._transport.is_closing()):
            self._transport.resume_reading()

    # Receiving.

    def data_received(self, data: bytes) -> None:
        """Process data of the client, in slices: it may contain very many frames."""
        self._has_received = True
        self._input.add(data)

    def is_ready(self) -> bool:
        """Return whether further frames may be processed."""
        return not self._paused_by

    def slice_bytes(self) -> int:
        """Return the number of bytes to process next; those of a long frame are one fragment."""
        return max(self._slice_bytes, min(self._frames.rest_of_long, LONG_BYTES))

    def hold_reading(self) -> None:
        """Read no more data until all is processed."""
        self._is_held = True
        self._transport.pause_reading()

    def release_reading(self) -> None:
        """Read again, unless the consumer is behind."""
        if self._is_held:
            self._is_held = False
            self._read_again()

    def feed(self, data: bytes) -> None:
        """Process data; the protocol responds to pings, close frames and violations of the standard."""
        was_open = self._is_open
        self._protocol.receive_data(self._frames.split(data))
        frames = [event for event in self._protocol.events_received() if isinstance(event, self._frame_type)]
        is_few = len(frames) <= FEW_FRAMES
        self._slice_bytes = min(self._slice_bytes * 2, SLICE_BYTES_MAX) if is_few else SLICE_BYTES_MIN
        for frame in frames:
            self._apply(frame)
        if was_open and self._protocol.parser_exc is not None:
            logger.info("closing WebSocket: protocol error by the client: %s", self._protocol.parser_exc)
        self._write()

    def _apply(self, frame: "Frame") -> None:
        """Add a data frame to its message; the protocol has checked the order and the total size of the frames."""
        op = Op(frame.opcode)
        if op not in (Op.TEXT, Op.BINARY, Op.CONT):
            return
        if op is not Op.CONT:
            self._op = op
        if frame.fin and not self._data:
            message = WebSocketMessage(
                self._op, bytes(frame.data)
            )  # Of bytes this is no copy: a long one takes milliseconds.
        else:
            self._data += frame.data
            if not frame.fin:
                return
            message, self._data = WebSocketMessage(self._op, self._data), bytearray()
        if self._listener is not None and not self._is_closing:
            self._listener.on_message(message)

    def connection_lost(self, error: Exception | None) -> None:
        """End the connection and notify the listener."""
        self._is_over = True
        self._input.close()
        self._paused_by.clear()
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
        self._protocol.send_ping(b"")
        self._write()
        self._timer = self._loop.call_later(PING_S, self._ping)
