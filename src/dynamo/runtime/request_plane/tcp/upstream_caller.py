"""Dynamo framing, caller side: requests share one connection; the worker opens a connection for each response.

Acknowledgements carry no id: they arrive in the order of the requests.
"""

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

from msgspec import UnsetType

from dynamo.core.boundaries import ErrorBoundary, logged
from dynamo.core.codec import JSON, UNREADABLE, json_encode
from dynamo.core.errors import (
    ConnectionTimeout,
    Disconnected,
    DynamoException,
    InvalidArgument,
    StreamIncomplete,
    Unknown,
    WorkerOverloaded,
    WorkerUnavailable,
)
from dynamo.core.tasks import TaskOwner
from dynamo.runtime.request_plane import frame
from dynamo.runtime.request_plane.base import Item, OnDone, Receiver, Request, Target
from dynamo.runtime.request_plane.request_frames import RequestFrames
from dynamo.runtime.request_plane.tcp.common import NO_VALID_FRAME_HINT, TcpLimits, TcpMetrics, peer_of, tune
from dynamo.runtime.request_plane.tcp.liveness_probe import AckWatch
from dynamo.runtime.request_plane.tcp.unfinished import UnfinishedFrames
from dynamo.runtime.request_plane.tcp.upstream_wire import (
    KILL,
    MANY_IN,
    ONE_TOKEN_BYTES_MAX,
    REQUEST_STREAM,
    SENTINEL,
    STOP,
    ConnectionInfo,
    ControlHeader,
    StreamAddress,
    WireAnnotated,
    leading_tokens,
    read_bare_json,
    read_bare_pack,
    read_handshake,
    read_json_envelope,
    read_pack_envelope,
    read_prologue,
)
from dynamo.runtime.request_plane.wire_errors import from_wire

logger = logging.getLogger(__name__)

HANDSHAKE_BYTES_MAX = 65536  # Limit before a worker has named its call; a handshake has about a hundred bytes.


class CallOwner(Protocol):
    """Sender of a call that tracks it."""

    address: str
    """Address of the worker, for messages."""

    def on_response_started(self, call: "UpstreamCall") -> None:
        """Handle the start of the response."""

    def forget(self, call: "UpstreamCall") -> None:
        """Handle the end of the call."""


class _EndedReceiver:
    """Receiver of a call that has ended."""

    def on_token(self, token_id: int) -> None:
        """See `Receiver`."""

    def on_item(self, item: Item) -> None:
        """See `Receiver`."""

    def on_end(self) -> None:
        """See `Receiver`."""

    def on_error(self, error: Exception) -> None:
        """See `Receiver`."""


_ENDED = _EndedReceiver()


class UpstreamCall:
    """Running request to a worker with Dynamo framing."""

    __slots__ = (
        "_link", "connection", "frames_subject", "instance_id", "is_over", "is_stopped", "on_done", "receiver",
        "sent_at", "subject",
    )  # fmt: skip

    def __init__(self, link: CallOwner, subject: str, target: Target, receiver: Receiver, on_done: OnDone) -> None:
        self._link = link
        self.subject = subject
        self.frames_subject: str | None = None
        """Subject of its request frames, None without frames."""
        self.instance_id = target.instance_id
        self.receiver: Receiver = receiver
        self.on_done = on_done
        self.connection: ResponseConnection | None = None
        self.sent_at: float | None = asyncio.get_running_loop().time()
        """Time at which the request was sent; None after the first response element."""
        self.is_over = False
        self.is_stopped = False

    def on_response_started(self, connection: "ResponseConnection") -> None:
        self.connection = connection
        self._link.on_response_started(self)

    def stop(self) -> None:
        self.is_stopped = True
        if self.connection is not None:
            self.connection.send_control(STOP)

    def kill(self) -> None:
        if self.is_over:
            return
        self._close()
        self.on_done(self.instance_id, None)
        if self.connection is not None:
            self.connection.leave(KILL)

    def end(self, error: Exception | None) -> None:
        """Notify the receiver of the end, once."""
        if self.is_over:
            return
        receiver = self.receiver
        self._close()
        self.on_done(self.instance_id, error)
        with logged(logger, "receiver of a call to %s failed at its end", self._link.address):
            if error is None:
                receiver.on_end()
            else:
                receiver.on_error(error)

    def _close(self) -> None:
        self.is_over = True
        self.receiver = _ENDED  # The connection outlives the call; a stream must end when its reader drops it.
        self._link.forget(self)


class ResponseListener:
    """Calls of this process whose worker has not opened the response connection yet, by subject."""

    def __init__(self, limits: TcpLimits, metrics: TcpMetrics, on_close: Callable[[], None]) -> None:
        self.silent = UnfinishedFrames(limits.message_bytes_max, metrics)
        """Connections without a handshake."""
        self.limits = limits
        self.metrics = metrics
        self.on_close = on_close
        self.waiting: dict[str, UpstreamCall] = {}
        self.offered: dict[str, RequestFrames] = {}
        """Request streams that workers have not connected for yet, by subject."""
        self.tasks = TaskOwner("request frames")
        self.connections: set[ResponseConnection] = set()

    def connection(self) -> "ResponseConnection":
        return ResponseConnection(self)

    def close(self) -> None:
        self.silent.close()
        for connection in list(self.connections):
            connection.leave(KILL)


class ResponseConnection(asyncio.Protocol):
    """Connection that a worker opened to send the response of one call."""

    def __init__(self, listener: ResponseListener) -> None:
        self._listener = listener
        self._decoder = frame.TwoPartDecoder(listener.limits.answer_bytes_max)
        self._transport: asyncio.Transport | None = None
        self._call: UpstreamCall | None = None
        self._has_prologue = False
        self._is_writing = False
        """Whether the connection sends request frames to the worker instead of receiving a response."""
        self._receiver_boundary = ErrorBoundary(self._on_receiver_error)
        self._has_left = False
        """Whether the worker was notified that the receiver is gone: data that was already sent is discarded."""
        self._may_write = asyncio.Event()
        self._may_write.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class is not a subclass.
        self._listener.connections.add(self)
        tune(self._transport, self._listener.limits.write_buffer_bytes_max)
        self._listener.silent.note(self, 1, is_new=True)

    def data_received(self, data: bytes) -> None:
        self._listener.metrics.received.inc(len(data))
        try:
            end = self._read(data) if self._decoder.is_between_frames else 0
            if end == len(data):
                return
            for header, body in self._decoder.feed(data[end:] if end else data):
                self._apply(header, body)
            if self._call is None and not self._is_writing and self._decoder.held > HANDSHAKE_BYTES_MAX:
                raise frame.FrameError(f"handshake exceeds {HANDSHAKE_BYTES_MAX} bytes")  # noqa: TRY301 - as others
        except (frame.FrameError, *UNREADABLE) as error:
            self._listener.metrics.errors.inc()
            logger.warning("malformed response from %s: %s", peer_of(self._transport), error)
            self._end(StreamIncomplete(f"malformed response from the worker: {error}"))

    def _read(self, data: bytes) -> int:
        """Handle the complete messages of `data`; return where they end."""
        at, size = 0, len(data)
        while at < size:
            if self._has_prologue and self._call is not None:
                tokens, at = leading_tokens(data, at)
                if tokens:
                    self._deliver_tokens(self._call, tokens)
                    continue
            end = self._decoder.end(data, at)
            if end > size:
                break
            self._apply(*self._decoder.cut(data, at, end))
            at = end
        return at

    def _deliver_tokens(self, call: UpstreamCall, tokens: list[int]) -> None:
        if self._has_left:
            return
        self._note_first(call)
        on_token = call.receiver.on_token
        with self._receiver_boundary:
            for token in tokens:
                if call.is_over:
                    break
                on_token(token)

    def _note_first(self, call: UpstreamCall) -> None:
        """Record the time to the first element."""
        if call.sent_at is not None:
            now = asyncio.get_running_loop().time()
            self._listener.metrics.first_response.observe(now - call.sent_at)
            call.sent_at = None

    @property
    def transport(self) -> asyncio.Transport | None:
        return self._transport

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._listener.silent.forget(self)
        self._listener.connections.discard(self)
        self._may_write.set()
        self._listener.on_close()
        if self._call is not None:
            # A released worker closes a stopped stream without its final marker.
            why = "worker closed the stream before its final marker"
            self._call.end(None if self._call.is_stopped else StreamIncomplete(why))

    def send_control(self, control: bytes) -> None:
        if self._transport is not None:
            self._transport.write(control)

    def leave(self, control: bytes) -> None:
        """Send a last control message and close."""
        self._has_left = True
        self.send_control(control)
        if self._transport is not None:
            self._transport.close()

    def _apply(self, header: bytes, body: bytes) -> None:
        call = self._call
        if self._is_writing or self._has_left:
            return  # Messages of the worker on this connection are ignored.
        if call is None:
            handshake = read_handshake(header)
            self._listener.silent.forget(self)
            if handshake.stream_type == REQUEST_STREAM:
                self._offer(handshake.subject)
            else:
                self._begin(handshake.subject)
        elif call.is_over:
            return
        elif not self._has_prologue:
            self._has_prologue = True
            refusal = read_prologue(header).error
            if refusal is not None:
                self._end(WorkerUnavailable(refusal))
        elif body:
            self._deliver(call, body)
        elif header == b'"sentinel"':
            self._end(StreamIncomplete("worker ended the stream without its final marker"))

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def _offer(self, subject: str) -> None:
        """Start sending request frames to the worker."""
        frames = self._listener.offered.pop(subject, None)
        if frames is None:
            self.leave(KILL)
            return
        self._is_writing = True
        self._listener.tasks.start(self._write_frames(frames), "request frames")

    async def _write_frames(self, frames: RequestFrames) -> None:
        """Send frames until the caller's stream ends or the worker disconnects. A slow worker delays the caller."""
        async for piece in frames:
            await self._may_write.wait()
            if self._transport is None:
                return
            data = frame.two_part(b"", piece)
            self._listener.metrics.sent.inc(len(data))
            self._transport.write(data)
        self.leave(SENTINEL)

    def _begin(self, subject: str) -> None:
        call = self._listener.waiting.pop(subject, None)
        if call is None or call.is_over:
            self.leave(KILL)
            return
        self._call = call
        call.on_response_started(self)
        if call.is_stopped:
            self.send_control(STOP)

    def _deliver(self, call: UpstreamCall, body: bytes) -> None:
        if len(body) < ONE_TOKEN_BYTES_MAX and (token := leading_tokens(frame.two_part(b"", body))[0]):
            self._deliver_tokens(call, token)  # The message arrived in pieces.
            return
        self._note_first(call)
        try:
            is_json = body[:1] == b"{"
            envelope = read_json_envelope(body) if is_json else read_pack_envelope(body)
            if envelope.complete_final:
                self._end(None)
            elif envelope.data is not None:
                self._deliver_item(call, envelope.data, body, JSON if is_json else "msgpack")
        except UNREADABLE:
            raise
        except Exception as error:  # noqa: BLE001 - request boundary: a failed receiver ends its own call only
            self._on_receiver_error(error)

    def _on_receiver_error(self, error: Exception) -> None:
        logger.error("receiver of a call failed", exc_info=error)
        self._end(Unknown(f"receiver failed: {error}"))

    def _deliver_item(self, call: UpstreamCall, item: WireAnnotated, body: bytes, codec: str) -> None:
        if item.event == "error" or item.error is not None:
            self._end(from_wire(item.error if item.error is not None else " ".join(item.comment or ["unknown error"])))
            return
        data: bytes | None = None
        if not isinstance(item.data, UnsetType):
            data = bytes(item.data)
        elif item.says_nothing:
            data = bytes((read_bare_json if codec == JSON else read_bare_pack)(body).data)
        call.receiver.on_item(Item(data, codec, item.id, item.event, item.comment))

    def _end(self, error: DynamoException | None) -> None:
        if self._call is not None:
            self._call.end(error)
        if self._transport is not None:
            self._transport.close()


class UpstreamLink(asyncio.Protocol):
    """Request connection to one worker with Dynamo framing."""

    def __init__(
        self, address: str, listener: ResponseListener, answer_address: str, on_close: Callable[["UpstreamLink"], None]
    ) -> None:
        self.address = address
        self._listener = listener
        self._answer_address = answer_address
        self._on_close = on_close
        self._decoder = frame.AckDecoder(listener.limits.message_bytes_max)
        self._transport: asyncio.Transport | None = None
        self._has_received = False
        self._order: deque[UpstreamCall] = deque()
        self._unanswered: AckWatch[UpstreamCall] = AckWatch(listener.limits.request_timeout_s, self._expire)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class is not a subclass.
        tune(self._transport, self._listener.limits.write_buffer_bytes_max)

    def data_received(self, data: bytes) -> None:
        try:
            for text in self._decoder.feed(data):
                self._has_received = True
                if self._order:
                    self._acknowledge(self._order.popleft(), text)
        except frame.FrameError as error:
            self._listener.metrics.errors.inc()
            logger.warning("malformed acknowledgement of %s: %s", self.address, error)
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """End the calls without a response; running responses have their own connections."""
        self._transport = None
        self._on_close(self)
        why = f"connection to worker {self.address} lost" + (f": {error}" if error else "")
        if not self._has_received:
            why += NO_VALID_FRAME_HINT
        for call in self._unanswered.close():
            call.end(Disconnected(why))

    def pause_writing(self) -> None:
        self._listener.metrics.slow_readers.inc()
        logger.warning("worker %s does not read its requests: closing", self.address)
        self.abort()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def send(self, target: Target, request: Request, receiver: Receiver, on_done: OnDone) -> UpstreamCall:
        """Start a call. Raise `InvalidArgument` for a request that exceeds the message limit."""
        assert self._transport is not None, "send() on a closed connection"
        call = UpstreamCall(self, str(uuid.uuid4()), target, receiver, on_done)
        if request.frames is not None:
            call.frames_subject = str(uuid.uuid4())
        data = self._encode(call, target, request)
        self._listener.waiting[call.subject] = call
        if request.frames is not None and call.frames_subject is not None:
            self._listener.offered[call.frames_subject] = request.frames
        self._order.append(call)
        self._unanswered.add(call)
        self._listener.metrics.sent.inc(len(data))
        self._transport.write(data)
        return call

    def on_response_started(self, call: UpstreamCall) -> None:
        """Handle the start of the response."""
        self._unanswered.discard(call)

    def forget(self, call: UpstreamCall) -> None:
        self._listener.waiting.pop(call.subject, None)
        if call.frames_subject is not None:
            self._listener.offered.pop(call.frames_subject, None)
        self._unanswered.discard(call)

    def _encode(self, call: UpstreamCall, target: Target, request: Request) -> bytes:
        message = encode_message(request, call.subject, self._answer_address, call.frames_subject)
        limit = self._listener.limits.message_bytes_max
        if len(message) > limit:
            raise InvalidArgument(
                f"request of {len(message)} bytes exceeds the limit of {limit} (DYN_TCP_MAX_MESSAGE_SIZE)"
            )
        headers = {
            "request-id": request.id,
            "x-frontend-send-ts-ns": str(time.time_ns()),
            "x-endpoint-path": target.path,
            **request.headers,
        }
        return frame.upstream_request(target.path, json_encode(headers), message)

    def _acknowledge(self, call: UpstreamCall, text: bytes) -> None:
        if text:
            call.end(refusal(text.decode(errors="replace")))

    def _expire(self, call: UpstreamCall) -> None:
        """End a call that was neither rejected nor answered within the timeout."""
        timeout_s = self._listener.limits.request_timeout_s
        call.end(ConnectionTimeout(f"no response from worker {self.address} within {timeout_s} s"))


def encode_message(request: Request, subject: str, answer_address: str, frames_subject: str | None = None) -> bytes:
    """Encode the two-part message of a request with the address and subject of its response connection.

    The worker connects to the same address with `frames_subject` for the request frames.
    """
    address = StreamAddress(answer_address, subject, request.id)
    control = ControlHeader(
        request.id,
        "single_in",
        "many_out",
        ConnectionInfo("tcp_server", json_encode(address).decode()),
        request.codec,
        dict(request.metadata) or None,
    )
    if frames_subject is not None:
        frames = StreamAddress(answer_address, frames_subject, request.id, REQUEST_STREAM)
        control.request_type = MANY_IN
        control.request_stream_connection_info = ConnectionInfo("tcp_server", json_encode(frames).decode())
    return frame.two_part(json_encode(control), request.body)


def refusal(text: str) -> DynamoException:
    """Return the error of a rejecting acknowledgement."""
    if text.startswith("Server overloaded"):
        return WorkerOverloaded(text)
    if text.startswith("Invalid request"):
        return InvalidArgument(text)
    return WorkerUnavailable(text)
