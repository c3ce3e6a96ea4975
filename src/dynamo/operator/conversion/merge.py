"""Three-way merge of JSON data: the changes between two objects, made to a third one."""

from typing import Any

ABSENT = object()


def merged(original: Any, before: Any, after: Any) -> Any:
    """Return `original` with the changes from `before` to `after`.

    Objects are merged by field, and lists of objects with names by name; other values are replaced if they changed.
    """
    if before == after:
        return original
    if isinstance(original, dict) and isinstance(before, dict) and isinstance(after, dict):
        return _merged_fields(original, before, after)
    keyed = [_by_name(value) for value in (original, before, after)]
    if all(one is not None for one in keyed):
        first, old, new = ({} if one is None else one for one in keyed)
        found = _merged_fields(first, old, new)
        order = [*(name for name in new if name in found), *(name for name in found if name not in new)]
        return [found[name] for name in order]
    return after


def _merged_fields(original: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    result = dict(original)
    for name in {**before, **after}:
        old, new = before.get(name, ABSENT), after.get(name, ABSENT)
        if old == new:
            continue
        if new is ABSENT:
            result.pop(name, None)
        elif name in original and old is not ABSENT:
            result[name] = merged(original[name], old, new)
        else:
            result[name] = new
    return result


def _by_name(value: Any) -> dict[str, Any] | None:
    """Return the items of a list by name, or None if it is not a list of objects with unique names."""
    if not isinstance(value, list) or not all(isinstance(one, dict) and "name" in one for one in value):
        return None
    found = {one["name"]: one for one in value}
    return found if len(found) == len(value) else None
