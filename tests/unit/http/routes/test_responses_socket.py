"""Requests over a WebSocket: their admission, their order, and messages that are none."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.scripted_engine.stack import NAME, ScriptedStack, open_stack
from tests.settle import turns

from dynamo.api.responses.session import ResponseSession
from dynamo.core.metrics import MetricsRegistry
from dynamo.http.routes.responses_socket import WAITING_MAX, ResponsesConnection, ResponsesSocket, TurnAccounts
from dynamo.http.server.exchange import Exchange
from dynamo.http.server.gate import Account, Keys
from dynamo.http.server.websocket import Op, WebSocketMessage
from dynamo.serving.errors import ErrorAnswer


def accounts(keys: Keys | None) -> TurnAccounts:
    context: Any = SimpleNamespace(keys=keys, registry=MetricsRegistry(), metrics_prefix="x")
    return TurnAccounts(context)


def test_socket_requests_are_admitted_by_the_limits_of_their_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[[keys]]\nname = "a"\nkey = "secret-key"\nrequests_per_minute = 1\n')
    keys = Keys([], str(path))
    one, owner = accounts(keys), keys.ring.owner_of("a")
    assert isinstance(one.admit(owner), Account)
    refused = one.admit(owner)
    assert isinstance(refused, ErrorAnswer) and refused.status == 429
    unknown = one.admit("b")
    assert isinstance(unknown, ErrorAnswer) and unknown.status == 401
    assert accounts(None).admit(owner) is None
    assert one.admit(None) is None


class Socket:
    """Socket of a connection, which records the written events."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.is_paused = False

    def send(self, text: bytes) -> None:
        self.sent.append(json.loads(text))

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


class Scene:
    """One connection; each request waits until it is released."""

    def __init__(self, stack: ScriptedStack, keys: Keys | None = None, account: Account | None = None) -> None:
        self.socket = Socket()
        self.bodies: list[Any] = []
        self.sessions: list[ResponseSession] = []
        self.open: list[Exchange] = []
        exchange: Any = SimpleNamespace(account=account, headers=[(b"x-request-id", b"r"), (b"x-tenant", b"t")])
        pages = ResponsesSocket(stack.pipeline, self.answer, accounts(keys))
        self.connection = ResponsesConnection(pages, exchange, self.socket)  # type: ignore[arg-type]

    def answer(self, exchange: Exchange, session: ResponseSession) -> None:
        self.bodies.append(json.loads(bytes(exchange.body)))
        self.sessions.append(session)
        self.open.append(exchange)

    def send_event(self, **event: Any) -> None:
        self.connection.on_message(WebSocketMessage(Op.TEXT, json.dumps(event).encode()))


async def settle() -> None:
    await turns(20)


async def test_connection_answers_one_request_at_a_time_with_one_session() -> None:
    async with open_stack() as stack:
        scene = Scene(stack)
        scene.send_event(type="response.create", model=NAME, input="a", stream=True, event_id="e")
        scene.send_event(type="response.create", model=NAME, input="b")
        await settle()
        assert scene.bodies == [{"model": NAME, "input": "a"}]
        assert scene.open[0].headers == [(b"x-tenant", b"t")]
        scene.open[0].write(b'event: x\ndata: {"type":"x"}\n\n: alive\n\n')
        scene.open[0].end(b"data: [DONE]\n\n")
        await settle()
        assert [body["input"] for body in scene.bodies] == ["a", "b"]
        assert scene.socket.sent == [{"type": "x"}]
        assert scene.sessions[0] is scene.sessions[1]
        scene.open[1].refuse(ErrorAnswer(404, "gone", param="model", code="lost"))
        await settle()
        assert scene.socket.sent[-1]["status"] == 404
        assert scene.socket.sent[-1]["error"]["code"] == "lost"


async def test_first_socket_request_is_admitted_with_its_handshake(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[[keys]]\nname = "a"\nkey = "secret-key"\nrequests_per_minute = 1\nconcurrent_requests = 1\n')
    keys = Keys([], str(path))
    async with open_stack() as stack:
        handshake = accounts(keys).admit(keys.ring.owner_of("a"))
        assert isinstance(handshake, Account)
        scene = Scene(stack, keys, handshake)
        scene.send_event(type="response.create", model=NAME, input="a")
        await settle()
        assert scene.open[0].account is handshake
        scene.open[0].end(b"data: [DONE]\n\n")
        scene.send_event(type="response.create", model=NAME, input="b")
        await settle()
        assert (scene.socket.sent[-1]["status"], len(scene.bodies)) == (429, 1)


async def test_connection_pauses_reading_while_too_many_requests_wait() -> None:
    async with open_stack() as stack:
        scene = Scene(stack)
        for number in range(WAITING_MAX + 1):
            scene.send_event(type="response.create", model=NAME, input=str(number))
            await settle()
        assert scene.socket.is_paused
        scene.open[0].end(b"data: [DONE]\n\n")
        await settle()
        assert not scene.socket.is_paused


async def test_closed_connection_stops_its_request_and_drops_the_waiting_ones() -> None:
    async with open_stack() as stack:
        scene = Scene(stack)
        scene.send_event(type="response.create", model=NAME, input="a")
        scene.send_event(type="response.create", model=NAME, input="b")
        await settle()
        scene.connection.on_close()
        await settle()
        assert scene.open[0].disconnected
        assert len(scene.bodies) == 1


async def test_connection_refuses_malformed_requests() -> None:
    async with open_stack() as stack:
        scene = Scene(stack)
        scene.connection.on_message(WebSocketMessage(Op.BINARY, b"x"))
        scene.connection.on_message(WebSocketMessage(Op.TEXT, b"{"))
        scene.send_event(type="other")
        scene.send_event(type="response.create", stream_options={})
        await settle()
        assert [event["error"]["param"] for event in scene.socket.sent] == [None, "type", "type", "stream_options"]
        assert {event["status"] for event in scene.socket.sent} == {400}
        assert all(isinstance(event["error"]["code"], str) for event in scene.socket.sent)
        assert not scene.bodies
