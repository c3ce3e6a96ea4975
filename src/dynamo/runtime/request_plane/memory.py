"""Request plane in memory: for tests and for graphs in one process."""

import asyncio
import itertools
import logging
from typing import Any

from msgspec import UNSET

from dynamo.core.boundaries import ErrorBoundary
from dynamo.core.codec import encode
from dynamo.core.errors import CannotConnect, Disconnected, DynamoException, InvalidArgument
from dynamo.protocols.discovery import TransportAddress
from dynamo.runtime.request_plane.base import AnnotatedValue, Bare, Item, OnDone, Receiver, Request, Target
from dynamo.runtime.request_plane.reply import CLOSED, ReplyBase
from dynamo.runtime.request_plane.wire_errors import from_wire, to_wire
from dynamo.runtime.server import Dispatcher

logger = logging.getLogger(__name__)

BODY_BYTES_MAX = 32 << 20  # The TCP plane's default limit, so that both planes reject the same requests.


class MemoryHub:
    """In-memory network: its planes by address."""

    def __init__(self) -> None:
        self.planes: dict[str, MemoryPlane] = {}
        self.serial = itertools.count(1)


class MemoryPlane:
    """Request plane of one member of a hub."""

    speaks_batched = True
    """Members exchange tokens directly, without frames."""
    carries_frames = True

    def __init__(self, dispatcher: Dispatcher, hub: MemoryHub | None = None) -> None:
        self._dispatcher = dispatcher
        self._hub = hub if hub is not None else PROCESS_HUB
        self._address = f"memory:{next(self._hub.serial)}"
        self._calls: set[MemoryCall] = set()
        self._replies: set[MemoryReply] = set()
        self._is_closed = False

    def send(self, target: Target, request: Request, receiver: Receiver, on_done: OnDone) -> "MemoryCall | None":
        if len(request.body) > BODY_BYTES_MAX:
            raise InvalidArgument(f"request of {len(request.body)} bytes exceeds the limit of {BODY_BYTES_MAX}")
        plane = self._hub.planes.get(target.address)
        if plane is None:
            return None
        call = MemoryCall(self, target.instance_id, receiver, on_done)
        self._calls.add(call)
        asyncio.get_running_loop().call_soon(plane.accept, target.path, request, call)
        return call

    async def connect(self, target: Target) -> None:
        if target.address not in self._hub.planes:
            raise CannotConnect(f"no listener at {target.address}")

    async def listen(self) -> None:
        self._hub.planes[self._address] = self

    async def open(self, path: str) -> None:
        """Do nothing: every path is served at the member's address."""

    def address(self, path: str) -> TransportAddress:
        return TransportAddress(tcp=f"{self._address}/{path}")

    async def close(self) -> None:
        self._is_closed = True
        self._hub.planes.pop(self._address, None)
        for call in list(self._calls):
            call.reply_gone()
            call.end(Disconnected("request plane closed"))
        for reply in list(self._replies):
            reply.call.end(Disconnected("connection to worker lost"))
            reply.kill()

    def accept(self, path: str, request: Request, call: "MemoryCall") -> None:
        """Dispatch a request from another member."""
        if call.is_over:
            return
        if self._is_closed:
            call.end(Disconnected("connection to worker lost"))
            return
        reply = MemoryReply(request, call, self._replies)
        try:
            served = self._dispatcher.admit(path)
        except DynamoException as error:
            call.end(error)
            return
        call.reply = reply
        self._replies.add(reply)
        served.start(request, reply)
        if call.is_stopped:
            reply.stop()

    def forget(self, call: "MemoryCall") -> None:
        self._calls.discard(call)


class MemoryCall:
    """Call between two members of a hub."""

    def __init__(self, plane: MemoryPlane, instance_id: int, receiver: Receiver, on_done: OnDone) -> None:
        self.instance_id = instance_id
        self.receiver = receiver
        self.reply: MemoryReply | None = None
        self.is_over = False
        self.is_stopped = False
        self._plane = plane
        self._on_done = on_done

    def stop(self) -> None:
        self.is_stopped = True
        if self.reply is not None and not self.is_over:
            self.reply.stop()

    def kill(self) -> None:
        if not self.is_over:
            self._close(None)
            self.reply_gone()

    def reply_gone(self) -> None:
        reply, self.reply = self.reply, None  # The two refer to each other; no longer, so that both are freed at once.
        if reply is not None:
            reply.kill()

    def end(self, error: Exception | None) -> None:
        if self.is_over:
            return
        self._close(error)
        self.reply = None
        if error is None:
            self.receiver.on_end()
        else:
            self.receiver.on_error(error)

    def _close(self, error: Exception | None) -> None:
        self.is_over = True
        self._plane.forget(self)
        self._on_done(self.instance_id, error)


class MemoryReply(ReplyBase):
    """Reply of the worker to a `MemoryCall`."""

    __slots__ = ("_codec", "_open", "call")

    def __init__(self, request: Request, call: MemoryCall, open_replies: "set[MemoryReply]") -> None:
        super().__init__(request.id)
        self.call = call
        self._codec = request.codec
        self._open = open_replies

    def token(self, token_id: int) -> None:
        if not self._state & CLOSED:
            self._deliver(lambda: self.call.receiver.on_token(token_id))

    def item(self, value: Any) -> None:
        if not self._state & CLOSED:
            item = self._item(value)
            self._deliver(lambda: self.call.receiver.on_item(item))

    def _item(self, value: Any) -> Item:
        if type(value) is AnnotatedValue:
            data = None if value.data is UNSET else encode(value.data, self._codec)
            return Item(data, self._codec, value.id, value.event, value.comment)
        return Item(encode(value.value if type(value) is Bare else value, self._codec), self._codec)

    def write_end(self) -> None:
        self.call.end(None)

    def write_error(self, error: BaseException) -> None:
        self.call.end(from_wire(to_wire(error)))

    def _done(self, error: BaseException | None) -> None:
        self._open.discard(self)
        super()._done(error)

    def _deliver(self, deliver: Any) -> None:
        with ErrorBoundary(self._receiver_failed):
            deliver()

    def _receiver_failed(self, error: Exception) -> None:
        logger.error("receiver of request %s failed", self.request_id, exc_info=error)
        self.call.end(DynamoException(f"receiver failed: {error}"))
        self.kill()


PROCESS_HUB = MemoryHub()
"""Default hub of the planes in this process."""
