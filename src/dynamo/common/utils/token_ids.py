"""Token ids in requests: lists, or packed 32-bit little-endian integers."""

from collections.abc import Mapping, MutableMapping
from types import NoneType
from typing import Any, TypeVar, cast, overload

import numpy as np

from dynamo.core.errors import InvalidArgument

ID_BYTES = 4

RequestT = TypeVar("RequestT", bound=Mapping[str, Any])


@overload
def token_ids_to_list(value: None) -> None: ...


@overload
def token_ids_to_list(value: Any) -> list[int]: ...


def token_ids_to_list(value: Any) -> list[int] | None:
    """Return token ids as a list. Raise `ValueError` for packed ids whose length is no multiple of 4 bytes."""
    if isinstance(value, bytes | bytearray | memoryview):
        value = _unpacked(memoryview(value))
    if isinstance(value, list | NoneType):
        return value
    return list(value.tolist() if hasattr(value, "tolist") else value)


def _unpacked(packed: memoryview) -> Any:
    """Return an array of ids."""
    if packed.nbytes % ID_BYTES:
        raise InvalidArgument(f"token_ids of {packed.nbytes} bytes: expected {ID_BYTES} bytes for each id")
    return np.frombuffer(packed, "<i4")


def token_ids_len(value: Any) -> int:
    """Return the number of token ids."""
    is_packed = isinstance(value, bytes | bytearray | memoryview)
    return memoryview(value).nbytes // ID_BYTES if is_packed else len(value or ())


def normalize_request_token_ids(request: RequestT) -> RequestT:
    """Replace packed `token_ids` of a request by a list, in place, and return the request."""
    if not isinstance(request.get("token_ids"), list | NoneType):
        cast(MutableMapping[str, Any], request).update(token_ids=token_ids_to_list(request["token_ids"]))
    return request
