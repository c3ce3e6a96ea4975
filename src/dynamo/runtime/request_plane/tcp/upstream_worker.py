"""Dynamo framing, worker side: requests share one connection; each response has a connection opened by the worker."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

from dynamo.core.codec import JSON, UNREADABLE, encode, json_encode, msgpack_encode
from dynamo.core.errors import DynamoException, InvalidArgument, WorkerOverloaded, WorkerUnavailable
from dynamo.core.tasks import TaskOwner
from dynamo.runtime.request_plane import frame
from dynamo.runtime.request_plane.base import AnnotatedValue, Bare, Request
from dynamo.runtime.request_plane.reply import CLOSED, ReplyBase
from dynamo.runtime.request_plane.request_frames import RequestFrames
from dynamo.runtime.request_plane.tcp.common import TcpLimits, TcpMetrics, peer_of, tune
from dynamo.runtime.request_plane.tcp.sockets import Sockets
from dynamo.runtime.request_plane.tcp.unfinished import UnfinishedFrames
from dynamo.runtime.request_plane.tcp.upstream_wire import (
    JSON_FINAL,
    JSON_HEAD,
    JSON_TAIL,
    ONE_TOKEN_TAIL,
    PACK_FINAL,
    PACK_HEAD,
    PACK_TAIL,
    PACK_TOKENS,
    PROLOGUE,
    SENTINEL,
    StreamAddress,
    WireHandshake,
    read_address,
    read_control,
    read_headers,
)
from dynamo.runtime.request_plane.wire_errors import to_wire
from dynamo.runtime.server import Dispatcher, Served

logger = logging.getLogger(__name__)

FIN_WAIT_S = 5.0  # The caller closes after the sentinel; the worker closes after this time.
MANY_IN = b'"request_stream_connection_info"'  # Rare: searched before a header is decoded again.
TOKENS_PER_ITEM_MAX = 15  # Maximum length in a one-byte msgpack array header.


class ResponseConnections:
    """Responses to callers with Dynamo framing; they outlive the connections of their requests."""

    def __init__(self, sockets: Sockets, on_close: Callable[[], None]) -> None:
        self.sockets = sockets
        self.on_close = on_close
        self.open: set[UpstreamReply] = set()
        self.tasks = TaskOwner("request_plane.dial_back")
        """Tasks that open connections."""

    def check(self) -> None:
        """Raise `WorkerUnavailable` if a request over TLS would get an unencrypted response."""
        tls = self.sockets.tls
        if tls.server is not None and tls.client is None:
            raise WorkerUnavailable("this worker cannot respond over TLS: set --tcp-tls-ca-cert-path")

    def close(self) -> None:
        for reply in list(self.open):
            reply.close()


class UpstreamReply(ReplyBase, asyncio.Protocol):
    """Response to one request on the connection that this worker opened to the caller."""

    __slots__ = (
        "_connections",
        "_decoder",
        "_fin_timer",
        "_handshake",
        "_is_json",
        "_is_scheduled",
        "_limits",
        "_loop",
        "_metrics",
        "_out",
        "_tokens",
        "_transport",
    )  # fmt: skip

    def __init__(
        self, request: Request, subject: str, limits: TcpLimits, metrics: TcpMetrics, connections: ResponseConnections
    ) -> None:
        super().__init__(request.id)
        self._is_json = request.codec == JSON
        self._connections = connections
        self._limits = limits
        self._metrics = metrics
        self._handshake = frame.two_part(json_encode(WireHandshake(subject)), b"")
        self._decoder = frame.TwoPartDecoder(limits.message_bytes_max)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._tokens: list[int] = []
        self._out: list[bytes] = []
        self._is_scheduled = False
        self._fin_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class is not a subclass.
        tune(self._transport, self._limits.write_buffer_bytes_max)
        self._transport.write(self._handshake + PROLOGUE)
        self._connections.open.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            for header, _ in self._decoder.feed(data):
                if header == b'"stop"':
                    self.stop()
                elif header == b'"kill"':
                    self.kill()
                    self.abort()
        except frame.FrameError as error:
            logger.warning("request %s: malformed control stream from the caller: %s", self.request_id, error)
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.kill()
        if self._fin_timer is not None:
            self._fin_timer.cancel()
        self._connections.open.discard(self)
        self._connections.on_close()

    def pause_writing(self) -> None:
        self._metrics.slow_readers.inc()
        logger.warning("request %s: cancelled: the caller does not read the response", self.request_id)
        self.abort()

    def token(self, token_id: int) -> None:
        if self._state & CLOSED:
            return
        self._tokens.append(token_id)
        if not self._is_scheduled:
            self._schedule()

    def item(self, value: Any) -> None:
        if self._state & CLOSED:
            return
        if type(value) is Bare:
            body = encode({"data": value.value, "complete_final": False}, JSON if self._is_json else "msgpack")
        elif type(value) is AnnotatedValue:
            body = encode({"data": value, "complete_final": False}, JSON if self._is_json else "msgpack")
        elif self._is_json:
            body = JSON_HEAD + encode(value, JSON) + JSON_TAIL
        else:
            body = PACK_HEAD + encode(value, "msgpack") + PACK_TAIL
        self._write(body)

    def write_end(self) -> None:
        self._write(JSON_FINAL if self._is_json else PACK_FINAL)
        self._out.append(SENTINEL)
        self._fin_timer = self._loop.call_later(FIN_WAIT_S, self.abort)

    def write_error(self, error: BaseException) -> None:
        envelope = {"data": {"event": "error", "error": to_wire(error)}, "complete_final": False}
        self._write(json_encode(envelope) if self._is_json else msgpack_encode(envelope))
        self.write_end()

    def _write(self, body: bytes) -> None:
        self._seal_tokens()
        self._out.append(frame.two_part(b"", body))
        if not self._is_scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._is_scheduled = True
        self._loop.call_soon(self._flush)

    def _seal_tokens(self) -> None:
        tokens, self._tokens = self._tokens, []
        for start in range(0, len(tokens), TOKENS_PER_ITEM_MAX):
            part = tokens[start : start + TOKENS_PER_ITEM_MAX]
            if self._is_json:
                body = JSON_HEAD + b'{"token_ids":%b,"index":0}' % json_encode(part) + JSON_TAIL
            else:
                body = PACK_HEAD + PACK_TOKENS + msgpack_encode(part) + ONE_TOKEN_TAIL
            self._out.append(frame.two_part(b"", body))

    def _flush(self) -> None:
        self._is_scheduled = False
        self._seal_tokens()
        data = b"".join(self._out)
        self._out.clear()
        if self._transport is not None:
            self._metrics.sent.inc(len(data))
            self.bytes_sent.inc(len(data))
            self._transport.write(data)

    def close(self) -> None:
        """Send pending output and close."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class UpstreamRequestStream(asyncio.Protocol):
    """Request stream on another connection that this worker opened to the caller."""

    def __init__(self, frames: RequestFrames, subject: str, limits: TcpLimits, metrics: TcpMetrics) -> None:
        self._frames = frames
        self._limits = limits
        self._metrics = metrics
        self._handshake = frame.two_part(json_encode(WireHandshake(subject, "request")), b"")
        self._decoder = frame.TwoPartDecoder(limits.message_bytes_max)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class is not a subclass.
        tune(self._transport, self._limits.write_buffer_bytes_max)
        self._transport.write(self._handshake)
        self._frames.follow(self)

    def data_received(self, data: bytes) -> None:
        self._metrics.received.inc(len(data))
        try:
            for header, body in self._decoder.feed(data):
                if header:  # Stop, kill or the sentinel: the caller sends nothing more.
                    self._frames.end()
                else:
                    self._frames.add(bytes(body))
        except frame.FrameError as error:
            logger.warning("malformed request stream: %s", error)
            self._metrics.errors.inc()
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._frames.end()

    def pause_reading(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class UpstreamSession(asyncio.Protocol):
    """Request connection of a caller with Dynamo framing."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        limits: TcpLimits,
        metrics: TcpMetrics,
        connections: ResponseConnections,
        unfinished: UnfinishedFrames,
        on_close: Callable[[Any], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._limits = limits
        self._metrics = metrics
        self._connections = connections
        self._unfinished = unfinished
        self._on_close = on_close
        self._decoder = frame.UpstreamRequestDecoder(limits.message_bytes_max)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class is not a subclass.
        tune(self._transport, self._limits.write_buffer_bytes_max)

    def data_received(self, data: bytes) -> None:
        self._metrics.received.inc(len(data))
        try:
            requests = self._decoder.feed(data)
            self._unfinished.note(self, self._decoder.held, is_new=bool(requests))
            for request in requests:
                self._answer(request)
        except frame.FrameError as error:
            peer = peer_of(self._transport)
            logger.warning("closing connection of %s: malformed request frame: %s", peer, error)
            self._metrics.errors.inc()
            self._write(frame.ack(f"Invalid request: {error}".encode()))
            self.close()

    @property
    def transport(self) -> asyncio.Transport | None:
        return self._transport

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._unfinished.forget(self)
        self._on_close(self)

    def pause_writing(self) -> None:
        self.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _answer(self, upstream: frame.UpstreamRequest) -> None:
        try:
            self._connections.check()
            served = self._dispatcher.admit(upstream.path)
            request, address = read_request(upstream)
            frames = read_stream_address(upstream.message)
        except (WorkerUnavailable, InvalidArgument) as error:
            self._write(frame.ack(refusal_text(error)))
        else:
            self._write(frame.ack())
            work = dial_back(
                served,
                request,
                address,
                limits=self._limits,
                metrics=self._metrics,
                connections=self._connections,
                frames=frames,
            )
            self._connections.tasks.start(work, request.id)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


async def dial_back(
    served: Served,
    request: Request,
    address: StreamAddress,
    *,
    limits: TcpLimits,
    metrics: TcpMetrics,
    connections: ResponseConnections,
    frames: StreamAddress | None = None,
) -> None:
    """Open the response connection and, for a request stream, its connection; pass the request to its handler."""
    reply = UpstreamReply(request, address.subject, limits, metrics, connections)
    try:
        await connections.sockets.connect(lambda: reply, address.address)
        if frames is not None:
            made = request.frames = RequestFrames()
            stream = UpstreamRequestStream(made, frames.subject, limits, metrics)
            await connections.sockets.connect(lambda: stream, frames.address)
    except (OSError, TimeoutError, ValueError) as error:
        metrics.errors.inc()
        logger.warning("request %s: failed to connect to %s for the response: %s", request.id, address.address, error)
        reply.abort()
        return
    if not reply.is_cancelled:
        served.start(request, reply)


def refusal_text(error: DynamoException) -> bytes:
    """Return the text of a rejecting acknowledgement; callers distinguish the kinds by its first words."""
    if isinstance(error, WorkerOverloaded):
        return f"Server overloaded: {error}".encode()
    if isinstance(error, InvalidArgument):
        return f"Invalid request: {error}".encode()
    return f"Server unavailable: {error}".encode()


def read_request(upstream: frame.UpstreamRequest) -> tuple[Request, StreamAddress]:
    """Decode the request of a frame and its response address. Raise `InvalidArgument`."""
    try:
        headers = read_headers(upstream.headers) if upstream.headers else {}
    except UNREADABLE as error:
        raise InvalidArgument(f"malformed request headers: {error}") from None
    return read_message(upstream.message, headers)


def read_message(message: bytes, headers: dict[str, Any]) -> tuple[Request, StreamAddress]:
    """Decode the request of a two-part message and its response address. Raise `InvalidArgument`."""
    header, body = frame.split_two_part(message)
    try:
        control = read_control(header)
        address = read_address(control.connection_info.info)
    except UNREADABLE as error:
        raise InvalidArgument(f"malformed request header: {error}") from None
    return Request(control.id, body, control.payload_codec, _texts(headers), _texts(control.metadata or {})), address


def read_stream_address(message: bytes) -> StreamAddress | None:
    """Decode the address of a request stream, None for a request without one. Raise `InvalidArgument`."""
    header, _ = frame.split_two_part(message)
    if MANY_IN not in bytes(header):
        return None
    info = read_control(header).request_stream_connection_info
    try:
        return None if info is None else read_address(info.info)
    except UNREADABLE as error:
        raise InvalidArgument(f"malformed request stream address: {error}") from None


def _texts(values: dict[str, Any]) -> dict[str, str]:
    return {name: value for name, value in values.items() if isinstance(value, str)}
