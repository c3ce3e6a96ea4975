"""Codec: JSON and msgpack under one name."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.codec import (
    REWRITTEN_VALUES_MAX,
    decode,
    encode,
    encode_client_json,
    json_decoder,
    msgpack_decode,
    msgpack_decoder,
)
from dynamo.core.errors import InvalidArgument

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


class Point(msgspec.Struct):
    x: int


@pytest.mark.parametrize("codec", ["json", "msgpack"])
@given(value=VALUES)
def test_codec_round_trips_values(codec: str, value: object) -> None:
    assert decode(encode(value, codec), codec) == value


@pytest.mark.parametrize("codec", ["json", "msgpack"])
def test_codec_reports_a_value_of_the_wrong_type_as_invalid_input(codec: str) -> None:
    assert decode(encode(Point(3), codec), codec, Point) == Point(3)
    with pytest.raises(InvalidArgument, match=codec):
        decode(encode({"x": "three"}, codec), codec, Point)
    with pytest.raises(InvalidArgument, match=codec):
        decode(b"\xc1", codec)


def test_codec_error_names_an_unknown_codec() -> None:
    for act in (lambda: encode(1, "bson"), lambda: decode(b"", "bson")):
        with pytest.raises(InvalidArgument, match="bson"):
            act()


@pytest.mark.parametrize("codec", ["json", "msgpack"])
def test_codec_refuses_values_it_cannot_encode(codec: str) -> None:
    with pytest.raises(InvalidArgument, match="cannot be written"):
        encode(object(), codec)


def test_codec_caches_decoders() -> None:
    assert json_decoder(Point) is json_decoder(Point)
    assert msgpack_decoder(Point) is msgpack_decoder(Point)


@pytest.mark.parametrize(
    ("data", "codec"),
    [
        (b"\xa1\x80", "msgpack"),
        (b"\x91" * 100_000, "msgpack"),
        (b'"\xff"', "json"),
        (b"[" * 100_000, "json"),
        (b"", "json"),
    ],
)
def test_codec_reports_random_bytes_as_invalid_input(data: bytes, codec: str) -> None:
    with pytest.raises(InvalidArgument):
        decode(data, codec)


class Form(msgspec.Struct, omit_defaults=True):
    schema: object
    tokens: list[int] = []
    extra: bytes = b""


@given(value=VALUES)
def test_client_json_is_encoded_as_any_value(value: object) -> None:
    assert encode_client_json(value) == encode(value, "msgpack")


def test_client_json_with_integers_beyond_64_bits_has_doubles_as_rust_reads_them() -> None:
    form = Form(
        {"maximum": 2**64, "minimum": -(2**63) - 1, "enum": [2**64 - 1, -(2**63), True, 1.5, "x", None]}, extra=b"\xff"
    )
    assert msgpack_decode(encode_client_json(form)) == {
        "schema": {"maximum": 2.0**64, "minimum": -(2.0**63), "enum": [2**64 - 1, -(2**63), True, 1.5, "x", None]},
        "extra": b"\xff",
    }


def test_client_json_with_an_integer_beyond_a_double_is_refused() -> None:
    with pytest.raises(OverflowError):
        encode_client_json([10**400])


def test_client_json_with_a_large_integer_among_very_many_values_is_refused() -> None:
    with pytest.raises(OverflowError, match="more than 64 bits"):
        encode_client_json(Form([2**64, *range(REWRITTEN_VALUES_MAX)]))
