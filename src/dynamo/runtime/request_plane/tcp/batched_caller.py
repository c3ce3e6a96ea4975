"""Batched frames, caller side: one connection per worker process and the receivers of its responses."""

import asyncio
import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import cast

import msgspec
from msgspec import UnsetType

from dynamo.core.boundaries import ErrorBoundary, logged
from dynamo.core.codec import JSON, MSGPACK, UNREADABLE, msgpack_encode
from dynamo.core.errors import ConnectionTimeout, Disconnected, InvalidArgument, Unknown
from dynamo.runtime.request_plane import frame
from dynamo.runtime.request_plane.base import Item, MovableReceiver, OnDone, Receiver, Request, Target
from dynamo.runtime.request_plane.tcp.common import NO_VALID_FRAME_HINT, TcpLimits, TcpMetrics, tune
from dynamo.runtime.request_plane.tcp.liveness_probe import LOOKS, AckWatch, KeepAlive, LivenessProbe
from dynamo.runtime.request_plane.tcp.upstream_wire import WireAnnotated
from dynamo.runtime.request_plane.wire_errors import from_wire

logger = logging.getLogger(__name__)

STREAMS_MAX = 0xFFFF_FFFF
SILENT_S = 1.0  # A worker acknowledges a request before processing it; only an unresponsive process takes longer.

_decode_any = msgspec.msgpack.Decoder().decode


class BatchedCall:
    """Running request on a batched connection."""

    __slots__ = ("_link", "instance_id", "on_done", "receiver", "sent_at", "stream")

    def __init__(self, link: "BatchedLink", stream: int, target: Target, receiver: Receiver, on_done: OnDone) -> None:
        self._link = link
        self.sent_at: float | None = None
        """Time at which the request was sent; None after the first response element."""
        self.stream = stream
        self.instance_id = target.instance_id
        self.receiver = receiver
        self.on_done = on_done

    def stop(self) -> None:
        self._link.control(self, frame.STOP)

    def kill(self) -> None:
        self._link.control(self, frame.KILL)


class BatchedLink(asyncio.Protocol):
    """Connection to one worker process."""

    def __init__(
        self,
        address: str,
        limits: TcpLimits,
        metrics: TcpMetrics,
        on_close: Callable[["BatchedLink"], None],
        *,
        has_pulse: bool = False,
    ) -> None:
        self.address = address
        self._limits = limits
        self._metrics = metrics
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._decoder = frame.FrameDecoder(limits.answer_bytes_max)
        self._calls: dict[int, BatchedCall] = {}
        self._on_token: dict[int, Callable[[int], None]] = {}
        self._unacknowledged: AckWatch[BatchedCall] = AckWatch(limits.request_timeout_s, self._expire)
        self._probe = LivenessProbe(self)
        self._received = 0
        """Number of received chunks, a sign of life for the probe."""
        self._unsent = 0
        """Size of the write buffer at the last check."""
        self._keep_alive = KeepAlive()
        self._look_s = limits.silence_s / LOOKS if has_pulse else 0.0
        self._look_timer: asyncio.TimerHandle | None = None
        self._next_stream = 0
        self._out: list[bytes] = []
        self._is_scheduled = False

    # Connection ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class is not a subclass.
        tune(self._transport, self._limits.write_buffer_bytes_max)
        self._transport.write(frame.HELLO)

    def data_received(self, data: bytes) -> None:
        self._received += 1
        self._metrics.received.inc(len(data))
        try:
            for kind, payload in self._decoder.feed(data):
                if kind == frame.TOKENS:
                    self._apply_tokens(payload)
                else:
                    self._apply(kind, payload)
        except (InvalidArgument, *UNREADABLE) as error:
            logger.warning("closing connection to %s: malformed batched frame: %s", self.address, error)
            self._metrics.errors.inc()
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._on_close(self)
        self._unacknowledged.close()
        self._probe.close()
        if self._look_timer is not None:
            self._look_timer.cancel()
        why = f"connection to worker {self.address} lost" + (f": {error}" if error else "")
        if not self._received:
            why += NO_VALID_FRAME_HINT
        while self._calls:  # The receiver of the error may kill another of these calls.
            self._end(next(iter(self._calls.values())), Disconnected(why))

    def pause_writing(self) -> None:
        """Close the connection: the worker does not read its requests."""
        self._metrics.slow_readers.inc()
        logger.warning(
            "worker %s left more than %d bytes unread: closing", self.address, self._limits.write_buffer_bytes_max
        )
        self.abort()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_silent(self) -> bool:
        """Return True while an acknowledgement or probe response is overdue."""
        return self._unacknowledged.waited_s > SILENT_S or self._keep_alive.is_silent(self._received)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close the connection; the worker then cancels its streams."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    # Sending -------------------------------------------------------------------------------------------------------

    def send(self, target: Target, request: Request, receiver: Receiver, on_done: OnDone) -> BatchedCall:
        """Start a call. Raise `InvalidArgument` for a request that exceeds the message limit."""
        head = frame.RequestHead(request.id, target.path, request.codec, dict(request.headers), dict(request.metadata))
        stream = self._new_stream()
        data = frame.request_frame(stream, msgpack_encode(head), request.body)
        if len(data) > self._limits.message_bytes_max:
            raise InvalidArgument(
                f"request of {len(data)} bytes exceeds the limit of {self._limits.message_bytes_max}"
                " (DYN_TCP_MAX_MESSAGE_SIZE)"
            )
        call = self._calls[stream] = BatchedCall(self, stream, target, receiver, on_done)
        call.sent_at = self._loop.time()
        self._on_token[stream] = lambda token_id: self._first_token(call, token_id)
        self._unacknowledged.add(call)
        self._write(data)
        if self._look_timer is None and self._look_s > 0:
            self._look_timer = self._loop.call_later(self._look_s, self._look)
        return call

    def control(self, call: BatchedCall, kind: int) -> None:
        """Send STOP or KILL for a running call."""
        if self._calls.get(call.stream) is not call:
            return
        self._write(frame.stream_frame(kind, call.stream))
        if kind == frame.KILL:
            self._forget(call)
            call.on_done(call.instance_id, None)

    def suspect(self, instance_id: int) -> None:
        """Start probing for an instance that left the registry while it has running calls."""
        self._probe.suspect(instance_id)

    def send_probe(self, probe: LivenessProbe) -> None:
        """Send a request for an unknown path, which a live worker rejects immediately."""
        target = Target(0, self.address, "", MSGPACK, is_batched=True)
        self.send(target, Request("", b""), probe, lambda *_: None)

    def serves(self, instances: Collection[int]) -> bool:
        """Return True while calls to one of these instances are running."""
        return any(call.instance_id in instances for call in self._calls.values())

    def _look(self) -> None:
        """Check the worker's liveness while calls are running."""
        self._look_timer = None
        if not self._calls or self._transport is None:
            return
        unsent = self._transport.get_write_buffer_size()
        if unsent < self._unsent:
            self._received += 1  # The worker reads; the probe may be queued behind a large request.
        self._unsent = unsent
        if self._keep_alive.look(self._received):
            self._write(frame.frame(frame.PROBE, b""))
        elif self._keep_alive.is_silent(self._received):
            self._let_go()
        self._look_timer = self._loop.call_later(self._look_s, self._look)

    def _let_go(self) -> None:
        """End the calls that can migrate from the unresponsive worker; the others keep waiting."""
        leaving = [call for call in self._calls.values() if leaves_silent_worker(call.receiver)]
        if leaving:
            self._metrics.left_silent.inc(len(leaving))
            logger.warning("worker %s unresponsive; migrating %d requests", self.address, len(leaving))
        for call in leaving:
            if self._calls.get(call.stream) is call:  # The receiver of the error may kill another of these calls.
                self._write(frame.stream_frame(frame.KILL, call.stream))
                self._end(call, Disconnected(f"worker {self.address} unresponsive"))

    def _write(self, data: bytes) -> None:
        self._out.append(data)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_scheduled = False
        out, self._out = self._out, []
        if out and self._transport is not None:
            data = out[0] if len(out) == 1 else b"".join(out)
            self._metrics.sent.inc(len(data))
            self._transport.write(data)

    def _new_stream(self) -> int:
        stream = self._next_stream
        while stream in self._calls:
            stream = (stream + 1) % STREAMS_MAX
        self._next_stream = (stream + 1) % STREAMS_MAX
        return stream

    # Receiving -----------------------------------------------------------------------------------------------------

    def _apply_tokens(self, payload: bytes) -> None:
        numbers = frame.read_u32s(payload)
        count, rest = divmod(len(numbers), 2)
        if rest:
            raise frame.FrameError("token without a stream id")
        get = self._on_token.get
        pairs = zip(map(get, numbers[:count]), numbers, numbers[count:], strict=False)
        while True:
            stream = -1
            try:
                for on_token, stream, token in pairs:  # noqa: B007 - used by the except clause below
                    if on_token is not None:
                        on_token(token)
            except Exception as error:  # noqa: BLE001 - a failed receiver ends its own call only
                self._receiver_failed(stream, error)
                continue
            return

    def _apply(self, kind: int, payload: bytes) -> None:
        if kind == frame.ITEM:
            stream, flags, data = frame.read_item(payload)
            call = self._calls.get(stream)
            if call is not None:
                self._deliver_item(call, flags, data)
        elif kind == frame.END:
            for stream in frame.read_u32s(payload):
                self._end_stream(stream, None)
        elif kind == frame.ACK:
            for stream in frame.read_u32s(payload):
                acknowledged = self._calls.get(stream)
                if acknowledged is not None:
                    self._unacknowledged.discard(acknowledged)
        elif kind == frame.ERROR:
            stream, data = frame.read_stream(payload)
            self._end_stream(stream, from_wire(_decode_any(data)))
        elif kind == frame.ALIVE:
            return  # Counted as a sign of life on reception.
        else:
            raise frame.FrameError(f"unknown frame kind {kind}")

    def _first_token(self, call: BatchedCall, token_id: int) -> None:
        """Replace the receiver until the first token, so that later tokens skip the latency measurement."""
        self._on_response_started(call)
        call.receiver.on_token(token_id)

    def _on_response_started(self, call: BatchedCall) -> None:
        if call.sent_at is not None:
            self._metrics.first_response.observe(self._loop.time() - call.sent_at)
            call.sent_at = None
            self._on_token[call.stream] = call.receiver.on_token

    def _deliver_item(self, call: BatchedCall, flags: int, data: bytes) -> None:
        self._on_response_started(call)
        item = _annotated(flags, data) if flags & frame.ITEM_ANNOTATED else Item(data, _codec(flags))
        with ErrorBoundary(partial(self._receiver_failed, call.stream)):
            call.receiver.on_item(item)

    def _end_stream(self, stream: int, error: Exception | None) -> None:
        call = self._calls.get(stream)
        if call is not None:
            self._end(call, error)

    def _end(self, call: BatchedCall, error: Exception | None) -> None:
        self._forget(call)
        call.on_done(call.instance_id, error)
        with logged(logger, "receiver of a call to %s failed at its end", self.address):
            if error is None:
                call.receiver.on_end()
            else:
                call.receiver.on_error(error)

    def _forget(self, call: BatchedCall) -> None:
        self._calls.pop(call.stream, None)
        self._on_token.pop(call.stream, None)
        self._unacknowledged.discard(call)

    def _expire(self, call: BatchedCall) -> None:
        """End a call that was not acknowledged in time."""
        self._write(frame.stream_frame(frame.KILL, call.stream))
        self._end(call, ConnectionTimeout(f"no acknowledgement within {self._limits.request_timeout_s} s"))

    def _receiver_failed(self, stream: int, error: Exception) -> None:
        """End the stream of a receiver that raised; the others continue."""
        logger.error("receiver of a call to %s failed", self.address, exc_info=error)
        call = self._calls.get(stream)
        if call is not None:
            self._write(frame.stream_frame(frame.KILL, stream))
            self._end(call, Unknown(f"receiver failed: {error}"))


def leaves_silent_worker(receiver: Receiver) -> bool:
    """Return whether the receiver migrates from an unresponsive worker instead of waiting for it."""
    return isinstance(receiver, MovableReceiver) and receiver.leaves_silent_worker()


def _codec(flags: int) -> str:
    return JSON if flags & frame.ITEM_JSON else MSGPACK


def _annotated(flags: int, data: bytes) -> Item:
    """Return the item of an element with annotations. Raise `msgspec.DecodeError` for a malformed one."""
    codec = _codec(flags)
    value = (_read_annotated_json if codec == JSON else _read_annotated_pack)(data)
    return Item(
        None if isinstance(value.data, UnsetType) else bytes(value.data), codec, value.id, value.event, value.comment
    )


_read_annotated_json = msgspec.json.Decoder(WireAnnotated).decode
_read_annotated_pack = msgspec.msgpack.Decoder(WireAnnotated).decode
