"""Relay: requests passed to a worker unchanged, and responses built from the worker's output.

A `Form` defines the response of one endpoint, without connections; `RelayAnswer` writes it.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from dynamo.core.boundaries import ErrorBoundary
from dynamo.core.codec import decode, msgpack_encode
from dynamo.core.errors import CannotConnect, DynamoException, InvalidArgument, Unknown
from dynamo.core.tasks import TaskOwner
from dynamo.protocols.engine import CompletionUsage, PreprocessedRequest, Routing
from dynamo.runtime.request_plane.base import Call, Item
from dynamo.serving.answers import BaseAnswer, Closed
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.extras import EXPLAIN, YES, explained
from dynamo.serving.forwarded_request import ForwardedRequest
from dynamo.serving.request_state import RequestState
from dynamo.serving.response_form import Form, Whole
from dynamo.serving.response_stream import ResponseStream
from dynamo.serving.served_model import ServedModel
from dynamo.serving.text_models import ForwardedAnswer

if TYPE_CHECKING:
    from dynamo.kv_router.router import Decision
    from dynamo.routing.kv_push_router import RequestProgress

KEPT_BYTES_MAX = 512 << 20  # Limit of a response that is sent whole; larger than any video wanted as JSON.

OnSuccess = Callable[[float], None]
"""Called with the duration in seconds of a successful request."""


class Placement:
    """Choice of a worker for one token request whose response is relayed.

    A KV router, if present, chooses and counts the request as its worker's until `release`. Otherwise the request itself
    decides, then its session, then the client's router mode.
    """

    def __init__(self, model: ServedModel, request: PreprocessedRequest, body: bytes = b"") -> None:
        """`body`: the bytes for the worker, if they differ from the encoded request."""
        self._model = model
        self._request = request
        self._body = body
        self._booked: Callable[[], None] | None = None
        """Ends the booking of the request in the router or session that counts it."""
        self.decision: Decision | None = None
        """Latest decision of the router."""

    @property
    def chosen(self) -> int | None:
        """Worker that the request names. Raise `InvalidArgument` for an unknown worker."""
        routing = self._request.routing
        chosen = routing.backend_instance_id if routing is not None else None
        if chosen is not None and chosen not in self._model.client.instance_ids():
            raise InvalidArgument(f"backend_instance_id {chosen} is not a worker of model `{self._model.name}`")
        return chosen

    @property
    def is_free(self) -> bool:
        """Whether another worker may be chosen if the chosen one is unreachable."""
        return self.chosen is None

    async def choose(
        self, request_id: str, progress: "RequestProgress", tried: frozenset[int], metadata: Mapping[str, str]
    ) -> tuple[bytes, int | None]:
        """Return body and worker; None if the client's mode chooses. Raise the errors of the router."""
        self.release()
        chosen = self.chosen
        found = await self._model.choose(self._request, request_id, progress, tried, metadata)
        if found is None:
            bound = self._model.bound(self._request, tried) if chosen is None else chosen
            return self._body or msgpack_encode(self._request), bound
        served, decision = found
        if served.kv is not None:
            self._booked = partial(served.kv.release, request_id)
        self.decision = decision
        if self._body:
            return self._body, decision.worker_id
        routing = msgspec.structs.replace(self._request.routing or Routing(), dp_rank=decision.dp_rank)
        return msgpack_encode(msgspec.structs.replace(self._request, routing=routing)), decision.worker_id

    def sent(self, request_id: str, worker_id: int) -> None:
        """Record that the worker accepted the request."""
        sessions = self._model.current.sessions
        if sessions is not None and sessions.sent(self._request, request_id, worker_id):
            self._booked = partial(sessions.finish, request_id)

    def release(self) -> None:
        """Release the request's worker in the router or session that counts it."""
        booked, self._booked = self._booked, None
        if booked is not None:
            booked()


class RelayAnswer(ForwardedAnswer):
    """Response in some form; the receiver of its one request."""

    exchange: ResponseStream

    def __init__(
        self,
        exchange: ResponseStream,
        state: RequestState,
        closed: Closed,
        *,
        model: ServedModel,
        tasks: TaskOwner,
        request: bytes,
        form: Form,
        on_success: OnSuccess | None = None,
        prompt: PreprocessedRequest | None = None,
    ) -> None:
        """`prompt`: the description for a router, also sent to the worker if there is no `request`."""

        def ended(answer: BaseAnswer, error_type: str, error: Exception | None) -> None:
            try:
                if self._placement is not None:
                    self._placement.release()
                if self._forwarded is not None and self._forwarded.prefill is not None:
                    state.prefilled_by(self._forwarded.prefill)
            finally:
                closed(answer, error_type, error)

        super().__init__(exchange, state, ended, model=model, tasks=tasks, request=request)
        self._forwarded: ForwardedRequest | None = None
        """The forwarded request, if separate workers compute prompts."""
        self._placement: Placement | None = None
        """The placement otherwise; held until the response is over."""
        if prompt is not None and model.is_decode:
            self._forwarded = ForwardedRequest(model, prompt, self, tasks)
        elif prompt is not None:
            self._placement = Placement(model, prompt, request)
        self.tokens = 0
        """Output tokens so far."""
        self._form = form
        self._on_success = on_success
        self._kept_bytes = 0

    def usage(self) -> CompletionUsage | None:
        """Return the usage reported by the worker."""
        return self._form.usage

    async def forward(self, instance_id: int | None = None) -> None:
        """Send the request to the worker chosen by a router. Raise the error of the last worker tried."""
        forwarded = self._forwarded
        if forwarded is None:
            await super().forward(instance_id)
        else:
            await forwarded.send(self.state.request_id, self.state.headers, self.state.metadata, self.state.frontend)
        way, call = forwarded or self._placement, self._call if forwarded is None else forwarded.call
        if way is not None and self.exchange.header(EXPLAIN) in YES:
            self.exchange.header_bytes += explained(None if call is None else call.instance_id, way.decision)

    async def _send_to(self, body: bytes, instance_id: int | None, tried: frozenset[int]) -> Call:
        placement = self._placement
        if placement is None:
            return await super()._send_to(body, instance_id, tried)
        while True:
            body, instance_id = await placement.choose(self.state.request_id, self, tried, self.state.metadata)
            try:
                call = await super()._send_to(body, instance_id, tried)
                placement.sent(self.state.request_id, call.instance_id)
                return call  # noqa: TRY300 - the rest handles failures
            except CannotConnect:
                if not placement.is_free or instance_id is None:
                    raise
                tried |= {instance_id}
            finally:
                if self.is_over:  # The client disconnected during the send.
                    placement.release()

    def on_token(self, token_id: int) -> None:
        """Handle a bare token."""
        if not self.is_over:
            self._take(lambda: self._form.token(token_id))

    def on_item(self, item: Item) -> None:
        """Handle an output item; an item without a value is an event, which is not for clients."""
        data = item.data
        if self.is_over or data is None:
            return
        self._kept_bytes += len(data)
        if not self._is_stream and self._kept_bytes > KEPT_BYTES_MAX:
            self.fail(Unknown(f"the worker's response exceeds {KEPT_BYTES_MAX >> 20} MB"))
            return
        self._take(lambda: self._form.add(decode(data, item.codec)))

    def _take(self, make: Callable[[], bytes]) -> None:
        try:
            written = make()
        except DynamoException as error:
            self.fail(Unknown(str(error)))
            return
        self._has_spoken = True
        self.tokens = self._form.tokens
        self._spoke_s = time.perf_counter()
        refusal = self._form.refusal
        if refusal is not None and not self.exchange.response_started:
            self.is_over = True
            with self._closing("validation", None):
                self._cancel_generations()
                self._respond(refusal)
        elif written:
            if not self.exchange.response_started:
                self.exchange.open(self._form.media)
            self.exchange.write(written)

    def on_error(self, error: Exception) -> None:
        """Handle a worker failure; a forwarded request has already been retried wherever possible."""
        if self._forwarded is None:
            super().on_error(error)
        else:
            self.fail(error)

    def on_end(self) -> None:
        """Complete the response at the end of the worker's stream."""
        if self.is_over:
            return
        self._call = None
        if self._form.is_heavy:
            self._tasks.start(self._end_in_thread(), "answer")
        else:
            self._end(self._form.end)

    async def _end_in_thread(self) -> None:
        with ErrorBoundary(self.fail):
            last = await asyncio.to_thread(self._form.end)
            if not self.is_over:
                self._end(lambda: last)

    def _end(self, last: Callable[[], Whole | bytes]) -> None:
        self.finish_with(lambda: self._write_end(last()))

    def _write_end(self, written: Whole | bytes) -> None:
        if isinstance(written, Whole):
            self._respond(written)
        else:
            if not self.exchange.response_started:
                self.exchange.open(self._form.media)
            self.exchange.end(written)
        if self._on_success is not None:
            self._on_success(time.perf_counter() - self.state.started_s)

    def complete(self) -> None:
        """Raise `AssertionError`: there are no generations that end."""
        raise AssertionError("a response without generations was completed by one")

    def write_error(self, error: ErrorAnswer) -> None:
        """Write the error."""
        if not self.exchange.response_started:
            self.exchange.refuse(error)
            return
        last = self._form.failure(error)
        if last is None:
            self.exchange.abort()
        else:
            self.exchange.end(last)

    def _cancel_generations(self) -> None:
        super()._cancel_generations()
        if self._forwarded is not None:
            self._forwarded.cancel()

    def _respond(self, whole: Whole) -> None:
        self.exchange.header_bytes += whole.headers
        self.exchange.respond(whole.status, whole.body, whole.content_type)
