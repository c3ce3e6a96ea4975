"""Overlay of JSON data: an override is laid over what the operator makes."""

from collections.abc import Set as AbstractSet
from typing import Any


def overlaid(base: Any, given: Any, appended: AbstractSet[str] = frozenset(), name: str = "") -> Any:
    """Return `base` with the fields of `given`: objects are merged, and lists of named objects by name; null removes.

    Other lists are replaced, but those of the fields in `appended` are extended.
    """
    if isinstance(base, dict) and isinstance(given, dict):
        result = dict(base)
        for key, value in given.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = overlaid(base[key], value, appended, key) if base.get(key) is not None else value
        return result
    if isinstance(base, list) and isinstance(given, list):
        if name in appended:
            return [*base, *(one for one in given if name == "args" or one not in base)]
        if _is_named(base) and _is_named(given):
            found = {one["name"]: one for one in base}
            for one in given:
                found[one["name"]] = overlaid(found.get(one["name"], {}), one, appended)
            return list(found.values())
    return given


def _is_named(value: list[Any]) -> bool:
    return all(isinstance(one, dict) and "name" in one for one in value)
