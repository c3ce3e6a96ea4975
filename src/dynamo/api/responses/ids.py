"""Ids of responses and of their items: an item's id contains the key of its response.

    resp_0a1b…(24 digits)9c2d4e6f     a response
    msg_0a1b…(the same 24)00000002    its third output item
    msg_0a1b…(the same 24)80000000    its first input item

The first 24 hexadecimal digits are the response's key in a store, so that an item is found through its response.
"""

import functools
import re
import secrets

KEY_DIGITS = 24
INPUT = 1 << 31
"""Offset of input item numbers."""

_ID = re.compile(r"[a-z]{2,8}_([0-9a-f]{24})([0-9a-f]{8})")


def new_response_id() -> str:
    """Return an unguessable id: knowledge of it permits reading the response."""
    return f"resp_{secrets.token_hex(16)}"


def key_of(id: str) -> str | None:
    """Return the store key of a response id or item id; None for an id that this server did not create."""
    match = _ID.fullmatch(id)
    return match.group(1) if match else None


@functools.lru_cache(maxsize=64)
def own_key(response_id: str) -> str:
    """Return the store key of a response that this server created."""
    key = key_of(response_id)
    assert key is not None, f"{response_id} is not a response id"
    return key


def item_id(prefix: str, response_id: str, number: int) -> str:
    """Return the id of an item of a response."""
    return f"{prefix}_{own_key(response_id)}{number:08x}"
