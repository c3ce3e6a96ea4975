"""Vectors: float32 numbers as base64 and as JSON."""

import math
import sys
from array import array
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Sequence

FLOAT_BYTES = 4


def to_base64(values: Sequence[float]) -> str:
    """Little-endian float32. Raises `OverflowError` for a number beyond it, `TypeError` for what is none."""
    return b64encode(_little(array("f", values)).tobytes()).decode("ascii")


def from_base64(text: str) -> "array[float]":
    """The numbers. Raises `ValueError` for what is no float32 in base64."""
    try:
        data = b64decode(text, validate=True)
    except Base64Error as error:
        raise ValueError(f"no base64: {error}") from None
    if len(data) % FLOAT_BYTES:
        raise ValueError(f"{len(data)} bytes are no whole number of float32")
    values = array("f")
    values.frombytes(data)
    return _little(values)


def to_json(values: "array[float]") -> bytes:
    """A JSON array; nine digits are enough to tell any two float32 apart. Raises `ValueError` for what JSON has no word for."""
    if not math.isfinite(sum(values)) and not all(map(math.isfinite, values)):
        raise ValueError("a number is infinite or none")
    return ("[" + ",".join(["%.9g" % value for value in values]) + "]").encode("ascii")  # noqa: UP031 - the fastest way


def _little(values: "array[float]") -> "array[float]":
    if sys.byteorder == "big":
        values.byteswap()
    return values
