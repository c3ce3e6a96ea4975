"""Realtime: a conversation over a WebSocket, forwarded event by event to one worker.

The first `session.update` names the model. From then on each client event is a frame of one request, and each item of
the response stream is an event for the client.
"""

import asyncio
import logging
import random
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from dynamo.core.codec import decode, encode, json_decode, json_encode
from dynamo.core.threads import in_few_threads
from dynamo.http.server.exchange import Exchange
from dynamo.http.server.websocket import WebSocket
from dynamo.runtime.request_plane.base import Call, Item
from dynamo.runtime.request_plane.request_frames import RequestFrames
from dynamo.serving.answers import BaseAnswer, Closed
from dynamo.serving.choice import Choice
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.request_state import RequestState
from dynamo.serving.served_model import ServedModel

logger = logging.getLogger(__name__)

END_S = 10.0  # Maximum wait for the worker to end its stream after the client has disconnected.
INVALID_REQUEST, SERVER_ERROR = "invalid_request_error", "server_error"
COMPLETE = "stream complete"


class RealtimeAnswer(BaseAnswer):
    """One conversation: the receiver of its single request."""

    def __init__(
        self, exchange: Exchange, state: RequestState, closed: Closed, *, socket: WebSocket, model: ServedModel
    ) -> None:
        super().__init__(exchange, state, closed, lambda _generation, _error: False)
        exchange.on_disconnect = None  # The socket reports disconnects.
        self._socket = socket
        self._model = model
        self._frames = RequestFrames()
        self._frames.follow(socket)
        self._codec = "msgpack"
        self._call: Call | None = None

    async def open(self, headers: Mapping[str, str], metadata: Mapping[str, str]) -> None:
        """Send the request to a worker. Raise the errors of sending."""
        call = await self._model.send(
            b"",
            self,
            request_id=self.state.request_id,
            instance_id=None,
            headers=headers,
            metadata=metadata,
            exclude=frozenset(),
            frames=self._frames,
        )
        if self.is_over:
            call.kill()
            return
        self._call = call
        self._codec = self._model.client.codec_of(call.instance_id)

    def forward(self, event: dict[str, Any]) -> None:
        """Forward one client event to the worker."""
        if not self.is_over:
            self._frames.add(encode(event, self._codec))

    async def forward_long(self, event: dict[str, Any]) -> None:
        """Forward an event that was decoded in a thread, and is encoded in one."""
        if not self.is_over:
            data = await in_few_threads(partial(encode, event, self._codec), "event writing", 1)
            if not self.is_over:
                self._frames.add(data)

    def client_left(self) -> None:
        """End the request: the client has disconnected, so no more events arrive and no response can be delivered."""
        if self.is_over:
            return
        self.is_over = True
        with self._closing("", None):
            self._frames.end()
            call, self._call = self._call, None
            if call is not None:
                call.stop()
                asyncio.get_running_loop().call_later(END_S, call.kill)

    def spoke_s(self, now_s: float) -> float:
        """Return the current time: a conversation may be idle for as long as its client keeps it open."""
        return now_s

    # Receiver interface of the request plane.

    def on_token(self, token_id: int) -> None:
        """Ignore the token: a bare token is not an event."""
        self._not_an_event(token_id)

    def on_item(self, item: Item) -> None:
        """Send one event to the client."""
        if self.is_over or item.data is None:
            return
        event = decode(item.data, item.codec)
        if isinstance(event, dict) and isinstance(event.get("type"), str):
            self._socket.send(json_encode(event))
        else:
            self._not_an_event(event)

    def _not_an_event(self, value: Any) -> None:
        logger.warning("worker of model %s sent %.80r: expected an event with a type", self._model.name, value)
        self._socket.send(json_encode(error_event("Internal server error", SERVER_ERROR)))

    def on_end(self) -> None:
        """End the conversation: the worker has completed its stream."""
        if not self.is_over:
            self.is_over = True
            with self._closing("", None):
                self._frames.end()
                self._socket.close(reason=COMPLETE)

    def on_error(self, error: Exception) -> None:
        """Fail the conversation with the worker's error."""
        self.fail(error)

    # Response interface.

    def touch(self, choice: Choice) -> None:
        """Do nothing: a conversation has no choices of tokens."""

    def complete(self) -> None:
        """Raise: a conversation has no generations that could complete it."""
        raise AssertionError("a response without generations was completed by a generation")

    def write_error(self, error: ErrorAnswer) -> None:
        """Send the error event and close the socket."""
        kind = INVALID_REQUEST if error.status < 500 else SERVER_ERROR
        self._socket.send(json_encode(error_event(error.message, kind)))
        self._socket.close(reason=COMPLETE)

    def _cancel_generations(self) -> None:
        self._frames.end()
        call, self._call = self._call, None
        if call is not None:
            call.kill()


def error_event(message: str, kind: str, code: str | None = None, param: str | None = None, about: Any = None) -> Any:
    """Return an error event; `about` is the id of the client event that caused it."""
    about = about if isinstance(about, str) else None
    error = {"type": kind, "code": code, "message": message, "param": param, "event_id": about}
    return {"type": "error", "event_id": event_id(), "error": error}


def created_event() -> dict[str, Any]:
    """Return the first event of a conversation, sent to the client."""
    return {"type": "session.created", "event_id": event_id(), "session": {"type": "realtime"}}


def event_id() -> str:
    """Return a new event id. It protects nothing, so it comes from a generator that needs no system call."""
    return f"event_{uuid.UUID(int=random.getrandbits(128), version=4)}"


def read_event(data: bytes | bytearray) -> dict[str, Any] | None:
    """Return a client's event; None if the data is not a JSON object with a type."""
    try:
        event = json_decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("type"), str) else None


def model_of(event: Mapping[str, Any]) -> str | None:
    """Return the model that an event names."""
    session = event.get("session") if event.get("type") == "session.update" else None
    model = session.get("model") if isinstance(session, dict) else None
    return model if isinstance(model, str) else None
