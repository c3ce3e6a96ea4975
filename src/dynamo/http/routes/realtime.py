"""Route of realtime conversations: forwards a WebSocket to a worker that supports them."""

import asyncio
import logging
from collections import deque
from functools import partial
from typing import Any
from urllib.parse import parse_qs

from msgspec import Struct

from dynamo.core.codec import json_encode
from dynamo.core.errors import DynamoException, EngineShutdown, NotFound
from dynamo.http.realtime import (
    INVALID_REQUEST,
    SERVER_ERROR,
    RealtimeAnswer,
    created_event,
    error_event,
    model_of,
    read_event,
)
from dynamo.http.routes.table import Operation, RouteContext, RouteTable
from dynamo.http.server.exchange import Exchange
from dynamo.http.server.websocket import Op, WebSocket, WebSocketMessage, accept_key
from dynamo.serving.bodies import decoded, is_short
from dynamo.serving.endpoints import relayed
from dynamo.serving.errors import ErrorAnswer, answer_to
from dynamo.serving.models import Models
from dynamo.serving.pipeline import Pipeline
from dynamo.serving.text_models import text_model

logger = logging.getLogger(__name__)

REALTIME = relayed("realtime", "Realtime")
SUBPROTOCOL = b"realtime"
"""Subprotocol that OpenAI's browser clients request."""
OPENING, DECODING = "opening", "decoding"
"""Reasons why no further events are read."""
EARLY_MAX = 256  # Events that are buffered until the worker is connected.
NOT_A_SOCKET = ErrorAnswer(400, "Connection header did not include 'upgrade' for a WebSocket", label="validation")


def add(routes: RouteTable, context: RouteContext) -> None:
    """Add the route."""
    pages = RealtimePages(context.pipeline, context.models)
    routes.socket(
        "/v1/realtime",
        pages.connect,
        Operation(
            "Hold a realtime conversation over a WebSocket",
            answer={"type": "string", "description": "101: events, as JSON, in both directions"},
            refusals=(400, 503),
            query={"model": {"type": "string"}},
        ),
        variable="DYN_HTTP_SVC_REALTIME_PATH",
    )


class EarlyEvent(Struct, frozen=True):
    """A client's event that waits for the worker."""

    event: dict[str, Any]
    is_long: bool
    """Whether it takes long to encode."""


class RealtimePages(Struct, frozen=True):
    """Handler of the route."""

    pipeline: Pipeline
    models: Models

    def connect(self, exchange: Exchange) -> None:
        """GET /v1/realtime."""
        key = accept_key(exchange)
        if key is None:
            self.pipeline.metrics.count_end(REALTIME.endpoint, "", "stream", NOT_A_SOCKET.label)
            exchange.refuse(NOT_A_SOCKET)
            return
        if self.pipeline.is_draining:
            exchange.refuse(answer_to(EngineShutdown("the frontend is shutting down")))
            return
        offered = (exchange.header(b"sec-websocket-protocol") or b"").split(b",")
        chosen = SUBPROTOCOL if SUBPROTOCOL in [one.strip() for one in offered] else None
        query = parse_qs(exchange.protocol.url.partition(b"?")[2].decode("latin-1"))
        socket = WebSocket(exchange, key, chosen)
        talk = Talk(self, exchange, socket, query["model"][0] if "model" in query else None)
        socket.listen(talk)
        socket.send(json_encode(created_event()))


class Talk:
    """One conversation: validates the client's events and forwards them to the worker."""

    def __init__(self, pages: RealtimePages, exchange: Exchange, socket: WebSocket, model: str | None) -> None:
        self._pages = pages
        self._exchange = exchange
        self._socket = socket
        self._model = model
        self._undecoded: deque[bytes | bytearray] = deque()
        """Messages behind one that takes long to decode, which comes first."""
        self._early: deque[EarlyEvent] = deque()
        self._opening: asyncio.Task[None] | None = None
        self._answer: RealtimeAnswer | None = None
        self._is_closed = False

    def on_message(self, message: WebSocketMessage) -> None:
        """Process one client event."""
        if message.op is Op.BINARY:
            self._refuse("binary frames not supported", "invalid_request")
            return
        if self._undecoded or not is_short(message.data):
            self._undecoded.append(message.data)
            if len(self._undecoded) == 1:
                self._socket.pause_reading(DECODING)
                self._pages.pipeline.tasks.start(self._decode(), "realtime decoding")
            return
        self._on_event(read_event(message.data))

    async def _decode(self) -> None:
        """Decode messages without blocking the loop, in order."""
        while self._undecoded and not self._is_closed:
            try:
                event = await decoded(self._undecoded[0], read_event, "event")
                if event is not None and self._answer is not None:
                    await self._answer.forward_long(event)
                else:
                    self._on_event(event, is_long=True)
            except DynamoException as error:
                self._refuse(answer_to(error).message, "invalid_request")
            self._undecoded.popleft()
        self._undecoded.clear()
        self._socket.resume_reading(DECODING)

    def _on_event(self, event: dict[str, Any] | None, *, is_long: bool = False) -> None:
        if event is None:
            self._refuse("malformed JSON frame", "invalid_request")
        elif self._answer is not None:
            self._answer.forward(event)
        elif self._opening is not None:
            self._early.append(EarlyEvent(event, is_long))
            if len(self._early) > EARLY_MAX:
                self._socket.pause_reading(OPENING)
        else:
            self._choose(event, is_long=is_long)

    def on_close(self) -> None:
        """Notify the worker's request that the client has disconnected."""
        self._is_closed = True
        if self._answer is not None:
            self._answer.client_left()

    def _choose(self, event: dict[str, Any], *, is_long: bool) -> None:
        name = model_of(event) or self._model
        if name is None:
            self._refuse(
                "the first event must be a session.update with a model", "invalid_request", "session.model", event
            )
            return
        self._early.append(EarlyEvent(event, is_long))
        self._opening = self._pages.pipeline.tasks.start(self._open(name), "realtime")

    async def _open(self, name: str) -> None:
        pages = self._pages
        try:
            model = text_model(pages.models, name, REALTIME.model_type, self._exchange.account)
            make = partial(RealtimeAnswer, socket=self._socket, model=model)
            answer = pages.pipeline.adopt(self._exchange, REALTIME.endpoint, model, make, stream=True)
        except DynamoException as error:
            self._not_opened(name, error)
            return
        try:
            model.admit()
            await answer.open(answer.state.headers, answer.state.metadata)
        except Exception as error:  # noqa: BLE001 - the request boundary: the request ends with every kind of error.
            answer.fail(error)
            return
        except asyncio.CancelledError:
            answer.fail(EngineShutdown("the frontend is shutting down"))
            raise
        while self._early and not self._is_closed:
            early = self._early.popleft()
            if early.is_long:
                await answer.forward_long(early.event)
            else:
                answer.forward(early.event)
        if self._is_closed:
            answer.client_left()
            return
        self._answer = answer
        self._socket.resume_reading(OPENING)

    def _not_opened(self, name: str, error: DynamoException) -> None:
        """Send an error event and wait for another session.update: the client may name another model."""
        failure = answer_to(error)
        self._pages.pipeline.metrics.count_end(REALTIME.endpoint, "", "stream", failure.label)
        self._opening = None
        event = self._early.popleft().event
        self._early.clear()
        self._socket.resume_reading(OPENING)
        if isinstance(error, NotFound):
            self._refuse(f"unknown model: {name}", "model_not_found", "session.model", event)
        else:
            self._socket.send(json_encode(error_event(failure.message, SERVER_ERROR, failure.code)))

    def _refuse(self, message: str, code: str, param: str | None = None, event: dict[str, Any] | None = None) -> None:
        about = None if event is None else event.get("event_id")
        self._socket.send(json_encode(error_event(message, INVALID_REQUEST, code, param, about)))
