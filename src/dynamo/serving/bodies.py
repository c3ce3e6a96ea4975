"""Decoding of JSON bodies without blocking the event loop.

The decoder holds the GIL until it is done. A small body is decoded at once, a larger one in a thread. A body whose
decoding would take long, by its size and its number of values, is first decoded in a child process; it is decoded here
only if that finds it valid and within the limits of requests.
"""

import functools
from collections.abc import Callable
from typing import TypeVar, cast

from dynamo.core.child_pool import ChildError, ChildOutOfMemory, ChildPool, ChildPoolBusy, ChildTimeout, ChildUnwanted
from dynamo.core.errors import Cancelled, InvalidArgument, Overloaded, Unknown
from dynamo.core.threads import in_daemon_thread, in_few_threads
from dynamo.protocols.openai_ranges import BOUNDS_VARIABLES, request_bounds

T = TypeVar("T")

INLINE_BYTES = 16 << 10  # Decoded within 2 ms, unless its numbers are slow.
INLINE_COMMAS = 128  # Fewer numbers, even slow ones, are decoded within 2 ms.
ESTIMATED_BYTES = 256 << 10  # Up to here the estimate itself takes less than 0.1 ms.
INLINE_S = 0.002
THREAD_S = 0.03  # Maximum time the loop is blocked while a thread decodes.
DECODING_THREADS = 1  # The decoder holds the interpreter lock, so that more would not be faster.
SLICE_BYTES = 1 << 20  # Bytes counted at a time; other threads run in between.
BYTE_S, COMMA_S, OBJECT_S = 0.4e-9, 60e-9, 500e-9
"""Decoding time of a byte of text, a list item, and an object or a list, on a slow core."""
FRACTION_S, SLOW_NUMBER_S = 380e-9, 17e-6
"""Decoding time of a number with a fraction or an exponent, and of one whose exponent has three digits."""
SHAPE = bytes.maketrans(b"123456789E+", b"000000000e-")
"""Characters of numbers by their kind, so that patterns of numbers are found by plain searches."""

CHILD_MEMORY_BYTES = 2 << 30
MEDIA_PREFIX = "DYN_MM_"  # Prefix of the variables that limit media.
CHILD_DEADLINE_S = 20.0
CHILDREN_MAX = 2
WAITING_MAX = 8  # Each waiting request holds a large body.


async def decoded(body: bytes | bytearray, decode: Callable[[bytes], T], kind: str = "") -> T:
    """Return `decode(body)`. Raise `InvalidArgument`, or `Overloaded` for too many large bodies.

    `kind` names the same decoder in `http.body_child`; without it no child process is used.
    """
    size = len(body)
    given = cast("bytes", body)  # The decoders accept both types; a copy would block the loop.
    if is_short(body):
        return decode(given)
    if kind and (
        size > request_bounds().text_chars
        or await in_few_threads(lambda: estimated_s(body), "body", DECODING_THREADS) > THREAD_S
    ):  # Only a child may find out that so much text is not allowed.
        await in_daemon_thread(lambda: _check(body, kind), "request body")
    return await in_few_threads(lambda: decode(given), "body", DECODING_THREADS)


def check_slow(body: bytes | bytearray, kind: str, is_wanted: Callable[[], bool]) -> None:
    """Decode a body that would take long in a child process; return at once for others. For callers in a thread of their own.

    Raise `InvalidArgument` for a body that is invalid or beyond the limits of requests, `Overloaded` for too many large bodies,
    and `Cancelled` soon after `is_wanted` returns False.
    """
    if len(body) > request_bounds().text_chars or estimated_s(body) > THREAD_S:
        _check(body, kind, is_wanted)


def is_short(body: bytes | bytearray) -> bool:
    """Return whether a body can be decoded on the event loop."""
    size = len(body)
    if size <= INLINE_BYTES:
        return body.count(b",") <= INLINE_COMMAS or slow_numbers(body) * SLOW_NUMBER_S <= INLINE_S
    return size <= ESTIMATED_BYTES and estimated_s(body) <= INLINE_S


def estimated_s(body: bytes | bytearray) -> float:
    """Return an upper bound of the decoding time in seconds; separators and numbers within strings are counted as well."""
    commas = objects = fractions = slow = 0
    for start in range(0, len(body), SLICE_BYTES):
        end = start + SLICE_BYTES
        commas += body.count(b",", start, end)
        objects += body.count(b"{", start, end) + body.count(b"[", start, end)
        shape = body[start:end].translate(SHAPE)
        fractions += shape.count(b"0.0") + shape.count(b"0e")
        slow += _slow_in(shape)
    numbers_s = fractions * FRACTION_S + slow * SLOW_NUMBER_S
    return len(body) * BYTE_S + commas * COMMA_S + objects * OBJECT_S + numbers_s


def slow_numbers(body: bytes | bytearray) -> int:
    """Return an upper bound of the numbers whose exponent has three digits; the decoder takes 1,000 times as long for them."""
    return _slow_in(body.translate(SHAPE))


def _slow_in(shape: bytes | bytearray) -> int:
    return shape.count(b"0e000") + shape.count(b"0e-000")


@functools.cache
def _pool() -> ChildPool:
    return ChildPool(
        "dynamo.http.body_child",
        deadline_s=CHILD_DEADLINE_S,
        memory_bytes=CHILD_MEMORY_BYTES,
        children_max=CHILDREN_MAX,
        per_key_max=CHILDREN_MAX,
        waiting_max=WAITING_MAX,
        variables=BOUNDS_VARIABLES,
        prefixes=(MEDIA_PREFIX,),
    )


def _check(body: bytes | bytearray, kind: str, is_wanted: Callable[[], bool] | None = None) -> None:
    """Decode in a child process. Raise the error of the body."""
    try:
        _pool().call((kind,), body, is_wanted=is_wanted)
    except (ChildTimeout, ChildOutOfMemory):
        message = f"the body of {len(body)} bytes has too many values to be decoded"
        raise InvalidArgument(f"Validation: {message}") from None
    except ChildUnwanted:
        raise Cancelled("the body is no longer to be decoded") from None
    except ChildPoolBusy:
        raise Overloaded("too many large request bodies are being decoded") from None
    except ChildError as error:
        raise Unknown(f"the body could not be decoded: {error}") from None
