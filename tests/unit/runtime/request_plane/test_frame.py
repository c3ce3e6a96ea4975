"""Frames: the same frames however the bytes are cut, and garbage is an error, never a hang or a crash."""

import itertools
import struct
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.core.errors import InvalidArgument
from dynamo.runtime.request_plane import frame

FEW = settings(max_examples=40)

LIMIT = 1 << 16
BYTES = st.binary(max_size=40)
U32 = st.integers(0, 2**32 - 1)


def feed_in_pieces(decoder: frame.Decoder, data: bytes, cuts: list[int]) -> list[object]:
    frames: list[object] = []
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        frames += decoder.feed(data[start:end])
    return frames


CUTS = st.lists(st.integers(0, 10_000), max_size=12)


@FEW
@given(messages=st.lists(st.tuples(BYTES, BYTES), max_size=6), cuts=CUTS)
def test_frame_decoder_reads_two_part_messages_in_any_chunks(
    messages: list[tuple[bytes, bytes]], cuts: list[int]
) -> None:
    decoder = frame.TwoPartDecoder(LIMIT)
    data = b"".join(frame.two_part(header, body) for header, body in messages)
    assert feed_in_pieces(decoder, data, cuts) == messages
    assert decoder.is_between_frames


@FEW
@given(texts=st.lists(BYTES, max_size=6), cuts=CUTS)
def test_frame_decoder_reads_acknowledgements_in_any_chunks(texts: list[bytes], cuts: list[int]) -> None:
    data = b"".join(frame.ack(text) for text in texts)
    assert feed_in_pieces(frame.AckDecoder(LIMIT), data, cuts) == texts


@FEW
@given(requests=st.lists(st.tuples(st.text(max_size=9), BYTES, BYTES), max_size=5), cuts=CUTS)
def test_frame_decoder_reads_upstream_requests_in_any_chunks(
    requests: list[tuple[str, bytes, bytes]], cuts: list[int]
) -> None:
    data = b"".join(frame.upstream_request(*request) for request in requests)
    decoded = feed_in_pieces(frame.UpstreamRequestDecoder(LIMIT), data, cuts)
    assert decoded == [frame.UpstreamRequest(*request) for request in requests]


@FEW
@given(frames=st.lists(st.tuples(st.integers(0, 255), BYTES), max_size=8), cuts=CUTS)
def test_frame_decoder_reads_batched_frames_in_any_chunks(frames: list[tuple[int, bytes]], cuts: list[int]) -> None:
    data = b"".join(frame.frame(kind, payload) for kind, payload in frames)
    assert feed_in_pieces(frame.FrameDecoder(LIMIT), data, cuts) == frames


@FEW
@given(pairs=st.lists(st.tuples(U32, U32), max_size=70))
def test_frame_codec_round_trips_tokens_with_their_streams(pairs: list[tuple[int, int]]) -> None:
    streams, tokens = array("I", [s for s, _ in pairs]), array("I", [t for _, t in pairs])
    [(kind, payload)] = frame.FrameDecoder(LIMIT).feed(frame.tokens_frame(streams, tokens))
    numbers = frame.read_u32s(payload)
    count = len(pairs)
    assert kind == frame.TOKENS
    assert list(zip(numbers[:count], numbers[count:], strict=True)) == pairs


@FEW
@given(stream=U32, flags=st.integers(0, 255), data=BYTES, head=BYTES)
def test_frame_codec_round_trips_payload_parts(stream: int, flags: int, data: bytes, head: bytes) -> None:
    decoder = frame.FrameDecoder(LIMIT)
    everything = (
        frame.item_frame(stream, flags, data)
        + frame.stream_frame(frame.ERROR, stream, data)
        + frame.request_frame(stream, head, data)
        + frame.streams_frame(frame.END, array("I", [stream, stream]))
    )
    item, error, request, end = decoder.feed(everything)
    assert frame.read_item(item[1]) == (stream, flags, data)
    assert (error[0], frame.read_stream(error[1])) == (frame.ERROR, (stream, data))
    assert frame.read_request(request[1]) == (stream, head, data)
    assert frame.read_u32s(end[1]) == (stream, stream)


DECODERS = [frame.TwoPartDecoder, frame.AckDecoder, frame.UpstreamRequestDecoder, frame.FrameDecoder]


@pytest.mark.parametrize("decoder_type", DECODERS)
@FEW
@given(data=st.binary(max_size=200), cuts=CUTS)
def test_frame_decoder_reports_garbage_as_an_error(
    decoder_type: type[frame.Decoder], data: bytes, cuts: list[int]
) -> None:
    try:
        frames = feed_in_pieces(decoder_type(256), data, cuts)
    except frame.FrameError:
        return
    assert len(frames) <= len(data)


@pytest.mark.parametrize(
    ("decoder", "data"),
    [
        (frame.TwoPartDecoder(9), struct.pack(">QQQ", 5, 5, 0)),
        (frame.AckDecoder(9), struct.pack(">I", 10)),
        (frame.UpstreamRequestDecoder(9), b"\0\1p\0\0" + struct.pack(">I", 10)),
        (frame.FrameDecoder(9), struct.pack("<IB", 10, 1)),
    ],
)
def test_frame_decoder_refuses_an_oversized_frame_before_buffering_it(decoder: frame.Decoder, data: bytes) -> None:
    with pytest.raises(InvalidArgument, match="DYN_TCP_MAX_MESSAGE_SIZE"):
        decoder.feed(data)


@pytest.mark.parametrize("read", [frame.read_u32s, frame.read_item, frame.read_stream, frame.read_request])
def test_frame_decoder_refuses_a_short_payload(read) -> None:
    with pytest.raises(frame.FrameError):
        read(b"\1\2\3")
    with pytest.raises(frame.FrameError):
        frame.read_request(struct.pack("<II", 1, 50) + b"short")


@FEW
@given(header=BYTES, body=BYTES)
def test_frame_decoder_splits_exactly_one_two_part_message(header: bytes, body: bytes) -> None:
    message = frame.two_part(header, body)
    assert frame.split_two_part(message) == (header, body)
    for broken in (message[:-1], message + b"x", message[:10]):
        with pytest.raises(frame.FrameError):
            frame.split_two_part(broken)


def test_frame_encoder_refuses_oversized_request_headers() -> None:
    with pytest.raises(InvalidArgument, match="too large for a frame"):
        frame.upstream_request("p", b"x" * 65536, b"")


def test_frame_decoder_refuses_a_path_that_is_not_text() -> None:
    with pytest.raises(frame.FrameError, match="UTF-8"):
        frame.UpstreamRequestDecoder(LIMIT).feed(b"\0\1\xff\0\0\0\0\0\0")


@pytest.mark.parametrize("greeting", [b"\x16\x03\x01\x02", b"GET / HTTP/1.1", b"POST", b"SSH-2.0", b"\xff\xff"])
def test_frame_decoder_does_not_interpret_unknown_bytes_as_a_long_path(greeting: bytes) -> None:
    with pytest.raises(frame.FrameError, match="path too long"):
        frame.UpstreamRequestDecoder(LIMIT).feed(greeting)


def test_frame_greeting_cannot_be_sent_by_a_released_caller() -> None:
    assert frame.HELLO[:2] == struct.pack(">H", 0)


def test_frame_decoder_joins_a_large_frame_once() -> None:
    body = bytes(range(256)) * 200
    decoder = frame.FrameDecoder(LIMIT)
    data = frame.frame(7, body)
    frames = [got for start in range(0, len(data), 100) for got in decoder.feed(data[start : start + 100])]
    assert frames == [(7, body)]
