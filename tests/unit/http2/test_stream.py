"""A stream keeps to the windows of both sides, for any sizes, and ends once."""

import gc
import weakref

import h2.events
import h2.settings
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.http2.peer import Pair

from dynamo.http2 import frames
from dynamo.http2.frames import ErrorCode, Http2Error
from dynamo.http2.header_blocks import STATUS_200, encode
from dynamo.http2.stream import WINDOW_BYTES

TRAILERS = encode([(b"grpc-status", b"0")])


def test_large_response_waits_for_the_clients_window() -> None:
    pair = Pair()
    number = pair.begin(ends=True)
    pair.exchange()
    user, body = pair.users[number], bytes(range(256)) * 4096
    user.stream.send_headers(STATUS_200)
    user.stream.send_data(body)
    user.stream.end(TRAILERS)
    got = b""
    assert user.stream.is_congested
    for _ in range(100):
        for event in pair.exchange():
            if isinstance(event, h2.events.DataReceived):
                got += event.data
                pair.client.acknowledge_received_data(event.flow_controlled_length, number)
    assert got == body
    assert user.drains == 1
    assert not pair.server.streams


@settings(max_examples=30)
@given(st.lists(st.integers(0, 200_000), max_size=6), st.integers(1000, 1 << 18), st.integers(16384, 1 << 17))
def test_any_data_arrives_whole_for_any_window_and_frame_size(sizes: list[int], window: int, frame: int) -> None:
    pair = Pair()
    codes = h2.settings.SettingCodes
    pair.client.update_settings({codes.INITIAL_WINDOW_SIZE: window, codes.MAX_FRAME_SIZE: frame})
    number = pair.begin(ends=True)
    pair.exchange()
    stream = pair.users[number].stream
    stream.send_headers(STATUS_200)
    for size in sizes:
        stream.send_data(b"x" * size)
    stream.end(TRAILERS)
    got, has_ended = 0, False
    for _ in range(2000):
        events = pair.exchange()
        if not events:
            break
        for event in events:
            if isinstance(event, h2.events.DataReceived):
                got += len(event.data)
                pair.client.acknowledge_received_data(event.flow_controlled_length, number)
            has_ended = has_ended or isinstance(event, h2.events.StreamEnded)
    assert (got, has_ended) == (sum(sizes), True)


def test_client_sends_on_only_after_its_data_was_read() -> None:
    pair = Pair(consumes=False)
    number = pair.begin()
    pair.exchange()
    while pair.client.local_flow_control_window(number) >= 16384:
        pair.client.send_data(number, b"x" * 16384)
        pair.exchange()
    user = pair.users[number]
    assert len(user.data) == WINDOW_BYTES
    user.stream.consumed(len(user.data))
    pair.exchange()
    assert pair.client.local_flow_control_window(number) == WINDOW_BYTES
    frame = frames.frame(frames.DATA, 0, number, b"x" * 16384)
    with pytest.raises(Http2Error) as caught:
        pair.server.receive(frame * (WINDOW_BYTES // 16384 + 1))
    assert caught.value.code is ErrorCode.FLOW_CONTROL_ERROR


def test_response_before_the_end_of_its_request_lets_the_client_stop() -> None:
    pair = Pair()
    number = pair.begin()
    pair.exchange()
    pair.users[number].stream.end(STATUS_200 + TRAILERS)
    reset = [one for one in pair.exchange() if isinstance(one, h2.events.StreamReset)]
    assert [one.error_code for one in reset] == [ErrorCode.NO_ERROR]
    pair.server.receive(frames.frame(frames.DATA, frames.END_STREAM, number, b"late"))
    assert not pair.server.streams


@pytest.mark.parametrize("is_reset", [False, True])
def test_ended_stream_is_freed_with_its_user_without_the_garbage_collector(is_reset: bool) -> None:
    pair = Pair()
    number = pair.begin()
    pair.exchange()
    user = pair.users.pop(number)
    if is_reset:
        pair.client.reset_stream(number)
        pair.exchange()
        assert user.was_reset
    else:
        user.stream.end(STATUS_200 + TRAILERS)
    freed = weakref.ref(user)
    gc.disable()
    try:
        del user
        assert freed() is None
    finally:
        gc.enable()
