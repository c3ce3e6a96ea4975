"""Messages are decoded from data in any pieces, and responses end with a status."""

import asyncio
import struct

import h2.events
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.settle import turns
from tests.unit.http2.peer import Pair

from dynamo.http2.grpc_call import GrpcCall, GrpcCode, GrpcStatus, timeout_of
from dynamo.http2.stream import WINDOW_BYTES

MAX = 1 << 20


def prefixed(message: bytes, *, is_compressed: bool = False) -> bytes:
    return struct.pack(">BL", is_compressed, len(message)) + message


class Calling:
    """A call between a client of h2 and ours."""

    def __init__(self) -> None:
        self.pair = Pair()
        self.number = self.pair.begin()
        self.pair.exchange()
        stream = self.pair.users[self.number].stream
        self.call = GrpcCall(stream, self.pair.headers[self.number], MAX)
        stream.user = self.call

    def send(self, data: bytes, *, ends: bool = False) -> None:
        """Send data as the windows allow."""
        client = self.pair.client
        while len(data) > 16384:
            client.send_data(self.number, data[:16384])
            data = data[16384:]
            self.pair.exchange()
        client.send_data(self.number, data, end_stream=ends)
        self.pair.exchange()

    def status(self) -> tuple[bytes, bytes]:
        """Return the call's status and its text."""
        found: dict[bytes, bytes] = {}
        for event in self.pair.exchange():
            if isinstance(event, (h2.events.TrailersReceived, h2.events.ResponseReceived)):
                found |= {bytes(name): bytes(value) for name, value in event.headers}
        return found[b"grpc-status"], found.get(b"grpc-message", b"")


@given(st.lists(st.binary(max_size=60), max_size=5), st.data())
def test_messages_arrive_in_any_pieces(messages: list[bytes], pieces: st.DataObject) -> None:
    async def check() -> None:
        calling, data = Calling(), b"".join(map(prefixed, messages))
        while data:
            size = pieces.draw(st.integers(1, len(data)))
            calling.send(data[:size])
            data = data[size:]
        calling.send(b"", ends=True)
        assert [await calling.call.read() for _ in messages] == messages
        assert await calling.call.read() is None

    asyncio.run(check())


async def test_reader_waits_for_a_message() -> None:
    calling = Calling()
    reading = asyncio.ensure_future(calling.call.read())
    await turns(2)
    assert not reading.done()
    calling.send(prefixed(b"late"))
    assert await reading == b"late"


async def test_message_larger_than_the_window_arrives() -> None:
    calling, message = Calling(), bytes(3 * WINDOW_BYTES)
    calling.send(prefixed(message))
    assert await calling.call.read() == message


async def test_unread_messages_hold_the_client_back() -> None:
    calling = Calling()
    while calling.pair.client.local_flow_control_window(calling.number) >= 16384:
        calling.send(prefixed(bytes(16379)))
    for _ in range(WINDOW_BYTES // 16384):
        await calling.call.read()
    calling.pair.exchange()
    assert calling.pair.client.local_flow_control_window(calling.number) == WINDOW_BYTES


@pytest.mark.parametrize(
    ("data", "code", "text"),
    [
        (prefixed(b"x", is_compressed=True), GrpcCode.UNIMPLEMENTED, "compressed"),
        (struct.pack(">BL", 0, MAX + 1), GrpcCode.RESOURCE_EXHAUSTED, f"{MAX + 1} bytes: at most {MAX}"),
        (prefixed(b"abc")[:-1], GrpcCode.INTERNAL, "ends after 7 bytes"),
    ],
)
async def test_what_is_no_message_fails_the_call(data: bytes, code: GrpcCode, text: str) -> None:
    calling = Calling()
    calling.send(data, ends=True)
    with pytest.raises(GrpcStatus, match=text) as caught:
        await calling.call.read()
    assert caught.value.code is code


async def test_answers_end_with_their_status() -> None:
    calling = Calling()
    await calling.call.write(b"one")
    calling.call.end(GrpcCode.NOT_FOUND, "no 100% \u00e9\n")
    events = calling.pair.exchange()
    assert [one.data for one in events if isinstance(one, h2.events.DataReceived)] == [prefixed(b"one")]
    trailers = dict(next(one for one in events if isinstance(one, h2.events.TrailersReceived)).headers)
    assert (trailers[b"grpc-status"], trailers[b"grpc-message"]) == (b"5", b"no 100%25 %C3%A9%0A")


async def test_call_without_an_answer_has_only_a_status() -> None:
    calling = Calling()
    calling.call.end()
    assert calling.status() == (b"0", b"")


async def test_writer_waits_until_the_client_reads() -> None:
    calling = Calling()
    writing = asyncio.ensure_future(calling.call.write(bytes(MAX)))
    await turns(2)
    assert not writing.done()
    got = 0
    while got < MAX + 5:
        for event in calling.pair.exchange():
            if isinstance(event, h2.events.DataReceived):
                got += len(event.data)
                calling.pair.client.acknowledge_received_data(event.flow_controlled_length, calling.number)
    await writing


@pytest.mark.parametrize(
    ("value", "expected"),
    [(b"5S", 5.0), (b"250m", 0.25), (b"2H", 7200.0), (b"x", None), (b"123456789S", None), (b"", None)],
)
def test_timeout_of_a_call(value: bytes, expected: float | None) -> None:
    assert timeout_of([(b"grpc-timeout", value)]) == expected
