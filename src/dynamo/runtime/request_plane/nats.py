"""Request plane over NATS: requests are published to the worker's subject; responses use TCP connections, as in Dynamo.

    request   subject `<ns>_<comp>.<ep>-<instance hex>`, queue group `q`; headers; upstream's two-part message
    ack       to the reply subject: empty means accepted, a text is a rejection
    response  Dynamo response stream, on a TCP connection that the worker opens (`tcp.upstream_worker`)

The server reports a subject without subscribers immediately.
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dynamo.core.errors import CannotConnect, ConnectionTimeout, Disconnected, InvalidArgument, WorkerUnavailable
from dynamo.core.metrics import MetricsRegistry
from dynamo.core.tasks import TaskOwner
from dynamo.protocols.discovery import EndpointId, TransportAddress
from dynamo.runtime.request_plane.base import OnDone, Receiver, Request, Target
from dynamo.runtime.request_plane.tcp.common import (
    TcpLimits,
    TcpMetrics,
    TcpOptions,
    advertised,
    local_address,
)
from dynamo.runtime.request_plane.tcp.liveness_probe import AckWatch
from dynamo.runtime.request_plane.tcp.plane import CLOSE_TIMEOUT_S
from dynamo.runtime.request_plane.tcp.sockets import Sockets, TcpListener
from dynamo.runtime.request_plane.tcp.upstream_caller import ResponseListener, UpstreamCall, encode_message, refusal
from dynamo.runtime.request_plane.tcp.upstream_worker import ResponseConnections, dial_back, read_message, refusal_text
from dynamo.runtime.server import Dispatcher
from dynamo.runtime.transports.nats.connection import NatsConnection, Subscription
from dynamo.runtime.transports.nats.options import NatsOptions

if TYPE_CHECKING:
    from nats.aio.msg import Msg

logger = logging.getLogger(__name__)

QUEUE_GROUP = "q"  # As in Dynamo: with several subscribers, a request is still delivered only once.
PAYLOAD_BYTES_MAX = 16 << 20  # Limit of Dynamo; the server's own `max_payload` is lower unless it was raised.
NO_RESPONDERS = "503"

_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


class NatsPlane:
    """Request plane of one process over NATS."""

    speaks_batched = False
    """Responses use Dynamo response streams."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        options: NatsOptions | None = None,
        tcp: TcpOptions | None = None,
        registry: MetricsRegistry | None = None,
    ) -> None:
        options, tcp, registry = options or NatsOptions(), tcp or TcpOptions(), registry or MetricsRegistry()
        limits = replace(tcp.limits, request_timeout_s=options.request_timeout_s)
        metrics = TcpMetrics(registry)
        self._errors = registry.counter(
            "dynamo_transport_nats_errors_total", "Malformed requests and lost connections to the server"
        ).labels()
        self._nats = NatsConnection(options, "request_plane", registry=registry, on_down=self._went_down)
        self._sockets = Sockets(tcp.tls, limits, metrics)
        self._caller = NatsCaller(self._nats, tcp, limits, metrics, self._sockets, self._check_gone)
        self._worker = NatsWorker(
            self._nats,
            dispatcher,
            limits=limits,
            metrics=metrics,
            sockets=self._sockets,
            count_error=self._errors.inc,
            on_close=self._check_gone,
        )
        self._is_closed = False
        self._gone = asyncio.Event()

    async def start(self) -> None:
        """Wait for the connection. Raise `ConfigError` when the server is unreachable or rejects the credentials."""
        await self._nats.start()

    def send(self, target: Target, request: Request, receiver: Receiver, on_done: OnDone) -> UpstreamCall | None:
        if not self._nats.is_up or not self._caller.is_ready or not _is_subject(target.address):
            return None
        return self._caller.send(target, request, receiver, on_done)

    async def connect(self, target: Target) -> None:
        if self._is_closed:
            raise Disconnected("request plane closed")
        if not _is_subject(target.address):
            raise CannotConnect(
                f"worker {target.address or target.path} receives requests over TCP, this process sends over NATS: "
                "set the same --request-plane for all processes"
            )
        await self._caller.prepare()
        await self._nats.wait_up()

    async def listen(self) -> None:
        await self.start()

    async def open(self, path: str) -> None:
        await self._worker.open(path)

    def address(self, path: str) -> TransportAddress:
        return TransportAddress(nats_tcp=subject_of(path))

    async def close(self) -> None:
        if self._is_closed:
            await self._gone.wait()
            return
        self._is_closed = True
        await self._worker.refuse()
        await self._nats.close()
        self._caller.close()
        await self._sockets.close()
        self._worker.responses.close()
        self._check_gone()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):  # Before 3.12 `wait_for` may swallow a cancellation.
                await self._gone.wait()
        except TimeoutError:
            logger.warning("closing connections with unsent data: timeout")
            for stuck in list(self._worker.responses.open):
                stuck.abort()
            self._gone.set()
        await self._worker.tasks.cancel_and_wait()

    def _went_down(self) -> None:
        self._errors.inc()
        self._caller.server_lost()

    def _check_gone(self) -> None:
        if self._is_closed and not self._caller.response_listener.connections and not self._worker.responses.open:
            self._gone.set()


class NatsCall(UpstreamCall):
    """Request sent through the NATS server."""

    __slots__ = ("address",)

    def __init__(self, owner: "NatsCaller", subject: str, target: Target, receiver: Receiver, on_done: OnDone) -> None:
        super().__init__(owner, subject, target, receiver, on_done)
        self.address = target.address


class NatsCaller:
    """Calling side: requests through the server, responses over the workers' TCP connections."""

    def __init__(
        self,
        nats: NatsConnection,
        tcp: TcpOptions,
        limits: TcpLimits,
        metrics: TcpMetrics,
        sockets: Sockets,
        on_close: Callable[[], None],
    ) -> None:
        self.address = f"NATS at {nats.options.where}"
        self.response_listener = ResponseListener(limits, metrics, on_close)
        self._nats = nats
        self._tcp = tcp
        self._limits = limits
        self._sockets = sockets
        self._inbox = f"_INBOX.{uuid.uuid4().hex}"
        self._acks: Subscription | None = None
        self._server: TcpListener | None = None
        self._answer_address = ""
        self._preparing = asyncio.Lock()
        self._unacknowledged: set[UpstreamCall] = set()
        self._unanswered: AckWatch[UpstreamCall] = AckWatch(limits.request_timeout_s, self._expire)

    @property
    def is_ready(self) -> bool:
        return self._acks is not None

    async def prepare(self) -> None:
        """Start listening for acknowledgements and responses."""
        tls = self._sockets.tls
        if tls.client is not None and tls.server is None:
            raise CannotConnect("workers send responses over TLS, which requires --tcp-tls-cert-path in this process")
        async with self._preparing:
            if self._server is None:
                host = self._tcp.answer_host or self._tcp.host
                self._server = await self._sockets.listen(
                    self.response_listener.connection, host or local_address(), self._tcp.answer_port, self._tcp.backlog
                )
                host, port = advertised(host), self._server.sockets[0].getsockname()[1]
                self._answer_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            if self._acks is None:
                self._acks = await self._nats.subscribe(f"{self._inbox}.*", self._acknowledged)

    def send(self, target: Target, request: Request, receiver: Receiver, on_done: OnDone) -> UpstreamCall | None:
        """Start a call; return None when the send queue is full. Raise `InvalidArgument` for an oversized request."""
        subject = str(uuid.uuid4())
        message = encode_message(request, subject, self._answer_address)
        headers = {
            "request-id": request.id,
            "x-frontend-send-ts-ns": str(time.time_ns()),
            **{name: value for name, value in request.headers.items() if _HEADER_NAME.fullmatch(name)},
        }
        self._check_size(len(message) + sum(len(name) + 4 * len(value) + 4 for name, value in headers.items()))
        if not self._nats.publish(target.address, message, f"{self._inbox}.{subject}", headers):
            return None
        call = NatsCall(self, subject, target, receiver, on_done)
        self.response_listener.waiting[subject] = call
        self._unacknowledged.add(call)
        self._unanswered.add(call)
        self.response_listener.metrics.sent.inc(len(message))
        return call

    def server_lost(self) -> None:
        """End the unacknowledged calls: the requests may be lost. Responses have their own connections."""
        for call in list(self._unacknowledged):
            call.end(Disconnected(f"connection to {self.address} lost before the request was acknowledged"))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.response_listener.close()
        for call in self._unanswered.close():
            call.end(Disconnected("request plane closed"))

    # Callbacks of `UpstreamCall` -----------------------------------------------------------------------------------

    def on_response_started(self, call: UpstreamCall) -> None:
        self._unacknowledged.discard(call)
        self._unanswered.discard(call)

    def forget(self, call: UpstreamCall) -> None:
        self.response_listener.waiting.pop(call.subject, None)
        self.on_response_started(call)

    def _acknowledged(self, message: "Msg") -> None:
        call = self.response_listener.waiting.get(message.subject.rpartition(".")[2])
        if not isinstance(call, NatsCall):
            return
        self._unacknowledged.discard(call)
        if message.data:
            call.end(refusal(message.data.decode(errors="replace")))
        elif message.headers and message.headers.get("Status") == NO_RESPONDERS:
            call.end(CannotConnect(f"unknown endpoint: no subscriber on {call.address}"))

    def _expire(self, call: UpstreamCall) -> None:
        """End a call that was neither rejected nor answered within the timeout."""
        call.end(ConnectionTimeout(f"no response through {self.address} within {self._limits.request_timeout_s} s"))

    def _check_size(self, size: int) -> None:
        limits = {
            "DYN_TCP_MAX_MESSAGE_SIZE": self._limits.message_bytes_max,
            "the NATS server's max_payload": self._nats.payload_bytes_max,
            "the NATS request plane": PAYLOAD_BYTES_MAX,
        }
        name = min(limits, key=lambda name: limits[name])
        if size > limits[name]:
            raise InvalidArgument(f"request of {size} bytes exceeds the limit of {limits[name]} ({name})")


class NatsWorker:
    """Serving side: the handlers of this process, one subject each."""

    def __init__(
        self,
        nats: NatsConnection,
        dispatcher: Dispatcher,
        *,
        limits: TcpLimits,
        metrics: TcpMetrics,
        sockets: Sockets,
        count_error: Callable[[], None],
        on_close: Callable[[], None],
    ) -> None:
        self.responses = ResponseConnections(sockets, on_close)
        self.tasks = TaskOwner("request_plane.nats")
        self._nats = nats
        self._dispatcher = dispatcher
        self._limits = limits
        self._metrics = metrics
        self._count_error = count_error
        self._opened: dict[str, Subscription] = {}
        self._unreadable = 0

    async def open(self, path: str) -> None:
        """Subscribe to the subject of the path."""
        if path not in self._opened:
            self._opened[path] = await self._nats.subscribe(
                subject_of(path), lambda message: self._arrived(path, message), QUEUE_GROUP
            )

    async def refuse(self) -> None:
        """Unsubscribe: the server then reports missing subscribers to callers."""
        for path in list(self._opened):
            await self._nats.unsubscribe(self._opened.pop(path))

    def _arrived(self, path: str, message: "Msg") -> None:
        self._metrics.received.inc(len(message.data))
        try:
            self.responses.check()
            served = self._dispatcher.admit(path)
            request, address = read_message(message.data, dict(message.headers or {}))
        except (WorkerUnavailable, InvalidArgument) as error:
            if isinstance(error, InvalidArgument):
                self._complain(message.subject, error)
            self._acknowledge(message, refusal_text(error))
        else:
            self._acknowledge(message, b"")
            work = dial_back(
                served, request, address, limits=self._limits, metrics=self._metrics, connections=self.responses
            )
            self.tasks.start(work, request.id)

    def _complain(self, subject: str, error: InvalidArgument) -> None:
        self._count_error()
        self._unreadable += 1
        if self._unreadable.bit_count() == 1:  # Log the first, and each doubling.
            logger.warning("%d malformed requests, the last on %s: %s", self._unreadable, subject, error)

    def _acknowledge(self, message: "Msg", text: bytes) -> None:
        if message.reply:
            self._nats.publish(message.reply, text)


def subject_of(path: str) -> str:
    """Return the subject of a handler path. Raise `InvalidArgument` for names that contain NATS wildcards."""
    instance, _, handler_path = path.partition("/")
    endpoint = EndpointId.of_handler_path(handler_path)
    if any(wildcard in path for wildcard in "*>"):
        raise InvalidArgument(f"endpoint {endpoint}: names on NATS must not contain * or >")
    return f"{endpoint.namespace}_{endpoint.component}.{endpoint.name}-{instance}"


def _is_subject(address: str) -> bool:
    """Return False for `host:port`, the address of a worker on TCP."""
    return bool(address) and not address.rpartition(":")[2].isdigit()
