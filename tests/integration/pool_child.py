"""Child process of `core.child_pool` whose computation the request selects."""

from typing import Any

from dynamo.core.child_process import serve
from dynamo.core.errors import HttpError, InvalidArgument


def compute(request: Any) -> Any:
    """Return, fail, spin or allocate."""
    kind, value = request
    if kind == "echo":
        return value
    if kind == "spin":
        while True:
            pass
    if kind == "square":
        number = 1 << 10_000
        while True:
            number *= number  # A product of large numbers does not release the GIL.
    if kind == "allocate":
        return len(bytearray(value))
    if kind == "keep":
        kept.append(bytes(range(256)) * (value >> 8))
        return len(kept[-1])
    if kind == "refuse":
        raise InvalidArgument("no", param="field")
    if kind == "http":
        raise HttpError(501, "not here")
    raise ZeroDivisionError


kept: list[bytes] = []

if __name__ == "__main__":
    raise SystemExit(serve(compute))
