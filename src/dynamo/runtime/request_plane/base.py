"""Interface of a request plane: types shared by callers, handlers and transports.

Both ends use callbacks: a handler writes to a `Reply`, which calls the caller's `Receiver`. Nothing on this path is an
async iterator, so a token costs a method call instead of a task switch; `runtime.client` and `runtime.server` provide
the async-iterator API on top.

    caller ── send(request, receiver) ──▶ transport ──▶ handler(request, reply)
    receiver.on_token / on_item / on_end / on_error ◀── transport ◀── reply.token / item / finish / fail

All methods are called on the event loop's thread. A receiver gets one of `on_end` and `on_error`, as its last call.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import msgspec
from msgspec import Struct, field

from dynamo.core.tracing import Span
from dynamo.protocols.discovery import InstanceAddress, TransportAddress
from dynamo.runtime.request_plane.request_frames import RequestFrames


class Request(Struct):
    """Request as received by a handler."""

    id: str
    body: bytes
    """Payload, encoded with `codec`."""
    codec: str = "msgpack"
    """`msgpack` or `json`."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Transport headers: trace context, endpoint path."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Context metadata of the request."""
    span: Span | None = None
    """Span of the request in this process, None without tracing."""
    frames: RequestFrames | None = None
    """Stream of frames that replaces the body; None if the body is the whole request."""


class Bare(Struct, frozen=True):
    """Value that is sent without the envelope of an `Item`, as some endpoints of Dynamo respond."""

    value: Any


class AnnotatedValue(msgspec.Struct, omit_defaults=True):
    """Element with its annotations, as a handler writes it: the worker's form of `Item`."""

    data: Any = msgspec.UNSET
    id: str | None = None
    event: str | None = None
    comment: list[str] | None = None


class Reply(Protocol):
    """Writer of the response to one request."""

    request_id: str

    @property
    def is_cancelled(self) -> bool:
        """True once the caller stopped, killed or disconnected. Further writes are allowed and have no effect."""

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, on the loop, when the caller stops, kills or disconnects, or if it already has."""

    def token(self, token_id: int) -> None:
        """Write one more token of choice 0 and nothing else: the fast path."""

    def item(self, value: Any) -> None:
        """Write any value that msgspec encodes, one as `Bare` or `AnnotatedValue`; models write `EngineOutput`."""

    def finish(self) -> None:
        """End the response."""

    def fail(self, error: BaseException) -> None:
        """End the response with this error."""


Handler = Callable[[Request, Reply], None]
"""Function that starts the work and returns immediately; the transport passes its exceptions to `reply.fail`."""


class Item(Struct):
    """Response element other than a bare token (`Annotated` in Dynamo)."""

    data: bytes | None
    """Encoded value, None where the item is only an event or a comment."""
    codec: str = "msgpack"
    id: str | None = None
    event: str | None = None
    comment: list[str] | None = None


class Receiver(Protocol):
    """Receiver of the response to one request."""

    def on_token(self, token_id: int) -> None:
        """Handle one more token of choice 0."""

    def on_item(self, item: Item) -> None:
        """Handle one more element."""

    def on_end(self) -> None:
        """Handle the end of the response; the last call."""

    def on_error(self, error: Exception) -> None:
        """Handle the error that ends the response (a `DynamoException`); the last call."""


@runtime_checkable
class MovableReceiver(Receiver, Protocol):
    """Receiver whose request can be migrated."""

    def leaves_silent_worker(self) -> bool:
        """Return True to end the call with `Disconnected` now; called while the worker is unresponsive."""


class Call(Protocol):
    """Caller's handle on a running request."""

    instance_id: int

    def stop(self) -> None:
        """Request a graceful end; the receiver still gets the remaining elements."""

    def kill(self) -> None:
        """Cancel the request; the receiver is not called any more."""


OnDone = Callable[[int, Exception | None], None]
"""Callback at the end of a call with the instance id and the error, None without error or for a killed call."""


class Target(Struct, frozen=True):
    """Instance as seen by a transport."""

    instance_id: int
    address: str
    """`host:port`, or a NATS subject."""
    path: str
    """Handler path: `<instance hex>/<ns>/<comp>/<ep>`."""
    codec: str
    """Codec that the worker reads."""
    is_batched: bool
    """True if the worker supports batched response frames."""
    has_pulse: bool = False
    """True if the worker answers liveness probes."""

    @classmethod
    def of(cls, instance: InstanceAddress) -> "Target":
        """Return the target of a discovery record."""
        address, _, path = (instance.transport.tcp or "").partition("/")
        if instance.transport.nats_tcp is not None:
            address, path = instance.transport.nats_tcp, f"{instance.instance_id:x}/{instance.endpoint_id.handler_path}"
        codec = instance.request_plane_codec or "json"
        version = instance.response_frames
        return cls(instance.instance_id, address, path, codec, is_batched=version >= 1, has_pulse=version >= 2)


class RequestPlane(Protocol):
    """Transport between processes, in both roles: caller and worker."""

    @property
    def speaks_batched(self) -> bool:
        """True if the listener supports batched frames."""

    def send(self, target: Target, request: Request, receiver: Receiver, on_done: OnDone) -> Call | None:
        """Send over the existing connection; return None without one: call `connect` first.

        Later errors go to the receiver. Raise `InvalidArgument` for an oversized request.
        """

    async def connect(self, target: Target) -> None:
        """Connect to the target. Raise `CannotConnect`."""

    async def listen(self) -> None:
        """Start accepting requests; further calls have no effect."""

    async def open(self, path: str) -> None:
        """Accept requests for that path, on transports where a listener alone is not enough."""

    def address(self, path: str) -> TransportAddress:
        """Return the address of the handler at that path. Valid once `listen` and `open` have returned."""

    async def close(self) -> None:
        """Close every connection; open receivers get a `WorkerUnavailable`, open replies are cancelled."""


@runtime_checkable
class FramedPlane(RequestPlane, Protocol):
    """Transport that supports request streams (`Request.frames`)."""

    carries_frames: bool


@runtime_checkable
class WatchfulPlane(RequestPlane, Protocol):
    """Transport that distinguishes an unresponsive worker from an idle one."""

    def is_silent(self, target: Target) -> bool:
        """Return True while the worker's acknowledgement or probe response is overdue: prefer another worker."""

    def suspect(self, target: Target) -> None:
        """Probe a worker that left the registry: its calls end with `Disconnected` unless it responds."""
