"""Frames have the bytes of RFC 9113, and malformed ones are refused."""

import pytest

from dynamo.http2 import frames
from dynamo.http2.frames import ErrorCode, Http2Error


def test_frame_begins_with_size_kind_flags_and_stream() -> None:
    assert frames.frame(frames.DATA, frames.END_STREAM, 5, b"ab") == b"\0\0\x02\0\x01\0\0\0\x05ab"
    assert frames.frame(frames.DATA, 0, 1, b"x" * 70_000)[:3] == (70_000).to_bytes(3, "big")


def test_padding_and_priority_are_removed() -> None:
    assert frames.without_padding(frames.DATA, frames.PADDED, b"\x02ab\0\0") == b"ab"
    flags = frames.PADDED | frames.WITH_PRIORITY
    assert frames.without_padding(frames.HEADERS, flags, b"\x01\0\0\0\0\x10block\0") == b"block"


@pytest.mark.parametrize("payload", [b"", b"\x05ab"])
def test_padding_longer_than_its_frame_is_refused(payload: bytes) -> None:
    with pytest.raises(Http2Error) as caught:
        frames.without_padding(frames.DATA, frames.PADDED, payload)
    assert caught.value.code is ErrorCode.PROTOCOL_ERROR


def test_number_of_a_wrong_size_is_refused() -> None:
    with pytest.raises(Http2Error, match="RST_STREAM of 3 bytes"):
        frames.number_of(b"abc", "RST_STREAM")
