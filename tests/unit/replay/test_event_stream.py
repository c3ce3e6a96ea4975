"""EventStream: parsed events of a server, for any chunking."""

import asyncio

import pytest

from dynamo.core.errors import CannotConnect, ConfigError, Disconnected, HttpError, ResponseTimeout
from dynamo.replay.event_stream import EventStream

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Wire:
    """Writer that discards its data."""

    def __init__(self) -> None:
        self.sent = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Wire], list[bytes]]:
    """Return the opened connections, and the servers' responses in order."""
    wires: list[Wire] = []
    says: list[bytes] = []

    async def opened(host: str, port: int, **_: object) -> tuple[asyncio.StreamReader, Wire]:
        reader = asyncio.StreamReader()
        reader.feed_data(says.pop(0))
        wires.append(Wire())
        return reader, wires[-1]

    monkeypatch.setattr(asyncio, "open_connection", opened)
    return wires, says


async def read_events(stream: EventStream) -> list[bytes]:
    return [data async for data in stream.post("/v1/completions", b"{}", {"x-request-id": "r"})]


async def test_event_stream_splits_events_for_any_chunking(wire: tuple[list[Wire], list[bytes]]) -> None:
    wires, says = wire
    text = b'data: {"a": 1}\r\n\r\n: a comment\n\nevent: x\ndata: {"b": 2}\n\ndata: [DONE]\n\n'
    cut = b"".join(chunk(text[at : at + 3]) for at in range(0, len(text), 3))
    says.append(HEAD + cut + b"0\r\n\r\n")
    assert await read_events(EventStream("http://h:1/base", 5.0)) == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]
    assert wires[0].sent.startswith(b"POST /base/v1/completions HTTP/1.1\r\nhost: h:1\r\n")
    assert b"x-request-id: r\r\n" in wires[0].sent


async def test_connection_is_reused_after_a_complete_response(wire: tuple[list[Wire], list[bytes]]) -> None:
    wires, says = wire
    says.append(HEAD + chunk(b"data: 1\n\n") + b"0\r\n\r\n")
    stream = EventStream("h:1", 5.0)
    assert await read_events(stream) == [b"1"]
    assert not wires[0].is_closed
    stream.close()
    assert wires[0].is_closed


async def test_event_stream_error_contains_the_body_of_the_server(wire: tuple[list[Wire], list[bytes]]) -> None:
    wires, says = wire
    says.append(b"HTTP/1.1 503 Busy\r\ncontent-length: 7\r\n\r\nno room")
    with pytest.raises(HttpError, match="no room") as caught:
        await read_events(EventStream("h:1", 5.0))
    assert caught.value.code == 503
    assert len(wires) == 1


async def test_missing_events_and_malformed_events_are_errors(wire: tuple[list[Wire], list[bytes]]) -> None:
    _, says = wire
    says += [HEAD + chunk(b"data: 1\n\n"), b"nonsense\r\n\r\n"]
    with pytest.raises(ResponseTimeout):
        await read_events(EventStream("h:1", 0.01))
    with pytest.raises(Disconnected):
        await read_events(EventStream("h:1", 5.0))


async def test_refused_connection_names_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(host: str, port: int, **_: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(asyncio, "open_connection", refused)
    with pytest.raises(CannotConnect, match="h:1"):
        await read_events(EventStream("http://h:1", 5.0))


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:x"])
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        EventStream(url, 1.0)
