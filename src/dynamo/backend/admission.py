"""Admission: limits of the requests in the engine and in the queue; rejects requests above them."""

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import msgspec

from dynamo.core.boundaries import ErrorBoundary, Rollback, logged
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.codec import decode
from dynamo.core.errors import Cancelled, DynamoException, EngineShutdown, InvalidArgument, WorkerOverloaded
from dynamo.core.tracing import Span, Value
from dynamo.protocols.engine import EngineOutput, PreprocessedRequest
from dynamo.runtime.request_plane.base import Reply, Request

logger = logging.getLogger(__name__)

SLOTS_MAX = 10_000  # Default limit: more requests indicate a leak, and each keeps its prompt in memory.


class Watcher(Protocol):
    """Observer of the admission's wait times."""

    def rejected(self) -> None:
        """Record that a request was rejected because slots and queue were full."""

    def began(self, waited_s: float) -> None:
        """Record that a request was submitted to the engine."""

    def answered(self, after_s: float) -> None:
        """Record that the first piece of a response was written."""


class NullWatcher:
    """A watcher that does nothing."""

    def rejected(self) -> None: ...

    def began(self, waited_s: float) -> None: ...

    def answered(self, after_s: float) -> None: ...


class AdmittedRequest:
    """One request's reply object for the engine, and its slot until the response ends.

    After the first piece of a response `token` and `item` are the request plane's own methods, without overhead.
    """

    __slots__ = ("_admission", "entered_s", "inner", "is_open", "item", "request", "request_id", "token")

    def __init__(self, admission: "Admission", request: PreprocessedRequest, inner: Reply, entered_s: float) -> None:
        self._admission = admission
        self.inner = inner
        self.request = request
        self.request_id = inner.request_id
        self.entered_s = entered_s
        self.is_open = True
        self.token: Callable[[int], None] = self._first_token
        self.item: Callable[[Any], None] = self._first_item

    @property
    def is_cancelled(self) -> bool:
        return self.inner.is_cancelled

    @property
    def is_killed(self) -> bool:
        """Whether nothing that the engine writes is sent any more."""
        return not self.is_open or getattr(self.inner, "is_killed", False)

    def on_cancel(self, callback: Callable[[], None]) -> None:
        self.inner.on_cancel(callback)

    def finish(self) -> None:
        if self.is_open:
            self.inner.finish()
            self._admission.leave(self)

    def fail(self, error: BaseException) -> None:
        if self.is_open:
            self.inner.fail(error)
            self._admission.leave(self)

    def close(self) -> None:
        """Mark the response as over. Its first piece may not have come: its own methods would leave it in a reference cycle."""
        self.is_open = False
        self.token, self.item = self.inner.token, self.inner.item

    def _first_token(self, token_id: int) -> None:
        self._begin_answer()
        self.token(token_id)

    def _first_item(self, value: Any) -> None:
        self._begin_answer()
        self.item(value)

    def _begin_answer(self) -> None:
        self.token, self.item = self.inner.token, self.inner.item
        self._admission.answered(self)


class Admission:
    """All requests of a worker, running or waiting for a slot."""

    def __init__(
        self,
        begin: Callable[[PreprocessedRequest, Reply], None],
        cancel: Callable[[Reply], None],
        *,
        slots: int | None = None,
        queue_max: int = 0,
        watcher: Watcher | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.slots = SLOTS_MAX if slots is None else slots
        self.queue_max = queue_max
        self.running: set[AdmittedRequest] = set()
        self.queue: deque[AdmittedRequest] = deque()
        self.entered = 0
        self.refusal: DynamoException | None = None
        """The error of new requests after `refuse`."""
        self._begin = begin
        self._cancel = cancel
        self._watcher = watcher or NullWatcher()
        self._clock = clock or SystemClock()

    @property
    def requests(self) -> int:
        """The number of running and waiting requests."""
        return len(self.running) + len(self.queue)

    def enter(self, request: PreprocessedRequest, reply: Reply) -> None:
        """Start a request or queue it. Raise `WorkerOverloaded`, `EngineShutdown` or the engine's errors."""
        if self.refusal is not None:
            raise self.refusal
        self.entered += 1
        ticket = AdmittedRequest(self, request, reply, self._clock.now())
        if len(self.running) < self.slots:
            self._run(ticket)
        elif len(self.queue) < self.queue_max:
            self.queue.append(ticket)
        else:
            ticket.close()
            self._watcher.rejected()
            raise WorkerOverloaded("Server overloaded: worker at capacity")
        reply.on_cancel(lambda: self.cancel(ticket))

    def answered(self, ticket: AdmittedRequest) -> None:
        """Record that the first piece of the response is about to be written."""
        self._watcher.answered(self._clock.now() - ticket.entered_s)

    def cancel(self, ticket: AdmittedRequest) -> None:
        """Cancel a request. A final `cancelled` item is sent for callers that still read after requesting a stop."""
        if not ticket.is_open:
            return
        if ticket in self.running:
            self._cancel(ticket)
        ticket.inner.item(EngineOutput([], 0, finish_reason="cancelled"))
        ticket.inner.finish()
        self.leave(ticket)

    def leave(self, ticket: AdmittedRequest) -> None:
        """Release the slot of a completed request; the request that has waited longest takes it."""
        ticket.close()
        if ticket not in self.running:
            self.queue.remove(ticket)
            return
        self.running.discard(ticket)
        while self.queue and len(self.running) < self.slots:
            waiting = self.queue.popleft()
            with ErrorBoundary(waiting.inner.fail):
                self._run(waiting)

    def refuse(self, refusal: DynamoException | None = None) -> None:
        """Reject new requests from now on; present requests continue."""
        self.refusal = refusal or EngineShutdown("the worker is shutting down")

    def readmit(self) -> None:
        """Accept new requests again."""
        self.refusal = None

    def cut(self, error: DynamoException) -> None:
        """Fail every present request with `error`."""
        self.refuse()
        waiting, self.queue = self.queue, deque()
        running, self.running = self.running, set()
        for ticket in (*running, *waiting):
            ticket.close()
            ticket.inner.fail(error)
        for ticket in running:
            # The engine may be broken; the callers have received the error already.
            with logged(logger, "failed to cancel request %s in the engine", ticket.request_id):
                self._cancel(ticket)

    def _discard(self, ticket: AdmittedRequest) -> None:
        ticket.close()
        self.running.discard(ticket)

    def _run(self, ticket: AdmittedRequest) -> None:
        self.running.add(ticket)
        with Rollback(partial(self._discard, ticket)):
            self._begin(ticket.request, ticket)
        self._watcher.began(self._clock.now() - ticket.entered_s)


class _TracedFields(msgspec.Struct):
    """Fields of an encoded request that its span has."""

    model: str = ""
    token_ids: list[int] = []


def request_facts(prepared: Any) -> dict[str, Value]:
    """Return the attributes of a request for its span; a request that its engine decodes is read here too."""
    if isinstance(prepared, Request):
        try:
            prepared = decode(prepared.body, prepared.codec, _TracedFields)
        except InvalidArgument:
            return {}  # The engine's handler refuses it.
    if isinstance(prepared, PreprocessedRequest | _TracedFields):
        return {"model": prepared.model, "input_tokens": len(prepared.token_ids)}
    return {"model": str(prepared.get("model")) if isinstance(prepared, dict) else prepared.model}


class TracedReply:
    """Reply that records the end of its response in a span.

    `token` is the wrapped reply's own method, so that tracing adds no cost per token.
    """

    __slots__ = ("_inner", "_span", "request_id", "token")

    def __init__(self, inner: Reply, span: Span) -> None:
        self._inner = inner
        self._span = span
        self.request_id = inner.request_id
        self.token: Callable[[int], None] = inner.token

    @property
    def is_cancelled(self) -> bool:
        return self._inner.is_cancelled

    def on_cancel(self, callback: Callable[[], None]) -> None:
        self._inner.on_cancel(callback)

    def item(self, value: Any) -> None:
        if isinstance(value, EngineOutput) and value.finish_reason is not None:
            self._span.set("finish_reason", value.finish_reason)
            if value.completion_usage is not None:
                self._span.set("input_tokens", value.completion_usage.prompt_tokens)
                self._span.set("output_tokens", value.completion_usage.completion_tokens)
        self._inner.item(value)

    def finish(self) -> None:
        self._span.end(Cancelled("the caller left") if self._inner.is_cancelled else None)
        self._inner.finish()

    def fail(self, error: BaseException) -> None:
        self._span.end(error)
        self._inner.fail(error)
