"""Field ownership: the sets of `metadata.managedFields`, apply merges and their conflicts (structured merge and diff)."""

import json
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.kubernetes.errors import ApiError, Object, cause
from tests.cluster.kubernetes.schema import ANY, Schema, cloned

Path = tuple[str, ...]
Fields = frozenset[Path]
Identity = tuple[str, str, str, str]
"""Manager, operation, subresource, and for updates the API version."""

METADATA = (
    "name",
    "namespace",
    "creationTimestamp",
    "selfLink",
    "uid",
    "generation",
    "managedFields",
    "resourceVersion",
)
IGNORED: tuple[Path, ...] = (("f:apiVersion",), ("f:kind",), *(("f:metadata", f"f:{name}") for name in METADATA))


@dataclass(frozen=True, slots=True)
class Managed:
    """Fields of one manager."""

    fields: Fields
    api_version: str
    time: str


@dataclass(slots=True)
class Comparison:
    """Paths that differ between two objects."""

    added: set[Path] = field(default_factory=set)
    modified: set[Path] = field(default_factory=set)
    removed: set[Path] = field(default_factory=set)


def child_schema(schema: Schema, name: str) -> Schema:
    return schema.child(name) or ANY


def is_granular(value: Any, schema: Schema) -> bool:
    """Return whether the parts of a value are owned one by one; an empty container is owned as a whole."""
    if isinstance(value, dict):
        return bool(value) and not schema.atomic
    return isinstance(value, list) and bool(value) and bool(schema.map_keys or schema.set)


def parts(value: Any, schema: Schema) -> list[tuple[str, Any, Schema]]:
    """Return the path elements, values and schemas below a granular value."""
    if isinstance(value, dict):
        return [(f"f:{name}", one, child_schema(schema, name)) for name, one in value.items()]
    return [(element(one, schema), one, schema.items or ANY) for one in value]


def element(item: Any, schema: Schema) -> str:
    """Return the path element of a list item: by keys or by value."""
    if schema.set:
        return "v:" + json.dumps(item, separators=(",", ":"))
    keys = {key: one for key, one in zip(schema.map_keys, schema.keys_of(item), strict=True) if one is not None}
    return "k:" + json.dumps(keys, separators=(",", ":"), sort_keys=True)


def field_set(value: Any, schema: Schema, path: Path = ()) -> set[Path]:
    """Return the paths that a configuration sets: leaves, list items and keys of maps."""
    if not is_granular(value, schema):
        return {path}
    found: set[Path] = set()
    for name, one, below in parts(value, schema):
        at = (*path, name)
        found |= field_set(one, below, at)
        if not name.startswith("f:") or name[2:] not in schema.properties:
            found.add(at)
    return found - {()}


def all_paths(value: Any, schema: Schema, path: Path) -> set[Path]:
    """Return a path and every path below it."""
    found = {path}
    if is_granular(value, schema):
        for name, one, below in parts(value, schema):
            found |= all_paths(one, below, (*path, name))
    return found


def compare(old: Any, new: Any, schema: Schema, path: Path = (), into: Comparison | None = None) -> Comparison:
    """Return the paths at which two values differ."""
    result = Comparison() if into is None else into
    if old == new:
        return result
    if not (is_granular(old, schema) and is_granular(new, schema)):
        if is_granular(new, schema) and old in ({}, [], None):
            result.added |= field_set(new, schema, path)
        elif is_granular(old, schema) and new in ({}, [], None):
            result.removed |= all_paths(old, schema, path) - {path}
            result.modified.add(path)
        else:
            result.modified.add(path)
        return result
    before = {name: (one, below) for name, one, below in parts(old, schema)}
    for name, one, below in parts(new, schema):
        at = (*path, name)
        if name in before:
            compare(before.pop(name)[0], one, below, at, result)
        else:
            result.added |= all_paths(one, below, at)
    for name, (one, below) in before.items():
        result.removed |= all_paths(one, below, (*path, name))
    return result


def merge(live: Any, config: Any, schema: Schema) -> Any:
    """Return the live value with the configuration laid over it."""
    if isinstance(config, dict) and isinstance(live, dict) and not schema.atomic:
        merged = dict(live)
        for name, one in config.items():
            merged[name] = merge(live[name], one, child_schema(schema, name)) if name in live else cloned(one)
        return merged
    if isinstance(config, list) and isinstance(live, list) and (schema.map_keys or schema.set):
        return _merge_list(live, config, schema)
    return cloned(config)


def _merge_list(live: list[Any], config: list[Any], schema: Schema) -> list[Any]:
    """Order the items as in the configuration; items of the live list alone precede their successor."""
    remaining = {element(one, schema): one for one in live}
    wanted = {element(one, schema) for one in config}
    order = list(remaining)
    merged: list[Any] = []
    for one in config:
        name = element(one, schema)
        if name not in remaining:
            merged.append(cloned(one))
            continue
        earlier = [one for one in order[: order.index(name)] if one not in wanted and one in remaining]
        merged.extend(remaining.pop(one) for one in earlier)
        merged.append(merge(remaining.pop(name), one, schema.items or ANY))
    return merged + [one for name, one in remaining.items() if name not in wanted]


def remove_paths(value: Any, paths: set[Path], schema: Schema, path: Path = ()) -> Any:
    """Return the value without everything at and below the paths."""
    if not is_granular(value, schema):
        return value
    kept = [
        (name, remove_paths(one, paths, below, (*path, name)))
        for name, one, below in parts(value, schema)
        if (*path, name) not in paths
    ]
    return {name[2:]: one for name, one in kept} if isinstance(value, dict) else [one for _, one in kept]


def with_named_parents(fields: Fields | set[Path], schema: Schema) -> set[Path]:
    """Add the parents that are named fields of an object (not keys of maps, not list items)."""
    found = set(fields)
    for path in fields:
        node = schema
        for depth, name in enumerate(path[:-1], 1):
            if name.startswith("f:"):
                if name[2:] in node.properties:
                    found.add(path[:depth])
                node = child_schema(node, name[2:])
            else:
                node = node.items or ANY
    return found


def to_fields_v1(fields: Fields | set[Path]) -> Object:
    """Return the nested form of `fieldsV1`."""
    root: Object = {}
    for path in sorted(fields):
        node = root
        for name in path:
            node = node.setdefault(name, {})
        node["."] = {}
    return _without_leaf_dots(root)


def _without_leaf_dots(node: Object) -> Object:
    if set(node) == {"."}:
        return {}
    return {name: one if name == "." else _without_leaf_dots(one) for name, one in node.items()}


def from_fields_v1(node: Object, path: Path = ()) -> set[Path]:
    found = {path} if path and (not node or "." in node) else set()
    for name, one in node.items():
        if name != ".":
            found |= from_fields_v1(one, (*path, name))
    return found


def decode(entries: list[Object] | None) -> dict[Identity, Managed]:
    """Return the managers of `metadata.managedFields`."""
    found = {}
    for one in entries or ():
        version = one.get("apiVersion", "")
        operation = one.get("operation", "Update")
        identity = (
            one.get("manager", ""), operation, one.get("subresource", ""), "" if operation == "Apply" else version
        )  # fmt: skip
        fields = frozenset(from_fields_v1(one.get("fieldsV1") or {}))
        found[identity] = Managed(fields, version, one.get("time", ""))
    return found


def encode_managers(managers: dict[Identity, Managed]) -> list[Object]:
    """Return `metadata.managedFields`, sorted as the API server does."""
    entries = []
    order = sorted(managers.items(), key=lambda one: (one[0][1], one[1].time, one[0][0], one[0][2]))
    for (manager, operation, subresource, _), managed in order:
        entry = {
            "manager": manager, "operation": operation, "apiVersion": managed.api_version, "time": managed.time,
            "fieldsType": "FieldsV1", "fieldsV1": to_fields_v1(managed.fields),
        }  # fmt: skip
        entries.append({**entry, "subresource": subresource} if subresource else entry)
    return entries


def without(fields: set[Path] | Fields, prefixes: tuple[Path, ...]) -> Fields:
    """Return the fields that are not at or below one of the prefixes."""
    return frozenset(path for path in fields if not any(path[: len(prefix)] == prefix for prefix in prefixes))


@dataclass(frozen=True, slots=True)
class Ownership:
    """One write by one manager: its identity, endpoint and time."""

    manager: str
    api_version: str
    subresource: str
    time: str
    ignored: tuple[Path, ...]
    """Fields that this endpoint resets, and which are not owned through it."""

    def update(self, live: Object, new: Object, schema: Schema, managers: dict[Identity, Managed]) -> list[Object]:
        """Return the managed fields after an update: the changed fields move to this manager."""
        difference = compare(_owned_part(live), _owned_part(new), schema)
        changed = difference.added | difference.modified
        identity = self.manager, "Update", self.subresource, self.api_version
        own = managers.get(identity)
        result = _without_fields(managers, identity, changed, difference.removed)
        fields = without(((own.fields if own else frozenset()) - difference.removed) | changed, self._prefixes())
        return encode_managers(self._set(result, identity, fields, own))

    def apply(
        self, live: Object, config: Object, schema: Schema, managers: dict[Identity, Managed], *, force: bool
    ) -> tuple[Object, list[Object]]:
        """Return the merged object and its managed fields. Raises 409 where another manager owns a changed field."""
        identity = self.manager, "Apply", self.subresource, ""
        own = managers.get(identity)
        fields = without(field_set(config, schema), self._prefixes())
        merged = merge(live, config, schema)
        if own:
            others = {path for name, one in managers.items() if name != identity for path in one.fields}
            kept = with_named_parents(frozenset(others) | fields, schema)
            merged = remove_paths(merged, with_named_parents(own.fields, schema) - kept, schema)
        difference = compare(_owned_part(live), _owned_part(merged), schema)
        changed = without(difference.added | difference.modified, self._prefixes())
        if not force:
            _check_conflicts(managers, identity, changed)
        result = _without_fields(managers, identity, set(changed), difference.removed)
        return merged, encode_managers(self._set(result, identity, fields, own))

    def _prefixes(self) -> tuple[Path, ...]:
        return (*IGNORED, *self.ignored)

    def _set(
        self, managers: dict[Identity, Managed], identity: Identity, fields: Fields, own: Managed | None
    ) -> dict[Identity, Managed]:
        unchanged = own is not None and own.fields == fields and own.api_version == self.api_version
        managers.pop(identity, None)
        if fields:
            time = own.time if own is not None and unchanged else self.time
            managers[identity] = Managed(fields, self.api_version, time)
        return managers


def _owned_part(item: Object) -> Object:
    """Return the owned part of an object; the other fields need not be compared."""
    metadata = {name: one for name, one in item.get("metadata", {}).items() if name not in METADATA}
    rest = {name: one for name, one in item.items() if name not in {"apiVersion", "kind", "metadata"}}
    return {**rest, "metadata": metadata} if metadata else rest


def _without_fields(
    managers: dict[Identity, Managed], identity: Identity, changed: set[Path], removed: set[Path]
) -> dict[Identity, Managed]:
    lost = changed | removed
    kept = {
        name: one
        if name == identity or not one.fields & lost
        else Managed(one.fields - lost, one.api_version, one.time)
        for name, one in managers.items()
    }
    return {name: one for name, one in kept.items() if one.fields}


def _check_conflicts(managers: dict[Identity, Managed], identity: Identity, changed: Fields) -> None:
    causes = []
    for name, one in sorted(managers.items()):
        if name != identity:
            manager = f'conflict with "{name[0]}"'
            manager += f' with subresource "{name[2]}"' if name[2] else ""
            manager += f" using {one.api_version}" if name[1] == "Update" else ""
            causes += [cause("FieldManagerConflict", manager, dotted(path)) for path in sorted(one.fields & changed)]
    if causes:
        noun = "conflict" if len(causes) == 1 else "conflicts"
        lines = (
            f"{causes[0]['message']}: {causes[0]['field']}" if len(causes) == 1
            else "\n".join(f"{one['message']}:\n- {one['field']}" for one in causes)
        )  # fmt: skip
        message = f"Apply failed with {len(causes)} {noun}: {lines}"
        raise ApiError(409, message, "Conflict", {"causes": causes})


def dotted(path: Path) -> str:
    """Return a path as messages show it: `.spec.containers[name="main"].image`."""
    text = ""
    for name in path:
        if name.startswith("f:"):
            text += "." + name[2:]
        elif name.startswith("k:"):
            keys = json.loads(name[2:])
            text += "[" + ",".join(f"{key}={json.dumps(one)}" for key, one in keys.items()) + "]"
        else:
            text += f"[={name[2:]}]"
    return text
