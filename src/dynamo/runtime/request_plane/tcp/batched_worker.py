"""Batched frames, worker side: all tokens of one loop iteration are sent in one frame by one write.

The order within a stream is preserved; between streams there is none.
"""

import asyncio
import logging
from array import array
from collections.abc import Callable
from typing import Any, cast

import msgspec

from dynamo.core.codec import JSON, UNREADABLE, encode, msgpack_encode
from dynamo.core.errors import DynamoException, InvalidArgument
from dynamo.runtime.request_plane import frame
from dynamo.runtime.request_plane.base import AnnotatedValue, Bare, Request
from dynamo.runtime.request_plane.reply import CLOSED, LATE, UNASSIGNED_BYTES, ReplyBase
from dynamo.runtime.request_plane.tcp.common import TcpLimits, TcpMetrics, peer_of, tune
from dynamo.runtime.request_plane.tcp.unfinished import UnfinishedFrames
from dynamo.runtime.request_plane.wire_errors import to_wire
from dynamo.runtime.server import Dispatcher

logger = logging.getLogger(__name__)

_decode_head = msgspec.msgpack.Decoder(frame.RequestHead).decode


class BatchedReply(ReplyBase):
    """Reply on one stream of a batched connection."""

    __slots__ = ("_add_stream", "_add_token", "_codec", "_session", "_stream")

    def __init__(self, session: "BatchedSession", stream: int, request_id: str, codec: str) -> None:
        super().__init__(request_id)
        self._session = session
        self._stream = stream
        self._codec = codec
        self._add_token = session.tokens.append
        self._add_stream = session.streams.append

    def token(self, token_id: int) -> None:
        if self._state:
            if self._state & CLOSED:
                return
            if self._state & LATE:
                self._session.seal()
        self._add_token(token_id)
        self._add_stream(self._stream)
        if not self._session.is_scheduled:
            self._session.schedule()

    def item(self, value: Any) -> None:
        if self._state & CLOSED:
            return
        flags = frame.ITEM_JSON if self._codec == JSON else 0
        if type(value) is Bare:
            value = value.value
        elif type(value) is AnnotatedValue:
            flags |= frame.ITEM_ANNOTATED
        data = frame.item_frame(self._stream, flags, encode(value, self._codec))
        self.bytes_sent.inc(len(data))
        self._session.add_item(data)
        if not self._state & LATE:
            self._state |= LATE
            self._session.late.append(self)

    def on_time(self) -> None:
        """Reset after an iteration: tokens can no longer overtake items."""
        self._state &= ~LATE

    def write_end(self) -> None:
        self._session.add_end(self._stream)

    def write_error(self, error: BaseException) -> None:
        self._session.add_last(frame.stream_frame(frame.ERROR, self._stream, msgpack_encode(to_wire(error))))

    def _done(self, error: BaseException | None) -> None:
        self._session.forget(self._stream)
        super()._done(error)


class BatchedSession(asyncio.Protocol):
    """Connection from one caller process."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        limits: TcpLimits,
        metrics: TcpMetrics,
        unfinished: UnfinishedFrames,
        on_close: Callable[[Any], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._limits = limits
        self._metrics = metrics
        self._unfinished = unfinished
        self._is_held = False
        """Whether a frame is incomplete."""
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._decoder = frame.FrameDecoder(limits.message_bytes_max)
        self._replies: dict[int, BatchedReply] = {}
        # Output of this iteration, in send order.
        self._acks = array("I")
        self._sealed: list[bytes] = []
        self.streams = array("I")
        self.tokens = array("I")
        self._items: list[bytes] = []
        self._last: list[bytes] = []
        self._ends = array("I")
        self.late: list[BatchedReply] = []
        self._token_bytes = UNASSIGNED_BYTES
        self.is_scheduled = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class is not a subclass.
        tune(self._transport, self._limits.write_buffer_bytes_max)

    def data_received(self, data: bytes) -> None:
        self._metrics.received.inc(len(data))
        try:
            frames = self._decoder.feed(data)
            held = self._decoder.held
            if held or self._is_held:
                self._is_held = held > 0
                self._unfinished.note(self, held, is_new=bool(frames))
            for kind, payload in frames:
                self._apply(kind, payload)
        except InvalidArgument as error:
            peer = peer_of(self._transport)
            logger.warning("closing connection of %s: malformed batched frame: %s", peer, error)
            self._metrics.errors.inc()
            self.close()

    @property
    def transport(self) -> asyncio.Transport | None:
        return self._transport

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._unfinished.forget(self)
        for reply in list(self._replies.values()):
            reply.kill()
        self._on_close(self)

    def pause_writing(self) -> None:
        """Cancel the streams and close: the write buffer is full because the caller does not read."""
        self._metrics.slow_readers.inc()
        logger.warning(
            "%s left more than %d bytes unread: cancelling its %d streams",
            peer_of(self._transport),
            self._limits.write_buffer_bytes_max,
            len(self._replies),
        )
        if self._transport is not None:
            self._transport.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Send pending output and close."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def schedule(self) -> None:
        """Schedule a flush at the end of this iteration."""
        self.is_scheduled = True
        self._loop.call_soon(self._flush)

    def seal(self) -> None:
        """Fix the order of pending output before anything that is written later."""
        if self.tokens:
            data = frame.tokens_frame(self.streams, self.tokens)
            self._count_tokens(len(data))
            self._sealed.append(data)
            del self.streams[:]
            del self.tokens[:]
        if self._items:
            self._sealed += self._items
            self._items.clear()
        for reply in self.late:
            reply.on_time()
        self.late.clear()

    def _count_tokens(self, size: int) -> None:
        """Count token bytes for the engine's endpoint, the only one of a worker with tokens, ended replies included."""
        reply = self._replies.get(self.streams[0])
        if reply is not None:
            self._token_bytes = reply.bytes_sent
        self._token_bytes.inc(size)

    def add_item(self, data: bytes) -> None:
        self._items.append(data)
        if not self.is_scheduled:
            self.schedule()

    def add_last(self, data: bytes) -> None:
        self._last.append(data)
        if not self.is_scheduled:
            self.schedule()

    def add_end(self, stream: int) -> None:
        self._ends.append(stream)
        if not self.is_scheduled:
            self.schedule()

    def forget(self, stream: int) -> None:
        self._replies.pop(stream, None)

    def _flush(self) -> None:
        self.is_scheduled = False
        self.seal()
        out = self._sealed
        if self._acks:
            out.insert(0, frame.streams_frame(frame.ACK, self._acks))
            del self._acks[:]
        if self._last:
            out += self._last
            self._last.clear()
        if self._ends:
            out.append(frame.streams_frame(frame.END, self._ends))
            del self._ends[:]
        if not out:
            return
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        if self._transport is not None:
            self._metrics.sent.inc(len(data))
            self._transport.write(data)

    def _apply(self, kind: int, payload: bytes) -> None:
        if kind == frame.REQUEST:
            self._start(*frame.read_request(payload))
            return
        if kind == frame.PROBE:
            self.add_last(frame.frame(frame.ALIVE, b""))
            return
        if kind not in {frame.STOP, frame.KILL}:
            raise frame.FrameError(f"unknown frame kind {kind}")
        stream, _ = frame.read_stream(payload)
        reply = self._replies.get(stream)
        if reply is None:
            return  # The stream ended before the caller's message arrived.
        if kind == frame.STOP:
            reply.stop()
        else:
            reply.kill()

    def _start(self, stream: int, head_bytes: bytes, body: bytes) -> None:
        try:
            head = _decode_head(head_bytes)
        except UNREADABLE as error:
            raise frame.FrameError(f"malformed request head: {error}") from None
        if stream in self._replies:
            raise frame.FrameError(f"stream {stream} is already open")
        reply = BatchedReply(self, stream, head.id, head.codec)
        try:
            served = self._dispatcher.admit(head.path)
        except DynamoException as error:
            reply.write_error(error)
            return
        self._replies[stream] = reply
        self._acks.append(stream)
        if not self.is_scheduled:
            self.schedule()
        served.start(Request(head.id, body, head.codec, head.headers, head.metadata), reply)
        if self._token_bytes is UNASSIGNED_BYTES:
            self._token_bytes = reply.bytes_sent
