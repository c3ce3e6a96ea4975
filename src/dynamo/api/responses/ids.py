"""Ids of responses and of their items: an item's id tells which response it belongs to.

    resp_0a1b…(24 digits)9c2d4e6f     a response
    msg_0a1b…(the same 24)00000002    its third output item
    msg_0a1b…(the same 24)80000000    its first input item

The first 24 hexadecimal digits are the response's key in a store: an item is found where its response is.
"""

import re
import secrets

KEY_DIGITS = 24
INPUT = 1 << 31
"""Added to an input item's number."""

_ID = re.compile(r"[a-z]{2,8}_([0-9a-f]{24})([0-9a-f]{8})")


def new_response_id() -> str:
    """An id that nobody can guess: who knows it may read the response."""
    return f"resp_{secrets.token_hex(16)}"


def key_of(id: str) -> str | None:
    """The key of the response that has this id, or that has an item with it; None for an id that is none of ours."""
    match = _ID.fullmatch(id)
    return match.group(1) if match else None


def item_id(prefix: str, response_id: str, number: int) -> str:
    """The id of an item of a response."""
    key = key_of(response_id)
    assert key is not None, f"{response_id} is no id of a response"
    return f"{prefix}_{key}{number:08x}"
