"""JSON patch, JSON merge patch and strategic merge patch."""

from typing import Any

from tests.cluster.kubernetes.errors import ApiError, Object
from tests.cluster.kubernetes.schema import Schema, cloned


def json_patch(document: Object, operations: Any) -> Any:
    """Apply RFC 6902 operations to a copy of the document. Raises 422 for a failed test or an absent path."""
    if not isinstance(operations, list):
        raise ApiError(400, "error decoding patch: json: cannot unmarshal object into Go value of type jsonpatch.Patch")
    result: Any = cloned(document)
    for one in operations:
        if not isinstance(one, dict) or "op" not in one or "path" not in one:
            raise ApiError(400, "error decoding patch: each operation has op and path")
        result = _operate(result, one)
    return result


def _operate(document: Any, one: Object) -> Any:
    path = _pointer(one["path"])
    match one["op"]:
        case "add":
            return _add(document, path, cloned(one.get("value")))
        case "remove":
            _take(document, path)
        case "replace":
            if path:
                _take(document, path)
            return _add(document, path, cloned(one.get("value")))
        case "move":
            return _add(document, path, _take(document, _pointer(one["from"])))
        case "copy":
            return _add(document, path, cloned(_look(document, _pointer(one["from"]))))
        case "test":
            if _look(document, path, missing_ok=True) != one.get("value"):
                raise _refused(f"testing value {one['path']} failed: test failed")
        case other:
            raise ApiError(400, f"error decoding patch: unexpected operation {other}")
    return document


def _refused(message: str) -> ApiError:
    return ApiError(422, f"the server rejected our request due to an error in our request: {message}", "Invalid")


def _pointer(path: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]


def _look(document: Any, path: list[str], *, missing_ok: bool = False) -> Any:
    for part in path:
        try:
            document = document[int(part)] if isinstance(document, list) else document[part]
        except (KeyError, IndexError, ValueError, TypeError):
            if missing_ok:
                return None
            raise _refused(f"operation does not apply: doc is missing path: {'/'.join(path)}: missing value") from None
    return document


def _add(document: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    parent = _look(document, path[:-1])
    if isinstance(parent, list):
        index = len(parent) if path[-1] == "-" else int(path[-1])
        if index > len(parent):
            raise _refused(f"add operation does not apply: index {index} out of bounds")
        parent.insert(index, value)
    elif isinstance(parent, dict):
        parent[path[-1]] = value
    else:
        raise _refused(f"add operation does not apply: doc is missing path: {'/'.join(path)}: missing value")
    return document


def _take(document: Any, path: list[str]) -> Any:
    _look(document, path)
    parent = _look(document, path[:-1])
    return parent.pop(int(path[-1])) if isinstance(parent, list) else parent.pop(path[-1])


def merge_patch(target: Any, patch: Any) -> Any:
    """Return the result of an RFC 7386 merge patch."""
    if not isinstance(patch, dict):
        return cloned(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge_patch(result.get(name), value)
    return result


def strategic_merge_patch(target: Any, patch: Any, schema: Schema | None) -> Any:
    """Merge as a merge patch, but lists with merge keys by item; supports $patch, $deleteFromPrimitiveList, $retainKeys."""
    if not isinstance(patch, dict):
        return cloned(patch)
    directive = patch.get("$patch")
    if directive == "delete":
        return {}
    base = {} if directive == "replace" or not isinstance(target, dict) else dict(target)
    retained = patch.get("$retainKeys")
    if retained is not None:
        base = {name: one for name, one in base.items() if name in retained}
    for name, value in patch.items():
        if name.startswith("$deleteFromPrimitiveList/"):
            field = name.partition("/")[2]
            base[field] = [one for one in base.get(field) or [] if one not in value]
        elif name.startswith("$"):
            continue
        elif value is None:
            base.pop(name, None)
        else:
            child = schema.child(name) if schema else None
            base[name] = _strategic_value(base.get(name), value, child)
    return base


def _strategic_value(target: Any, value: Any, schema: Schema | None) -> Any:
    if isinstance(value, list) and schema and isinstance(target, list):
        if schema.map_keys:
            return _merge_items(target, value, schema)
        if schema.set:
            return [*target, *(one for one in value if one not in target)]
    if isinstance(value, list) and schema and schema.map_keys:
        return _merge_items([], value, schema)
    return strategic_merge_patch(target, value, schema) if isinstance(value, dict) else cloned(value)


def _merge_items(target: list[Any], patch: list[Any], schema: Schema) -> list[Any]:
    key = schema.map_keys[0]  # Strategic merge knows one merge key, also where apply uses more.
    if any(isinstance(one, dict) and one.get("$patch") == "replace" for one in patch):
        return [cloned(one) for one in patch if "$patch" not in one]
    merged = list(target)
    for one in patch:
        if key not in one:
            raise ApiError(400, f"map: {one} does not contain declared merge key: {key}")
        index = next((at for at, item in enumerate(merged) if item.get(key) == one[key]), None)
        if one.get("$patch") == "delete":
            merged = [item for item in merged if item.get(key) != one[key]]
        elif index is None:
            merged.append(strategic_merge_patch({}, one, schema.items))
        else:
            merged[index] = strategic_merge_patch(merged[index], one, schema.items)
    return merged
