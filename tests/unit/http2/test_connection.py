"""One connection with h2's client: requests, resets, and protocol errors."""

import h2.events
import h2.settings
import pytest
from tests.unit.http2.peer import Pair

from dynamo.http2 import frames
from dynamo.http2.connection import BLOCK_FRAMES_MAX, STREAMS_MAX, Http2Connection
from dynamo.http2.frames import ErrorCode, Http2Error
from dynamo.http2.header_blocks import STATUS_200, encode

TRAILERS = encode([(b"grpc-status", b"0")])


def test_request_and_response_reach_each_other() -> None:
    pair = Pair()
    number = pair.begin()
    pair.client.send_data(number, b"question", end_stream=True)
    pair.exchange()
    user = pair.users[number]
    assert (user.data, user.has_ended) == (b"question", True)
    assert dict(pair.headers[number])[b":path"] == b"/s/M"
    user.stream.send_headers(STATUS_200)
    user.stream.send_data(b"answer")
    user.stream.end(TRAILERS)
    events = pair.exchange()
    assert [type(one).__name__ for one in events] == [
        "ResponseReceived",
        "DataReceived",
        "TrailersReceived",
        "StreamEnded",
    ]
    assert events[1].data == b"answer"
    assert not pair.server.streams


def test_reset_and_lost_connection_end_streams() -> None:
    pair = Pair()
    first, second = pair.begin(), pair.begin()
    pair.exchange()
    pair.client.reset_stream(first)
    pair.exchange()
    assert (pair.users[first].was_reset, pair.users[second].was_reset) == (True, False)
    pair.users[first].stream.send_data(b"late")
    assert pair.sent() == b""
    pair.server.lost()
    assert pair.users[second].was_reset
    assert not pair.server.streams


def test_ping_is_answered_and_stop_is_announced() -> None:
    pair = Pair()
    open_one = pair.begin()
    pair.client.ping(b"12345678")
    assert any(isinstance(one, h2.events.PingAckReceived) for one in pair.exchange())
    pair.server.go_away()
    late = frames.frame(frames.HEADERS, frames.END_HEADERS, open_one + 2, b"\x83\x86")
    pair.server.receive(late + frames.frame(frames.DATA, frames.END_STREAM, open_one + 2, b"x"))
    assert frames.reset_frame(open_one + 2, ErrorCode.REFUSED_STREAM) in pair.sent()
    assert open_one in pair.server.streams


def test_smaller_table_of_the_client_is_confirmed() -> None:
    pair = Pair()
    pair.client.update_settings({h2.settings.SettingCodes.HEADER_TABLE_SIZE: 0})
    number = pair.begin(ends=True)
    pair.exchange()
    pair.users[number].stream.end(STATUS_200 + TRAILERS)
    assert any(isinstance(one, h2.events.StreamEnded) for one in pair.exchange())


def test_headers_in_several_frames_and_frames_in_any_pieces() -> None:
    pair = Pair()
    block = encode([(b":path", b"/s/M"), (b"x", b"y" * 100)])
    data = frames.frame(frames.HEADERS, frames.END_STREAM, 1, block[:10])
    data += frames.frame(frames.CONTINUATION, 0, 1, block[10:20])
    data += frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[20:])
    for byte in data:
        pair.server.receive(bytes((byte,)))
    assert dict(pair.headers[1])[b"x"] == b"y" * 100
    assert pair.users[1].has_ended


HEAD = frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x83\x86")


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frames.frame(frames.DATA, 0, 1), ErrorCode.PROTOCOL_ERROR),
        (frames.frame(frames.HEADERS, frames.END_HEADERS, 2, b"\x83"), ErrorCode.PROTOCOL_ERROR),
        (frames.frame(frames.PUSH_PROMISE, 0, 1), ErrorCode.PROTOCOL_ERROR),
        (frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1), ErrorCode.PROTOCOL_ERROR),
        (frames.frame(frames.HEADERS, 0, 1) + frames.frame(frames.PING, 0, 0, b"12345678"), ErrorCode.PROTOCOL_ERROR),
        (frames.frame(frames.HEADERS, 0, 1) + frames.frame(frames.CONTINUATION, 0, 1) * BLOCK_FRAMES_MAX, ErrorCode.ENHANCE_YOUR_CALM),
        (frames.frame(frames.DATA, 0, 1, b"x" * 16385), ErrorCode.FRAME_SIZE_ERROR),
        (frames.frame(frames.PING, 0, 0, b"1"), ErrorCode.FRAME_SIZE_ERROR),
        (frames.frame(frames.SETTINGS, 0, 0, b"1"), ErrorCode.FRAME_SIZE_ERROR),
        (frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 1 << 31}), ErrorCode.FLOW_CONTROL_ERROR),
        (frames.settings_frame({frames.MAX_FRAME_SIZE: 100}), ErrorCode.PROTOCOL_ERROR),
        (frames.settings_frame({frames.ENABLE_PUSH: 2}), ErrorCode.PROTOCOL_ERROR),
        (frames.window_update(0, 0), ErrorCode.FLOW_CONTROL_ERROR),
        (frames.window_update(0, (1 << 31) - 1), ErrorCode.FLOW_CONTROL_ERROR),
        (HEAD + frames.window_update(1, (1 << 31) - 1), ErrorCode.FLOW_CONTROL_ERROR),
        (HEAD + HEAD, ErrorCode.PROTOCOL_ERROR),
        (HEAD + frames.frame(frames.DATA, frames.END_STREAM, 1) * 2, ErrorCode.STREAM_CLOSED),
    ],
)  # fmt: skip
def test_what_breaks_the_protocol_ends_the_connection(data: bytes, code: ErrorCode) -> None:
    pair = Pair()
    with pytest.raises(Http2Error) as caught:
        pair.server.receive(data)
    assert caught.value.code is code


def test_other_protocol_is_recognized_by_its_first_bytes() -> None:
    connection = Http2Connection(lambda *_: None, lambda _: None)
    connection.receive(b"PRI * HT")
    connection.receive(b"TP/2.0\r\n\r\nSM\r\n\r\n")
    assert connection.has_begun
    with pytest.raises(Http2Error, match=r"serves gRPC \(HTTP/2\) only"):
        Http2Connection(lambda *_: None, lambda _: None).receive(b"GET / HTTP/1.1\r\n")


def test_streams_beyond_the_limit_are_refused_one_by_one() -> None:
    sent: list[bytes] = []
    connection = Http2Connection(lambda *_: None, sent.append)
    connection.receive(frames.PREFACE)
    for number in range(STREAMS_MAX + 1):
        connection.receive(frames.frame(frames.HEADERS, frames.END_HEADERS, 2 * number + 1, b"\x83"))
    assert sent == [frames.reset_frame(2 * STREAMS_MAX + 1, ErrorCode.REFUSED_STREAM)]


def test_unknown_frames_and_priorities_change_nothing() -> None:
    pair = Pair()
    pair.server.receive(frames.frame(0x42, 0xFF, 1, b"extension") + frames.frame(frames.PRIORITY, 0, 1, b"\0\0\0\0\1"))
    pair.server.receive(frames.frame(frames.GOAWAY, 0, 0, bytes(8)))
    assert pair.sent() == b""
