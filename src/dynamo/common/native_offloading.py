"""The capacity of an engine's own KV offloading, in runtime data."""

import math
from collections.abc import Mapping

NATIVE_OFFLOADING_CAPACITY_RUNTIME_KEY = "native_offloading_capacity"


def native_offloading_capacity(total_tokens: object) -> dict[str, int] | None:
    """Return the runtime data of a capacity in tokens; None if it is no positive number."""
    if isinstance(total_tokens, bool) or not isinstance(total_tokens, int | float) or not math.isfinite(total_tokens):
        return None
    return {"total_tokens": int(total_tokens)} if total_tokens >= 1 else None


def get_native_offloading_capacity_tokens(runtime_data: object) -> int | None:
    """Return the capacity in tokens of runtime data; None if it has none."""
    found: object = runtime_data
    for key in (NATIVE_OFFLOADING_CAPACITY_RUNTIME_KEY, "total_tokens"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return (native_offloading_capacity(found) or {}).get("total_tokens")
