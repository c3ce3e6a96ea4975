"""The route of realtime conversations, with a worker in the same process."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.relays import RelayCluster, open_relays
from tests.scripted_engine.stack import DEADLINE_S
from tests.settle import until
from tests.unit.http.server.test_websocket import Line, client_frame

from dynamo.core.codec import encode
from dynamo.core.errors import InvalidArgument
from dynamo.http.routes.realtime import EARLY_MAX, add
from dynamo.http.server.exchange import Exchange
from dynamo.http.server.websocket import Op
from dynamo.llm.register import register_model
from dynamo.model_card.types import ModelInput, ModelType, WorkerType
from dynamo.runtime.streams import BidirectionalHandler
from dynamo.serving.bodies import ESTIMATED_BYTES

UPDATE = {"type": "session.update", "event_id": "e1", "session": {"type": "realtime", "model": "r"}}


class Client(Line):
    """A WebSocket client on the other end of the line."""

    def __init__(self, relays: RelayCluster, url: bytes = b"/v1/realtime", **headers: str) -> None:
        super().__init__()
        self.url = url
        self.exchanges: set[Exchange] = set()
        given = {
            "connection": "Upgrade",
            "upgrade": "websocket",
            "sec-websocket-version": "13",
            "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
            **headers,
        }
        self.headers = [(name.encode(), value.encode()) for name, value in given.items()]
        self.is_stalled = False
        self.turns = None
        self.fd = -1
        self.socket: Any = None
        self.reported = asyncio.Event()
        self.complete = asyncio.Event()
        exchange = Exchange(self, relays.table.hot_handlers()[b"GET", b"/v1/realtime"], keep_alive=True)  # type: ignore[arg-type]
        exchange.handler(exchange)

    def write(self, data: bytes) -> None:
        super().write(data)
        self.reported.set()

    def set_protocol(self, protocol: Any) -> None:
        self.socket = protocol

    def on_response_complete(self) -> None:
        self.complete.set()

    def send_event(self, event: Any) -> None:
        data = event if isinstance(event, bytes) else json.dumps(event).encode()
        self.socket.data_received(client_frame(Op.TEXT, data))

    def leave(self) -> None:
        self.socket.connection_lost(None)

    def events(self) -> list[Any]:
        """The messages received so far."""
        rest, found = self.data.partition(b"\r\n\r\n")[2], []
        while rest:
            op, size, start = rest[0] & 15, rest[1], 2
            if size == 126:
                size, start = int.from_bytes(rest[2:4], "big"), 4
            found.append(rest[start : start + size] if op == Op.CLOSE else json.loads(rest[start : start + size]))
            rest = rest[start + size :]
        return found

    async def until(self, count: int) -> list[Any]:
        """Return the first events when there are that many."""
        async with asyncio.timeout(DEADLINE_S):
            while len(self.events()) < count:
                self.reported.clear()
                await self.reported.wait()
        return self.events()


async def serve(relays: RelayCluster, handler: Any) -> None:
    endpoint = relays.worker.endpoint("tests.r.generate")
    await register_model(
        ModelInput.Text, ModelType.Realtime, endpoint, "r", worker_type=WorkerType.Aggregated, skip_model_assets=True
    )
    await endpoint.serve(BidirectionalHandler(handler, relays.worker.tasks))
    await until(lambda: "r" in relays.models.served())


async def parrot(events: Any, context: Any) -> AsyncIterator[Any]:
    async for event in events:
        if event["type"] == "end":
            return
        if event["type"] == "break":
            raise InvalidArgument("no such thing")
        yield event if event["type"] != "odd" else [1]


async def sizes(events: Any, context: Any) -> AsyncIterator[Any]:
    async for event in events:
        yield {"type": "size", "size": len(event.get("padding", ""))}


async def test_realtime_events_are_relayed_to_the_worker_and_back() -> None:
    async with open_relays(add) as relays:
        await serve(relays, parrot)
        client = Client(relays)
        client.send_event(UPDATE)
        client.send_event({"type": "input_audio_buffer.append", "audio": "AAAA"})
        created, updated, echoed = await client.until(3)
        assert (created["type"], created["session"]) == ("session.created", {"type": "realtime"})
        assert (updated, echoed["audio"]) == (UPDATE, "AAAA")
        client.leave()
        assert relays.pipeline.inflight == 0
        assert 'endpoint="realtime",error_type="",model="r",request_type="stream"' in relays.registry.render()


async def test_realtime_events_received_before_the_worker_is_found_are_queued_in_order() -> None:
    async with open_relays(add) as relays:
        await serve(relays, parrot)
        client = Client(relays)
        client.send_event(UPDATE)
        for number in range(EARLY_MAX + 10):
            client.send_event({"type": "n", "n": number})
        events = await client.until(EARLY_MAX + 12)
        assert [one["n"] for one in events[2:]] == list(range(EARLY_MAX + 10))
        assert "pause" in client.outputs
        assert client.outputs[-1] == "resume"
        client.leave()


async def test_long_realtime_events_are_encoded_off_the_loop_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def recorded(event: Any, codec: str) -> bytes:
        threads.append(threading.current_thread() is threading.main_thread())
        return encode(event, codec)

    monkeypatch.setattr("dynamo.http.realtime.encode", recorded)
    padding = "A" * (ESTIMATED_BYTES + 1)
    async with open_relays(add) as relays:
        await serve(relays, sizes)
        client = Client(relays)
        client.send_event({**UPDATE, "padding": padding})
        client.send_event({"type": "short", "n": 1})
        assert [one["size"] for one in (await client.until(3))[1:]] == [len(padding), 0]
        client.send_event({"type": "long", "padding": padding + "B"})
        client.send_event({"type": "short", "n": 2})
        assert [one["size"] for one in (await client.until(5))[3:]] == [len(padding) + 1, 0]
        assert threads.count(False) == 2
        client.leave()


async def test_realtime_model_can_be_a_query_parameter() -> None:
    async with open_relays(add) as relays:
        await serve(relays, parrot)
        client = Client(relays, b"/v1/realtime?model=r", **{"sec-websocket-protocol": "realtime, other"})
        assert b"sec-websocket-protocol: realtime\r\n" in client.data
        client.send_event({"type": "hello"})
        assert (await client.until(2))[1] == {"type": "hello"}
        client.leave()


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        (b"garbage", "invalid_request", None),
        (b"[]", "invalid_request", None),
        (b'{"type": 5}', "invalid_request", None),
        ({"type": "hello"}, "invalid_request", "session.model"),
        ({**UPDATE, "session": {"model": "no-such-model"}}, "model_not_found", "session.model"),
    ],
)
async def test_invalid_first_event_returns_an_error_and_can_be_retried(
    message: Any, code: str, param: str | None
) -> None:
    async with open_relays(add) as relays:
        await serve(relays, parrot)
        client = Client(relays)
        client.send_event(message)
        error = (await client.until(2))[1]
        assert (error["type"], error["error"]["code"], error["error"]["param"]) == ("error", code, param)
        assert error["error"]["event_id"] == ("e1" if code == "model_not_found" else None)
        client.send_event(UPDATE)
        assert (await client.until(3))[2] == UPDATE
        client.leave()


async def test_realtime_binary_messages_are_refused() -> None:
    async with open_relays(add) as relays:
        client = Client(relays)
        client.socket.data_received(client_frame(Op.BINARY, b"abc"))
        assert (await client.until(2))[1]["error"]["message"] == "binary frames not supported"
        client.leave()


async def test_realtime_worker_end_closes_the_session() -> None:
    async with open_relays(add) as relays:
        await serve(relays, parrot)
        client = Client(relays)
        client.send_event(UPDATE)
        client.send_event({"type": "end"})
        assert (await client.until(3))[2] == b"\x03\xe8stream complete"
        assert relays.pipeline.inflight == 0
        client.leave()


async def test_worker_failure_sends_an_error_and_closes_the_session() -> None:
    async with open_relays(add) as relays:
        await serve(relays, parrot)
        client = Client(relays)
        client.send_event(UPDATE)
        client.send_event({"type": "break"})
        *_, error, end = await client.until(4)
        assert (error["error"]["type"], error["error"]["message"]) == ("invalid_request_error", "no such thing")
        assert end.startswith(b"\x03\xe8")
        client.leave()


async def test_malformed_worker_event_sends_an_error_and_continues() -> None:
    async with open_relays(add) as relays:
        await serve(relays, parrot)
        client = Client(relays)
        for event in (UPDATE, {"type": "odd"}, {"type": "fine"}):
            client.send_event(event)
        *_, error, fine = await client.until(4)
        assert (error["error"]["type"], fine) == ("server_error", {"type": "fine"})
        client.leave()


async def test_realtime_client_disconnect_ends_the_worker_stream() -> None:
    ended = asyncio.Event()

    async def listener(events: Any, context: Any) -> AsyncIterator[Any]:
        async for event in events:
            yield event
        await context.async_killed_or_stopped()
        ended.set()

    async with open_relays(add) as relays:
        await serve(relays, listener)
        client = Client(relays)
        client.send_event(UPDATE)
        await client.until(2)
        client.leave()
        async with asyncio.timeout(DEADLINE_S):
            await ended.wait()


async def test_realtime_session_ends_on_drain() -> None:
    async with open_relays(add) as relays:
        await serve(relays, parrot)
        client = Client(relays)
        client.send_event(UPDATE)
        await client.until(2)
        await relays.pipeline.drain(0.0)
        *_, error, end = await client.until(4)
        assert (error["error"]["type"], end[:2]) == ("server_error", b"\x03\xe8")
        client.leave()
        late = Client(relays)
        assert late.data.startswith(b"HTTP/1.1 503 ")


async def test_idle_realtime_session_is_not_timed_out() -> None:
    async with open_relays(add) as relays:
        await serve(relays, parrot)
        client = Client(relays)
        client.send_event(UPDATE)
        await client.until(2)
        relays.pipeline.abandon(0.0)
        client.send_event({"type": "still here"})
        assert (await client.until(3))[2] == {"type": "still here"}
        client.leave()


async def test_plain_http_request_is_refused_without_an_upgrade() -> None:
    async with open_relays(add) as relays:
        client = Client(relays, connection="close")
        assert client.data.startswith(b"HTTP/1.1 400 ")
        assert b"upgrade" in client.data
