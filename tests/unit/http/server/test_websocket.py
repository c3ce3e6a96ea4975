"""WebSocket: messages are independent of chunking; a client that breaks the rules receives a close frame."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.settle import turns, until

from dynamo.http.server import websocket
from dynamo.http.server.long_frames import LONG_BYTES
from dynamo.http.server.paced_input import InputTurns
from dynamo.http.server.websocket import Closing, Op, WebSocket, WebSocketMessage, accept_key

MASK = b"\x01\x02\x03\x04"

payloads = st.binary(max_size=300) | st.integers(65530, 65540).map(bytes)
messages = st.lists(st.builds(WebSocketMessage, st.sampled_from([Op.TEXT, Op.BINARY]), payloads), max_size=6)


def client_frame(op: int, data: bytes, *, is_last: bool = True) -> bytes:
    head = bytearray(frame(op, data, is_last=is_last)[: -len(data) or None])
    head[1] |= 0x80
    key = (MASK * (len(data) // 4 + 1))[: len(data)]
    masked = (int.from_bytes(data, "big") ^ int.from_bytes(key, "big")).to_bytes(len(data), "big")
    return bytes(head) + MASK + masked


def frame(op: int, data: bytes, *, is_last: bool = True) -> bytes:
    """A frame of a server."""
    size = len(data)
    head = bytes([(0x80 if is_last else 0) | op])
    if size < 126:
        return head + bytes([size]) + data
    if size < 1 << 16:
        return head + bytes([126]) + size.to_bytes(2, "big") + data
    return head + bytes([127]) + size.to_bytes(8, "big") + data


def close_frame(code: int, reason: str) -> bytes:
    return frame(Op.CLOSE, code.to_bytes(2, "big") + reason.encode())


class UpgradeRequest:
    """Request of a client."""

    def __init__(self, **headers: bytes) -> None:
        given = {
            "connection": b"keep-alive, Upgrade",
            "upgrade": b"websocket",
            "sec_websocket_version": b"13",
            "sec_websocket_key": b"dGhlIHNhbXBsZSBub25jZQ==",
        }
        self.headers = {name.replace("_", "-").encode(): value for name, value in {**given, **headers}.items()}

    def header(self, name: bytes) -> bytes | None:
        return self.headers.get(name)


def test_websocket_accept_key_equals_the_example_of_the_standard() -> None:
    assert accept_key(UpgradeRequest()) == b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "headers",
    [
        {"connection": b"close"},
        {"upgrade": b"h2c"},
        {"sec_websocket_version": b"8"},
        {"sec_websocket_key": b"short"},
        {"sec_websocket_key": b"?" * 24},
    ],
)
def test_invalid_upgrade_headers_have_no_accept_key(headers: dict[str, bytes]) -> None:
    assert accept_key(UpgradeRequest(**headers)) is None  # type: ignore[arg-type]


class Line:
    """A connection, and the HTTP protocol that it began with."""

    class Limits:
        unsent_bytes = 1000

    def __init__(self) -> None:
        self.limits = self.Limits()
        self.turns = InputTurns(lambda: 0.0)
        self.transport = self
        self.data = b""
        self.protocol: Any = self
        self.header_bytes = b""
        self.response_started = False
        self.outputs: list[str] = []
        self.unsent = 0

    def write(self, data: bytes) -> None:
        self.data += data

    def set_protocol(self, protocol: Any) -> None:
        self.outputs.append("taken over")

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def cut_slow_reader(self) -> None:
        self.outputs.append("cut")

    def pause_reading(self) -> None:
        self.outputs.append("pause")

    def resume_reading(self) -> None:
        self.outputs.append("resume")

    def is_closing(self) -> bool:
        return "close" in self.outputs

    def close(self) -> None:
        self.outputs.append("close")

    def abort(self) -> None:
        self.outputs.append("abort")

    def connection_lost(self, error: Exception | None) -> None:
        self.outputs.append("lost")


class RecordingHandler:
    def __init__(self) -> None:
        self.messages: list[WebSocketMessage] = []
        self.closes = 0

    def on_message(self, message: WebSocketMessage) -> None:
        self.messages.append(message)

    def on_close(self) -> None:
        self.closes += 1


def opened(shared: InputTurns | None = None) -> tuple[WebSocket, Line, RecordingHandler]:
    line, handler = Line(), RecordingHandler()
    line.turns = shared or line.turns
    socket = WebSocket(line, b"key", b"realtime")  # type: ignore[arg-type]
    assert line.data.startswith(b"HTTP/1.1 101 ")
    assert b"sec-websocket-accept: key\r\nsec-websocket-protocol: realtime\r\n" in line.data
    line.data = b""
    socket.listen(handler)
    return socket, line, handler


@given(messages, st.data())
async def test_websocket_reads_messages_at_any_fragmentation_and_segmentation(
    sent: list[WebSocketMessage], data: st.DataObject
) -> None:
    wire = b""
    for message in sent:
        cut = data.draw(st.integers(0, len(message.data)))
        wire += client_frame(message.op, message.data[:cut], is_last=False)
        if data.draw(st.booleans()):
            wire += client_frame(Op.PONG, b"")  # Control frames may intervene.
        wire += client_frame(Op.CONT, message.data[cut:])
    socket, _, handler = opened()
    step = max(data.draw(st.integers(1, 5000)), len(wire) // 100)
    for at in range(0, len(wire), step):
        socket.data_received(wire[at : at + step])
    assert handler.messages == sent
    socket.connection_lost(None)


async def test_long_frame_is_unmasked_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from websockets import frames

    sizes: list[int] = []
    unmask = frames.apply_mask
    monkeypatch.setattr(frames, "apply_mask", lambda data, mask: sizes.append(len(data)) or unmask(data, mask))
    socket, _, handler = opened()
    data = bytes(range(256)) * (10 * LONG_BYTES // 256)
    socket.data_received(client_frame(Op.TEXT, data))
    await until(lambda: handler.messages)
    assert handler.messages == [WebSocketMessage(Op.TEXT, data)]
    assert len(sizes) >= 10 and max(sizes) <= LONG_BYTES
    socket.connection_lost(None)


@given(st.lists(st.binary(max_size=50), max_size=5))
async def test_websocket_parser_accepts_arbitrary_bytes_without_exception(chunks: list[bytes]) -> None:
    socket, _, _ = opened()
    for chunk in chunks:
        socket.data_received(chunk)
    socket.connection_lost(None)


@pytest.mark.parametrize(
    ("wire", "code"),
    [
        (frame(Op.TEXT, b"unmasked"), Closing.PROTOCOL_ERROR),
        (client_frame(3, b""), Closing.PROTOCOL_ERROR),
        (b"\xc1\x80" + MASK, Closing.PROTOCOL_ERROR),
        (client_frame(Op.PING, b"x" * 126), Closing.PROTOCOL_ERROR),
        (client_frame(Op.CLOSE, b"", is_last=False), Closing.PROTOCOL_ERROR),
        (client_frame(Op.CONT, b""), Closing.PROTOCOL_ERROR),
        (client_frame(Op.TEXT, b"", is_last=False) + client_frame(Op.TEXT, b""), Closing.PROTOCOL_ERROR),
        (client_frame(Op.TEXT, bytes(151)), Closing.TOO_BIG),
        (client_frame(Op.BINARY, bytes(1 << 16))[:14], Closing.TOO_BIG),  # Refused before it has arrived.
        (client_frame(Op.TEXT, bytes(80), is_last=False) + client_frame(Op.CONT, bytes(80)), Closing.TOO_BIG),
    ],
)
async def test_websocket_closes_with_the_code_of_the_violation(
    wire: bytes, code: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "MESSAGE_BYTES_MAX", 150)
    socket, line, handler = opened()
    socket.data_received(wire)
    assert (line.data[0], int.from_bytes(line.data[2:4], "big")) == (0x80 | Op.CLOSE, code)
    assert line.is_closing()
    assert handler.messages == []
    socket.connection_lost(None)


@given(payloads)
async def test_server_frame_has_the_correct_length_header(payload: bytes) -> None:
    socket, line, _ = opened()
    socket.send(payload)
    assert line.data == frame(Op.TEXT, payload)
    socket.connection_lost(None)


async def test_close_reason_is_truncated_to_a_control_frame() -> None:
    socket, line, _ = opened()
    socket.close(reason="x" * 500)
    assert (line.data[1], int.from_bytes(line.data[2:4], "big")) == (125, 1000)
    socket.connection_lost(None)


async def test_websocket_delivers_no_message_after_close() -> None:
    socket, line, handler = opened()
    socket.close()
    socket.data_received(client_frame(Op.TEXT, b"late"))
    assert (handler.messages, line.is_closing()) == ([], False)
    socket.data_received(client_frame(Op.CLOSE, b"\x03\xe8"))
    assert line.is_closing()
    socket.connection_lost(None)


async def test_websocket_delivers_messages_and_answers_pings() -> None:
    socket, line, handler = opened()
    socket.data_received(client_frame(Op.TEXT, b"hi") + client_frame(Op.PING, b"?") + client_frame(Op.PONG, b""))
    assert handler.messages == [WebSocketMessage(Op.TEXT, b"hi")]
    assert line.data == frame(Op.PONG, b"?")
    socket.connection_lost(None)
    assert (handler.closes, line.outputs) == (1, ["taken over", "lost"])


async def test_websocket_answers_a_close_and_sends_nothing_after() -> None:
    socket, line, handler = opened()
    socket.data_received(client_frame(Op.CLOSE, b"\x03\xe8"))
    assert line.data == close_frame(Closing.NORMAL, "")
    socket.send(b"more")
    socket.close()
    socket.data_received(client_frame(Op.TEXT, b"late"))
    socket.resume_reading()
    assert line.data == close_frame(Closing.NORMAL, "")
    assert (handler.messages, line.outputs) == ([], ["taken over", "close"])
    socket.connection_lost(None)


async def test_websocket_client_that_does_not_read_is_disconnected() -> None:
    socket, line, _ = opened()
    line.unsent = 1001
    socket.send(b"x")
    assert "cut" in line.outputs
    socket.connection_lost(None)


async def test_websocket_aborts_a_client_that_answers_no_pings() -> None:
    socket, line, _ = opened()
    socket._ping()
    assert line.data == frame(Op.PING, b"")
    socket.data_received(client_frame(Op.PONG, b""))
    socket._ping()
    assert "abort" not in line.outputs
    socket._ping()
    assert "abort" in line.outputs
    socket.connection_lost(None)


async def test_frames_of_one_read_are_processed_in_order_while_others_have_turns() -> None:
    clock = itertools.count()
    socket, line, received = opened(InputTurns(lambda: next(clock)))
    wanted = [b"%d" % number for number in range(500)]
    socket.data_received(b"".join(client_frame(Op.TEXT, data) for data in wanted))
    assert 0 < len(received.messages) < len(wanted) and line.outputs[-1] == "pause"
    await until(lambda: len(received.messages) == len(wanted))
    assert [one.data for one in received.messages] == wanted
    assert line.outputs[-1] == "resume"
    socket.connection_lost(None)


async def test_reading_resumes_after_every_consumer_has_caught_up() -> None:
    socket, line, received = opened()
    socket.pause_reading("a")
    socket.pause_reading()
    socket.data_received(client_frame(Op.TEXT, b"x"))
    socket.resume_reading()
    await turns(3)
    assert not received.messages
    socket.resume_reading("a")
    await until(lambda: received.messages)
    assert line.outputs[-1] == "resume"
    socket.connection_lost(None)


async def test_a_message_of_one_frame_is_not_copied() -> None:
    socket, _, handler = opened()
    frame_type: Any = socket._frame_type
    data = b"a" * 1000
    socket._apply(frame_type(Op.TEXT, data))
    assert handler.messages[0].data is data
