"""Vectors: encoding of float32 numbers as base64 and as JSON."""

import math
import sys
from array import array
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Sequence

FLOAT_BYTES = 4


def to_base64(values: Sequence[float]) -> str:
    """Encode as little-endian float32. Raise `OverflowError` for a number out of range, `TypeError` for others."""
    return b64encode(_little(array("f", values)).tobytes()).decode("ascii")


def from_base64(text: str) -> "array[float]":
    """Decode the numbers. Raise `ValueError` for anything but float32 in base64."""
    try:
        data = b64decode(text, validate=True)
    except Base64Error as error:
        raise ValueError(f"not base64: {error}") from None
    if len(data) % FLOAT_BYTES:
        raise ValueError(f"{len(data)} bytes: the length must be a multiple of 4 (float32)")
    values = array("f")
    values.frombytes(data)
    return _little(values)


def to_json(values: "array[float]") -> bytes:
    """Encode as a JSON array; nine digits distinguish any two float32. Raise `ValueError` for infinity and NaN."""
    if not math.isfinite(sum(values)) and not all(map(math.isfinite, values)):
        raise ValueError("a number is infinite or not a number")
    return ("[" + ",".join(["%.9g" % value for value in values]) + "]").encode("ascii")  # noqa: UP031 - the fastest way


def _little(values: "array[float]") -> "array[float]":
    if sys.byteorder == "big":
        values.byteswap()
    return values
