"""Http2Connection: the server's side of one HTTP/2 connection (RFC 9113), without I/O.

`receive` takes bytes and calls the user of each stream; frames to send are passed to `send`. An `Http2Error` of `receive` ends the
connection, after its GOAWAY. Limits bound what a peer may cause: streams, size of headers, frames per block.
"""

from collections.abc import Callable
from typing import NamedTuple

from dynamo.http2 import frames
from dynamo.http2.frames import ErrorCode, Http2Error
from dynamo.http2.header_blocks import EMPTY_TABLE, HEADERS_BYTES_MAX, HeaderDecoder, RequestHeaders
from dynamo.http2.stream import WINDOW_BYTES, Http2Stream

CONNECTION_WINDOW_BYTES = 16 << 20
"""Bytes that a peer may send on all streams between two acknowledgements."""
STREAMS_MAX = 8192
"""Concurrent streams of a connection; a gateway opens further connections."""
BLOCK_FRAMES_MAX = 16
"""Frames of one header block: more are an attack on the decoder."""


class _Block(NamedTuple):
    """Header block whose frames are not complete."""

    stream: int
    ends: bool
    parts: list[bytes]


class Http2Connection:
    """One connection."""

    def __init__(self, accept: Callable[[Http2Stream, RequestHeaders], None], send: Callable[[bytes], None]) -> None:
        """`accept` sets the user of a new stream, or answers or resets it."""
        self._accept = accept
        self.send = send
        self.streams: dict[int, Http2Stream] = {}
        self.window = frames.WINDOW_DEFAULT
        self.frame_bytes_max = frames.FRAME_BYTES_MIN
        self.has_begun = False
        """Whether the peer has sent the preface."""
        self._buffer = b""
        self._initial_window = frames.WINDOW_DEFAULT
        self._decoder = HeaderDecoder()
        self._block: _Block | None = None
        self._last = 0
        self._unacknowledged = 0
        self._is_going_away = False
        self._must_empty_table = False
        self._kinds: dict[int, Callable[[int, int, bytes], None]] = {
            frames.DATA: self._data,
            frames.HEADERS: self._headers,
            frames.PRIORITY: self._ignored,
            frames.RST_STREAM: self._reset,
            frames.SETTINGS: self._settings,
            frames.PUSH_PROMISE: self._push,
            frames.PING: self._ping,
            frames.GOAWAY: self._ignored,
            frames.WINDOW_UPDATE: self._window_update,
            frames.CONTINUATION: self._continuation,
        }

    def begin(self) -> None:
        """Announce the settings."""
        self.send(
            frames.settings_frame(
                {
                    frames.MAX_CONCURRENT_STREAMS: STREAMS_MAX,
                    frames.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
                    frames.MAX_HEADER_LIST_SIZE: HEADERS_BYTES_MAX,
                }
            )
            + frames.window_update(0, CONNECTION_WINDOW_BYTES - frames.WINDOW_DEFAULT)
        )

    def go_away(self, code: ErrorCode = ErrorCode.NO_ERROR, reason: str = "") -> None:
        """Announce that no further stream is served."""
        if not self._is_going_away:
            self._is_going_away = True
            self.send(frames.goaway_frame(self._last, code, reason))

    def lost(self) -> None:
        """End all streams: the connection is lost."""
        for stream in list(self.streams.values()):
            stream.lost()

    def receive(self, data: bytes) -> None:
        """Handle bytes of the peer. Raise `Http2Error`."""
        if self._buffer:
            data = self._buffer + data
        at, size = 0, len(data)
        if not self.has_begun:
            if data[: len(frames.PREFACE)] != frames.PREFACE[:size]:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "this port serves gRPC (HTTP/2) only")
            if size < len(frames.PREFACE):
                self._buffer = data
                return
            self.has_begun, at = True, len(frames.PREFACE)
        unpack, kinds = frames.HEADER.unpack_from, self._kinds
        while size - at >= frames.HEADER_BYTES:
            high, low, kind, flags, number = unpack(data, at)
            length = high << 16 | low
            if length > frames.FRAME_BYTES_MIN:
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"frame of {length} bytes")
            end = at + frames.HEADER_BYTES + length
            if end > size:
                break
            if self._block is not None and kind != frames.CONTINUATION:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted")
            handle = kinds.get(kind)
            if handle is not None:  # Frames of extensions are ignored.
                handle(flags, number & 0x7FFFFFFF, data[at + frames.HEADER_BYTES : end])
            at = end
        self._buffer = data[at:]

    # What streams need.

    def header_block(self, block: bytes) -> bytes:
        """Return a block with what the peer expects before it."""
        if not self._must_empty_table:
            return block
        self._must_empty_table = False
        return EMPTY_TABLE + block

    def closed(self, stream: Http2Stream) -> None:
        """Forget a stream."""
        self.streams.pop(stream.number, None)

    # Frames.

    def _found(self, number: int, kind: str) -> Http2Stream | None:
        """Return the stream of a frame, None for one that is over. Raise `Http2Error` for one that never began."""
        stream = self.streams.get(number)
        if stream is None and (number > self._last or number % 2 == 0):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"{kind} on stream {number}, which is not open")
        return stream

    def _data(self, flags: int, number: int, payload: bytes) -> None:
        stream = self._found(number, "DATA")
        size = len(payload)
        self._unacknowledged += size
        if self._unacknowledged * 2 >= CONNECTION_WINDOW_BYTES:
            self.send(frames.window_update(0, self._unacknowledged))
            self._unacknowledged = 0
        if stream is None:
            return
        if stream.has_ended:
            raise Http2Error(ErrorCode.STREAM_CLOSED, f"DATA after the end of stream {number}")
        if flags & frames.PADDED:
            payload = frames.without_padding(frames.DATA, flags, payload)
        stream.received(size, payload, ends=bool(flags & frames.END_STREAM))

    def _headers(self, flags: int, number: int, payload: bytes) -> None:
        if flags & (frames.PADDED | frames.WITH_PRIORITY):
            payload = frames.without_padding(frames.HEADERS, flags, payload)
        ends = bool(flags & frames.END_STREAM)
        if flags & frames.END_HEADERS:
            self._request(number, payload, ends=ends)
        else:
            self._block = _Block(number, ends, [payload])

    def _continuation(self, flags: int, number: int, payload: bytes) -> None:
        block = self._block
        if block is None or block.stream != number:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without its header block")
        block.parts.append(payload)
        if len(block.parts) > BLOCK_FRAMES_MAX or sum(map(len, block.parts)) > HEADERS_BYTES_MAX:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"headers of more than {HEADERS_BYTES_MAX} bytes")
        if flags & frames.END_HEADERS:
            self._block = None
            self._request(number, b"".join(block.parts), ends=block.ends)

    def _request(self, number: int, block: bytes, *, ends: bool) -> None:
        """Begin a stream, or end it by its trailers."""
        headers = self._decoder.decode(block)  # Always: later blocks depend on it.
        if number <= self._last:
            stream = self._found(number, "HEADERS")
            if stream is not None:
                if stream.has_ended or not ends:
                    raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"HEADERS within stream {number}")
                stream.received(0, b"", ends=True)
            return
        if number % 2 == 0:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"stream {number} of a client has an even number")
        self._last = number
        if self._is_going_away or len(self.streams) >= STREAMS_MAX:
            self.send(frames.reset_frame(number, ErrorCode.REFUSED_STREAM))
            return
        stream = self.streams[number] = Http2Stream(number, self, self._initial_window)
        self._accept(stream, headers)
        if ends:
            stream.received(0, b"", ends=True)

    def _reset(self, _: int, number: int, payload: bytes) -> None:
        frames.number_of(payload, "RST_STREAM")
        stream = self._found(number, "RST_STREAM")
        if stream is not None:
            stream.lost()

    def _settings(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) % frames.SETTING.size or (flags & frames.ACK and payload):
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of a wrong size or stream")
        if flags & frames.ACK:
            return
        for name, value in frames.SETTING.iter_unpack(payload):
            self._apply(name, value)
        self.send(frames.frame(frames.SETTINGS, frames.ACK, 0))

    def _apply(self, name: int, value: int) -> None:
        """Apply a setting of the peer."""
        if name == frames.INITIAL_WINDOW_SIZE:
            if value > frames.WINDOW_MAX:
                raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, f"initial window of {value} bytes")
            change, self._initial_window = value - self._initial_window, value
            for stream in list(self.streams.values()):
                self._widen(stream, change)
        elif name == frames.MAX_FRAME_SIZE:
            if not frames.FRAME_BYTES_MIN <= value <= frames.FRAME_BYTES_LARGEST:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"frames of {value} bytes")
            self.frame_bytes_max = value
        elif name == frames.HEADER_TABLE_SIZE:
            self._must_empty_table = True
        elif name == frames.ENABLE_PUSH and value > 1:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH {value}")

    def _push(self, _flags: int, _number: int, _payload: bytes) -> None:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE of a client")

    def _ping(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) != 8:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "PING of a wrong size or stream")
        if not flags & frames.ACK:
            self.send(frames.frame(frames.PING, frames.ACK, 0, payload))

    def _window_update(self, _: int, number: int, payload: bytes) -> None:
        size = frames.number_of(payload, "WINDOW_UPDATE") & 0x7FFFFFFF
        if number:
            stream = self._found(number, "WINDOW_UPDATE")
            if stream is not None and size:
                self._widen(stream, size)
            elif stream is not None:
                stream.reset(ErrorCode.PROTOCOL_ERROR)
                stream.lost()
            return
        self.window += size
        if not size or self.window > frames.WINDOW_MAX:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, f"window of {self.window} bytes")
        for stream in list(self.streams.values()):
            if self.window <= 0:
                break
            self._widen(stream, 0)

    @staticmethod
    def _widen(stream: Http2Stream, size: int) -> None:
        """Let a stream send `size` more bytes, and what waits in it."""
        stream.window += size
        if stream.window > frames.WINDOW_MAX:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, f"stream {stream.number}: window of {stream.window} bytes")
        if stream.unsent:
            was_congested, user = stream.is_congested, stream.user
            stream.flush()
            if was_congested and not stream.is_congested and user is not None:
                user.drained()

    def _ignored(self, flags: int, number: int, payload: bytes) -> None:
        """Handle a frame that needs no answer."""
