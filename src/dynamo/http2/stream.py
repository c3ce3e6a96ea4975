"""Http2Stream: one stream of a connection, from its request headers to its end, with its flow control. Pure.

What is written waits in the stream until the windows of stream and connection allow it. What is received is acknowledged
by `consumed`, so that a peer sends no more than a window ahead of its reader.
"""

from typing import Protocol

from dynamo.http2 import frames
from dynamo.http2.frames import ErrorCode, Http2Error

WINDOW_BYTES = 256 << 10
"""Bytes that a peer may send on a stream ahead of its reader."""
UNSENT_BYTES_MAX = 256 << 10
"""Bytes that wait in a stream before its writer has to wait."""


class StreamUser(Protocol):
    """Receives what arrives on one stream. Calls must not raise, except `Http2Error` for the connection's end."""

    def data_received(self, data: bytes, ends: bool) -> None:
        """Handle data; `ends`: the peer sends no more."""
        ...

    def reset_received(self) -> None:
        """Handle the peer's reset, or the loss of the connection."""
        ...

    def drained(self) -> None:
        """Continue writing."""
        ...


class StreamOwner(Protocol):
    """What a stream needs of its connection."""

    window: int
    """Bytes that the connection may still send."""
    frame_bytes_max: int

    def send(self, data: bytes) -> None:
        """Send frames."""
        ...

    def header_block(self, block: bytes) -> bytes:
        """Return a block with what the peer expects before it."""
        ...

    def closed(self, stream: "Http2Stream") -> None:
        """Forget a stream."""
        ...


class Http2Stream:
    """One stream, as its server sees it."""

    __slots__ = (
        "_consumed", "_ending", "_is_over", "_owner", "_receivable", "has_ended", "number", "unsent", "user", "window",
    )  # fmt: skip

    def __init__(self, number: int, owner: StreamOwner, window: int) -> None:
        self.number = number
        self.user: StreamUser | None = None
        self.window = window
        """Bytes that the stream may still send; negative after the peer made its windows smaller."""
        self.unsent = bytearray()
        self.has_ended = False
        """Whether the peer sends no more."""
        self._owner = owner
        self._ending: bytes | None = None
        """Last header block, until all data is sent."""
        self._is_over = False
        self._receivable = WINDOW_BYTES
        self._consumed = 0

    @property
    def is_congested(self) -> bool:
        """Whether a writer should wait for `drained`."""
        return len(self.unsent) > UNSENT_BYTES_MAX

    # Writing.

    def send_headers(self, block: bytes) -> None:
        """Send the response's headers."""
        if not self._is_over:
            self._send_block(block, 0)

    def send_data(self, data: bytes) -> None:
        """Send data, now or when the windows allow it. Nothing is sent on a stream that is over."""
        if self._is_over:
            return
        size, owner = len(data), self._owner
        if not self.unsent and size <= self.window and size <= owner.window and size <= owner.frame_bytes_max:
            self.window -= size
            owner.window -= size
            owner.send(frames.frame(frames.DATA, 0, self.number, data))
        else:
            self.unsent += data
            self.flush()

    def end(self, block: bytes) -> None:
        """Send a last header block after all data; the stream is over then."""
        if not self._is_over:
            self._ending = block
            self.flush()

    def reset(self, code: ErrorCode) -> None:
        """End the stream at once."""
        if not self._is_over:
            self._owner.send(frames.reset_frame(self.number, code))
            self._close()

    def flush(self) -> None:
        """Send what the windows allow."""
        owner, unsent = self._owner, self.unsent
        while unsent:
            size = min(len(unsent), self.window, owner.window, owner.frame_bytes_max)
            if size <= 0:
                return
            owner.send(frames.frame(frames.DATA, 0, self.number, bytes(unsent[:size])))
            del unsent[:size]
            self.window -= size
            owner.window -= size
        if self._ending is not None:
            self._send_block(self._ending, frames.END_STREAM)
            if not self.has_ended:  # The peer need not send the rest of its request.
                owner.send(frames.reset_frame(self.number, ErrorCode.NO_ERROR))
            self._close()

    def _send_block(self, block: bytes, flags: int) -> None:
        """Send a header block; blocks of this server are shorter than a frame."""
        block = self._owner.header_block(block)
        self._owner.send(frames.frame(frames.HEADERS, flags | frames.END_HEADERS, self.number, block))

    def _close(self) -> None:
        self._is_over = True
        self._ending = None
        self.user = None  # Stream and user refer to each other: without this, only the garbage collector frees them.
        self.unsent.clear()
        self._owner.closed(self)

    # Receiving.

    def received(self, payload_bytes: int, data: bytes, *, ends: bool) -> None:
        """Handle data of a frame whose payload has `payload_bytes`. Raise `Http2Error` for more than the window."""
        self._receivable -= payload_bytes
        if self._receivable < 0:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, f"stream {self.number}: more data than its window")
        padding = payload_bytes - len(data)
        if padding:
            self.consumed(padding)
        self.has_ended = self.has_ended or ends
        if self.user is not None:
            self.user.data_received(data, ends)

    def consumed(self, size: int) -> None:
        """Let the peer send further data in place of `size` bytes that were read."""
        self._consumed += size
        if self._consumed * 2 >= WINDOW_BYTES and not self.has_ended and not self._is_over:
            self._receivable += self._consumed
            self._owner.send(frames.window_update(self.number, self._consumed))
            self._consumed = 0

    def lost(self) -> None:
        """End the stream without a frame: the peer reset it, or the connection is lost."""
        user = self.user
        if not self._is_over:
            self._close()
        if user is not None:
            user.reset_received()
