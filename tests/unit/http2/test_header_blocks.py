"""Request headers are decoded by their encoder's table, and any decoder reads the encoded headers."""

import pytest
from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from dynamo.http2.frames import ErrorCode, Http2Error
from dynamo.http2.header_blocks import HEADERS_BYTES_MAX, HeaderDecoder, encode

HEADERS = [(b":method", b"POST"), (b":path", b"/a.B/C"), (b"content-type", b"application/grpc"), (b"te", b"trailers")]


def test_blocks_of_one_encoder_are_decoded_in_order() -> None:
    encoder, decoder = Encoder(), HeaderDecoder()
    for number in range(4):
        assert decoder.decode(encoder.encode(HEADERS)) == HEADERS
        other = [*HEADERS, (b"grpc-timeout", b"%dS" % number)]
        assert decoder.decode(encoder.encode(other)) == other
    assert decoder.decode(encoder.encode(HEADERS)) == HEADERS


def test_repeated_block_means_something_else_after_the_table_changed() -> None:
    decoder = HeaderDecoder()
    first = b"\x40\x01a\x01b"  # Adds `a: b` as entry 62.
    assert decoder.decode(first) == decoder.decode(b"\xbe") == [(b"a", b"b")]
    assert decoder.decode(b"\xbe") == [(b"a", b"b")]
    decoder.decode(b"\x40\x01c\x01d")
    assert decoder.decode(b"\xbe") == [(b"c", b"d")]


@pytest.mark.parametrize("block", [b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x00", b"\x80"])
def test_block_that_is_none_ends_the_connection(block: bytes) -> None:
    with pytest.raises(Http2Error) as caught:
        HeaderDecoder().decode(block)
    assert caught.value.code is ErrorCode.COMPRESSION_ERROR


def test_headers_beyond_the_limit_are_refused() -> None:
    with pytest.raises(Http2Error, match="headers"):
        HeaderDecoder().decode(Encoder().encode([(b"x", b"y" * HEADERS_BYTES_MAX)], huffman=False))


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=20), st.binary(max_size=400)), max_size=5))
def test_any_headers_are_decoded_as_they_were_written(headers: list[tuple[bytes, bytes]]) -> None:
    assert [(bytes(name), bytes(value)) for name, value in Decoder().decode(encode(headers), raw=True)] == headers
