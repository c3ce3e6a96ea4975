"""Responses over a WebSocket: `response.create` messages, answered in order with the events of a stream.

The next request of a connection can continue a response of the same connection even if it is not stored (`store: false`).
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from dynamo.api.responses.session import ResponseSession
from dynamo.core.codec import json_decode, json_encode
from dynamo.core.errors import DynamoException, EngineShutdown
from dynamo.http.realtime import read_event
from dynamo.http.server.exchange import Exchange
from dynamo.http.server.gate import Account, KeyMetrics, Keys
from dynamo.http.server.websocket import Op, WebSocket, WebSocketMessage, accept_key
from dynamo.serving.bodies import decoded
from dynamo.serving.errors import ErrorAnswer, answer_to
from dynamo.serving.local_requests import LocalRequest
from dynamo.serving.open_requests import OpenRequests
from dynamo.serving.response_stream import ResponseStream

if TYPE_CHECKING:
    from dynamo.http.routes.table import RouteContext

CREATE = "response.create"
WAITING_MAX = 16  # Requests that a client may send ahead; reading pauses beyond that.
IGNORED = ("type", "event_id", "stream")
"""Fields of the message that are not fields of the request. Every response is streamed."""
DISALLOWED = ("stream_options", "background")
OWN_HEADERS = frozenset({b"connection", b"upgrade", b"x-request-id", b"x-dynamo-request-id", b"content-length"})
"""Headers of the handshake that are not headers of its requests."""

UPGRADE_NEEDED = ErrorAnswer(400, "GET /v1/responses opens a WebSocket: send the upgrade headers, or use POST")
BINARY = ErrorAnswer(400, "binary messages are not supported: send JSON as text")
NOT_AN_EVENT = ErrorAnswer(400, f"a message must be a JSON object whose `type` is `{CREATE}`", param="type")

TurnHandler = Callable[[ResponseStream, ResponseSession], None]
"""Serves one request with the state of its connection."""


class TurnAccounts:
    """Admission of each request of a connection, as for separate HTTP requests."""

    def __init__(self, context: "RouteContext") -> None:
        self._keys: Keys | None = context.keys
        self._metrics = KeyMetrics(context.registry, context.metrics_prefix)

    def admit(self, owner: str | None) -> Account | ErrorAnswer | None:
        """Return the account of one request, or the reason for its refusal; None on a server without keys."""
        if owner is None or self._keys is None:
            return None
        caller = self._keys.ring.of_owner(owner)
        if caller is None:
            return ErrorAnswer(401, "The API key of this connection is no longer valid", code="invalid_api_key")
        too_much = caller.admit(time.monotonic())
        if too_much is not None:
            self._metrics.refused(caller.name, too_much.limit)
            return ErrorAnswer(429, str(too_much), code="rate_limit_exceeded", label="rate_limit")
        self._metrics.admitted(caller.name)
        return Account(caller, self._metrics, time.monotonic)


class ResponsesSocket(Struct, frozen=True):
    """Handler of `GET /v1/responses`."""

    requests: OpenRequests
    answer: TurnHandler
    accounts: TurnAccounts

    def connect(self, exchange: Exchange) -> None:
        """Open the WebSocket that the request negotiates."""
        key = accept_key(exchange)
        if key is None:
            exchange.refuse(UPGRADE_NEEDED)
            return
        if self.requests.is_draining:
            exchange.refuse(answer_to(EngineShutdown("the frontend is shutting down")))
            return
        socket = WebSocket(exchange, key)
        socket.listen(ResponsesConnection(self, exchange, socket))


class ResponsesConnection:
    """One WebSocket: its queued requests, and the one in progress."""

    def __init__(self, pages: ResponsesSocket, exchange: Exchange, socket: WebSocket) -> None:
        self._pages = pages
        self._socket = socket
        self._account = exchange.account
        """Account of the handshake, also used for the first request."""
        self._owner = None if exchange.account is None else exchange.account.owner
        self._headers = [
            (name, value)
            for name, value in exchange.headers
            if name not in OWN_HEADERS and not name.startswith(b"sec-websocket-")
        ]
        self._session = ResponseSession()
        self._waiting: deque[bytes | bytearray] = deque()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def on_message(self, message: WebSocketMessage) -> None:
        """Queue one message; see `Listener`."""
        if message.op is Op.BINARY:
            self._refuse(BINARY)
            return
        self._waiting.append(message.data)
        if len(self._waiting) >= WAITING_MAX:
            self._socket.pause_reading()
        if self._task is None:
            self._task = self._pages.requests.tasks.start(self._answer_all(), "responses socket")

    def on_close(self) -> None:
        """Cancel the request in progress; see `Listener`."""
        self._is_closed = True
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()

    async def _answer_all(self) -> None:
        try:
            while self._waiting and not self._is_closed:
                data = self._waiting.popleft()
                if len(self._waiting) == WAITING_MAX - 1:
                    self._socket.resume_reading()
                await self._answer(data)
        finally:
            self._task = None

    async def _answer(self, data: bytes | bytearray) -> None:
        """Respond to one message with the events of its response, or with one error."""
        try:
            event = await decoded(data, read_event, "event")
        except DynamoException as error:
            self._refuse(answer_to(error))
            return
        if event is None or event["type"] != CREATE:
            self._refuse(NOT_AN_EVENT)
            return
        for name in DISALLOWED:
            if event.get(name) is not None:
                self._refuse(ErrorAnswer(400, f"`{name}` is not allowed in `{CREATE}`", param=name))
                return
        admitted = self._account or self._pages.accounts.admit(self._owner)
        if isinstance(admitted, ErrorAnswer):
            self._refuse(admitted)
            return
        self._account = None
        body = json_encode({name: value for name, value in event.items() if name not in IGNORED})
        handler = partial(self._turn, self._pages.answer, self._session)
        request = LocalRequest(handler, body, self._headers, admitted)
        is_failed = False
        try:
            async for chunk in request.events():
                is_failed = is_failed or chunk.startswith(b'{"type":"response.failed"')
                self._socket.send(chunk)
        except DynamoException as error:
            self._refuse(answer_to(error))
            is_failed = True
        if request.refusal is not None:
            self._refuse(request.refusal, request)
            is_failed = True
        previous = event.get("previous_response_id")
        if is_failed and isinstance(previous, str):
            self._session.forget(previous)

    @staticmethod
    def _turn(answer: TurnHandler, session: ResponseSession, request: ResponseStream) -> None:
        answer(request, session)

    def _refuse(self, error: ErrorAnswer, request: LocalRequest | None = None) -> None:
        """Send an error event; the route of `request` names its fields."""
        body = error.body() if request is None else request.error_body(error)
        fields: dict[str, Any] = dict(json_decode(body)["error"])
        fields["code"] = fields["code"] if isinstance(fields["code"], str) else fields["type"]
        self._socket.send(json_encode({"type": "error", "status": error.status, "error": fields}))
