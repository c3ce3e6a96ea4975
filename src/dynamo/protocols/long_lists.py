"""LongLists: decodes the long lists of token ids of a JSON body in parts, so that no single call holds the interpreter lock for long.

The decoder takes 25 ms for a million ids and lets no other thread run meanwhile. The body is therefore decoded with a short
stand-in value for each long list, each list in parts of one or two milliseconds, and the lists put where these values are.
"""

import secrets
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from dynamo.core.errors import InvalidArgument

T = TypeVar("T")

BODY_BYTES = 128 << 10  # A shorter body is decoded within 2 ms.
LIST_BYTES = 16 << 10  # A shorter list is left in the body, which may have 128 of them.
PART_BYTES = 128 << 10
TOKENS_MAX = 4096
"""Strings and lists of a body, beyond which it is decoded at once: a body of token ids has few."""
ESCAPES_MAX = 64
HOLDERS = (list, dict, Struct)
QUOTE, BACKSLASH = b'"', b"\\"

_ids = msgspec.json.Decoder(list[Annotated[int, Meta(ge=0, lt=1 << 32)]]).decode


def decode_in_parts(body: bytes | bytearray, decode: Callable[[bytes], T]) -> T | None:
    """Return `decode(body)`, computed in parts; None if the body must be decoded at once.

    That is so for a body without long lists of ids, for an invalid one, and for one with a long list in a part that the decoder
    drops or leaves undecoded.
    """
    found = long_lists(body) if len(body) >= BODY_BYTES else ()
    if not found:
        return None
    names = {(secrets.randbits(32), secrets.randbits(32)): span for span in found}  # A client cannot know them.
    short, end = bytearray(), 0
    for name, (start, stop) in names.items():
        short += memoryview(body)[end:start]
        short += b"[%d,%d]" % name
        end = stop
    short += memoryview(body)[end:]
    try:
        result = decode(bytes(short))
    except InvalidArgument:  # Its text may have a place of the short body.
        return None
    return result if _fill(result, body, names) else None


def _fill(result: Any, body: bytes | bytearray, names: dict[tuple[Any, Any], tuple[int, int]]) -> bool:
    """Put the lists in place of their names, anywhere in the result; return whether all are."""
    waiting = [result]
    while waiting and names:
        one = waiting.pop()
        if isinstance(one, list):
            span = names.pop((one[0], one[1]), None) if len(one) == 2 and type(one[0]) is type(one[1]) is int else None
            if span is None:
                waiting += [inner for inner in one if isinstance(inner, HOLDERS)]
            else:
                one.clear()
                if not _read_list(body, *span, one):
                    return False
        else:
            values = one.values() if isinstance(one, dict) else [getattr(one, name) for name in one.__struct_fields__]
            waiting += [inner for inner in values if isinstance(inner, HOLDERS)]
    return not names


def long_lists(body: bytes | bytearray) -> list[tuple[int, int]]:
    """Return begin and end of the long lists of numbers in a JSON text; none if it has too many strings or lists to find them."""
    found: list[tuple[int, int]] = []
    at, stop, is_text = 0, -1, False
    for _ in range(TOKENS_MAX):
        if stop < at:
            quote = body.find(QUOTE, at)
            stop = len(body) if quote < 0 else quote
        if is_text:
            at, is_text = stop + 1, _is_escaped(body, stop)
        elif stop - at > LIST_BYTES and (end := body.find(b"]", at, stop)) >= 0:
            start = body.rfind(b"[", at, end)
            if start >= 0 and end - start > LIST_BYTES and body.find(b"{", start, end) < 0:
                found.append((start, end + 1))
            at = end + 1
        else:
            at, is_text = stop + 1, True
        if at >= len(body):
            return found
    return []


def _is_escaped(body: bytes | bytearray, quote: int) -> bool:
    """Return whether a quote in a string belongs to it, by the last `ESCAPES_MAX` characters.

    After more backslashes it may be wrong; a text that is then taken for a list gets no list in its place.
    """
    before = bytes(memoryview(body)[max(quote - ESCAPES_MAX, 0) : quote])
    return (len(before) - len(before.rstrip(BACKSLASH))) % 2 == 1


def _read_list(body: bytes | bytearray, start: int, stop: int, values: list[int]) -> bool:
    """Append the ids of a list to `values`; return whether it is one of ids."""
    at, last = start + 1, stop - 1
    while at < last:
        cut = body.find(b",", at + PART_BYTES, last)
        end = last if cut < 0 else cut
        try:
            part = _ids(b"[%b]" % bytes(memoryview(body)[at:end]))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        if not part:
            return False
        values += part
        at = end + 1
    return at == stop  # Not so after a comma.
