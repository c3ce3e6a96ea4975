"""Parser of `--endpoint-types`."""

from functools import reduce
from operator import or_

from dynamo.llm import ModelType

TYPES = {"chat": ModelType.Chat, "completions": ModelType.Completions}


def parse_endpoint_types(endpoint_types_str: str) -> ModelType:
    """Return the APIs in a comma-separated list; `none` alone is no API. Raise `ValueError`."""
    names = [name.strip().lower() for name in (endpoint_types_str or "").split(",") if name.strip()]
    if not names:
        raise ValueError("endpoint types: the list is empty; expected chat, completions or none")
    if names == ["none"]:
        return ModelType.Empty
    if "none" in names:
        raise ValueError(f"endpoint types {endpoint_types_str!r}: 'none' cannot be combined with other types")
    unknown = [name for name in names if name not in TYPES]
    if unknown:
        raise ValueError(f"Invalid endpoint type: {unknown[0]!r}. Valid options: 'chat', 'completions', 'none'")
    return reduce(or_, (TYPES[name] for name in names))
