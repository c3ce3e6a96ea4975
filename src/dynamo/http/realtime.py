"""Realtime: a conversation over a WebSocket, carried event by event to the worker that holds it.

The first `session.update` says which model it is for; from there on every event of the client is a frame of one
request, and every item of the answer an event for the client.
"""

import asyncio
import logging
import random
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo.core.codec import decode, encode, json_decode, json_encode
from dynamo.http.server.protocol import Exchange
from dynamo.http.server.websocket import WebSocket
from dynamo.runtime.request_plane.base import Call, Item
from dynamo.runtime.request_plane.request_frames import RequestFrames
from dynamo.serving.answers import BaseAnswer, Closed
from dynamo.serving.choice import Choice
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.metrics import RequestRecord
from dynamo.serving.served_model import ServedModel

logger = logging.getLogger(__name__)

END_S = 10.0  # A worker whose client has left may end its answer within this time.
INVALID_REQUEST, SERVER_ERROR = "invalid_request_error", "server_error"
COMPLETE = "stream complete"


class RealtimeAnswer(BaseAnswer):
    """One conversation. It is the receiver of its one request."""

    def __init__(
        self, exchange: Exchange, record: RequestRecord, closed: Closed, *, socket: WebSocket, model: ServedModel
    ) -> None:
        super().__init__(exchange, record, closed, lambda _generation, _error: False)
        exchange.on_disconnect = None  # The socket tells.
        self._socket = socket
        self._model = model
        self._frames = RequestFrames()
        self._frames.follow(socket)
        self._codec = "msgpack"
        self._call: Call | None = None

    async def open(self, headers: Mapping[str, str], metadata: Mapping[str, str]) -> None:
        """Finds a worker for it. Raises what sending raises."""
        call = await self._model.send(
            b"",
            self,
            request_id=self.record.request_id,
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

    def tell_worker(self, event: dict[str, Any]) -> None:
        """One event of the client."""
        if not self.is_over:
            self._frames.add(encode(event, self._codec))

    def client_left(self) -> None:
        """Nothing more comes, and nobody hears more."""
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
        """A conversation may be silent for as long as its client wants."""
        return now_s

    # The receiver's side of the request plane.

    def on_token(self, token_id: int) -> None:
        """A bare token is no event."""
        self._not_an_event(token_id)

    def on_item(self, item: Item) -> None:
        """One event for the client."""
        if self.is_over or item.data is None:
            return
        event = decode(item.data, item.codec)
        if isinstance(event, dict) and isinstance(event.get("type"), str):
            self._socket.send(json_encode(event))
        else:
            self._not_an_event(event)

    def _not_an_event(self, said: Any) -> None:
        logger.warning("a worker of %s said %.80r: expected an event with a type", self._model.name, said)
        self._socket.send(json_encode(error_event("Internal server error", SERVER_ERROR)))

    def on_end(self) -> None:
        """The worker has said everything."""
        if not self.is_over:
            self.is_over = True
            with self._closing("", None):
                self._frames.end()
                self._socket.close(reason=COMPLETE)

    def on_error(self, error: Exception) -> None:
        """The worker failed."""
        self.fail(error)

    # The answer's side.

    def touch(self, choice: Choice) -> None:
        """There are no choices of tokens here."""

    def complete(self) -> None:
        """Never asked: there are no generations that end."""
        raise AssertionError("an answer without generations was completed by one")

    def tell(self, error: ErrorAnswer) -> None:
        """Writes the error, and the end."""
        kind = INVALID_REQUEST if error.status < 500 else SERVER_ERROR
        self._socket.send(json_encode(error_event(error.message, kind)))
        self._socket.close(reason=COMPLETE)

    def _cancel_generations(self) -> None:
        self._frames.end()
        call, self._call = self._call, None
        if call is not None:
            call.kill()


def error_event(message: str, kind: str, code: str | None = None, param: str | None = None, about: Any = None) -> Any:
    """What a client is told of a mistake; `about` is the id of the event that made it."""
    about = about if isinstance(about, str) else None
    error = {"type": kind, "code": code, "message": message, "param": param, "event_id": about}
    return {"type": "error", "event_id": event_id(), "error": error}


def created_event() -> dict[str, Any]:
    """The first thing that a client is told."""
    return {"type": "session.created", "event_id": event_id(), "session": {"type": "realtime"}}


def event_id() -> str:
    """A new name for an event. It guards nothing, so no system call is spent on it."""
    return f"event_{uuid.UUID(int=random.getrandbits(128), version=4)}"


def read_event(data: bytes) -> dict[str, Any] | None:
    """A client's event; None for what is none."""
    try:
        event = json_decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("type"), str) else None


def model_of(event: Mapping[str, Any]) -> str | None:
    """The model that an event chooses."""
    session = event.get("session") if event.get("type") == "session.update" else None
    model = session.get("model") if isinstance(session, dict) else None
    return model if isinstance(model, str) else None
