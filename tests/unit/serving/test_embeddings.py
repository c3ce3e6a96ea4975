"""Vectors are unchanged by base64 and JSON."""

import json
import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.serving.embeddings import from_base64, to_base64, to_json

floats = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=50)


@given(floats)
def test_vector_round_trips_through_base64_and_json(values: list[float]) -> None:
    read = from_base64(to_base64(values))
    assert list(read) == values
    reported = json.loads(to_json(read))
    assert array("f", reported) == array("f", values)


def test_vector_bytes_are_little_endian() -> None:
    assert to_base64([1.0]) == "AACAPw=="


@pytest.mark.parametrize("text", ["?", "AAA", "AAAA"])
def test_vector_refuses_values_that_are_not_numbers(text: str) -> None:
    with pytest.raises(ValueError, match=r"base64|float32"):
        from_base64(text)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_vector_json_refuses_nan_and_infinity(value: float) -> None:
    with pytest.raises(ValueError, match="infinite"):
        to_json(from_base64(to_base64([0.5, value])))


def test_vector_accepts_large_numbers_whose_sum_overflows() -> None:
    largest = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
    assert len(json.loads(to_json(from_base64(to_base64([largest] * 3))))) == 3
