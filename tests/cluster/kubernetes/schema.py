"""Structural schemas: pruning, defaulting and validation with the field paths and messages of the API server."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from tests.cluster.kubernetes.errors import Object, cause, duplicate, invalid_value, not_supported, required

TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
}
FORMATS = {
    "date-time": re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)"),
    "date": re.compile(r"\d{4}-\d\d-\d\d"),
    "duration": re.compile(r"[+-]?(0|(\d+(\.\d*)?(ns|us|µs|ms|s|m|h))+)"),
    "byte": re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"),
    "uuid": re.compile(r"(?i)[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}"),
    "ipv4": re.compile(r"(\d{1,3}\.){3}\d{1,3}"),
    "uri": re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:.*|/.*"),
}
RANGES = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}
Rule = Callable[["Schema", Any, Any, str], Iterator[Object]]


class Schema:
    """One node of a structural schema; an empty one accepts and keeps everything."""

    __slots__ = (
        "additional",
        "atomic",
        "default",
        "embedded",
        "items",
        "junctors",
        "map_keys",
        "nullable",
        "preserve",
        "properties",
        "raw",
        "required",
        "rules",
        "set",
        "string_or_int",
        "type",
    )  # fmt: skip

    def __init__(self, raw: Object | None = None, rules: "Callable[[Schema], Rule] | None" = None) -> None:
        raw = raw or {}
        self.raw = raw
        self.type: str = raw.get("type", "")
        self.properties = {name: Schema(one, rules) for name, one in (raw.get("properties") or {}).items()}
        additional = raw.get("additionalProperties")
        self.additional = Schema(additional if isinstance(additional, dict) else {}, rules) if additional else None
        self.items = Schema(raw["items"], rules) if raw.get("items") else None
        self.required: list[str] = raw.get("required") or []
        list_type = raw.get("x-kubernetes-list-type", "atomic")
        self.map_keys: list[str] = (raw.get("x-kubernetes-list-map-keys") or []) if list_type == "map" else []
        self.set = list_type == "set"
        self.atomic = raw.get("x-kubernetes-map-type") == "atomic"
        self.preserve = bool(raw.get("x-kubernetes-preserve-unknown-fields")) or not raw
        self.string_or_int = bool(raw.get("x-kubernetes-int-or-string"))
        self.embedded = bool(raw.get("x-kubernetes-embedded-resource"))
        self.nullable = bool(raw.get("nullable"))
        self.default = raw.get("default")
        self.junctors = {
            name: [Schema(one, rules) for one in (raw[name] if name != "not" else [raw[name]])]
            for name in ("allOf", "anyOf", "oneOf", "not") if raw.get(name)
        }  # fmt: skip
        if self.string_or_int:
            self.junctors = {}
        self.rules: Rule | None = rules(self) if rules and raw.get("x-kubernetes-validations") else None

    def child(self, name: str) -> "Schema | None":
        """Return the schema of a key of an object, or None where the key is unknown."""
        found = self.properties.get(name) or self.additional
        if found is None and self.embedded and name in {"apiVersion", "kind"}:
            return Schema({"type": "string"})
        if found is None and self.embedded and name == "metadata":
            return Schema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})
        return found or (ANY if self.preserve else None)

    def keys_of(self, item: Any) -> tuple[Any, ...]:
        """Return the values of the list map keys of an item, with the defaults of absent ones."""
        known = self.items.properties if self.items else {}
        return tuple(
            item.get(key, known[key].default if key in known else None) if isinstance(item, dict) else None
            for key in self.map_keys
        )

    def prune(self, value: Any, path: str, unknown: list[str]) -> Any:
        """Return the value without unknown fields, whose paths are appended to `unknown`."""
        if isinstance(value, dict):
            if not self.raw:
                return value
            kept = {}
            for name, one in value.items():
                child = self.child(name)
                if child is None:
                    unknown.append(joined(path, name))
                else:
                    kept[name] = child.prune(one, joined(path, name), unknown)
            return kept
        if isinstance(value, list) and self.items:
            items = self.items
            return [items.prune(one, f"{path}[{index}]", unknown) for index, one in enumerate(value)]
        return value

    def drop_nulls(self, value: Any) -> None:
        """Remove, in place, the nulls of declared fields that are not nullable and have no default."""
        if isinstance(value, dict):
            for name, one in list(value.items()):
                found = self.properties.get(name) or self.additional
                if found is None:
                    continue
                if one is None and not found.nullable and found.default is None:
                    del value[name]
                found.drop_nulls(one)
        elif isinstance(value, list) and self.items:
            for one in value:
                self.items.drop_nulls(one)

    def apply_defaults(self, value: Any) -> None:
        """Set absent fields to their defaults, in place; a null of a field that is not nullable counts as absent."""
        if isinstance(value, dict):
            for name, child in self.properties.items():
                if value.get(name, ...) is None and not child.nullable and child.default is not None:
                    del value[name]
                if name not in value and child.default is not None:
                    value[name] = cloned(child.default)
            for name, one in value.items():
                found = self.properties.get(name) or self.additional
                if found:
                    found.apply_defaults(one)
        elif isinstance(value, list) and self.items:
            for one in value:
                self.items.apply_defaults(one)

    def validate(self, value: Any, path: str, old: Any = None) -> list[Object]:
        """Return the causes for which the value is refused; a value equal to the stored one is not checked again."""
        if old is not None and value == old:
            return []
        if value is None:
            return [] if self.nullable or not self.type else [type_error(path, self.type, None)]
        if self.string_or_int:
            return (
                [] if isinstance(value, str) or TYPES["integer"](value) else [type_error(path, "integer,string", value)]
            )
        if self.type and not TYPES[self.type](value):
            return [type_error(path, self.type, value)]
        causes = list(self._own(value, path))
        causes += self._junctors(value, path)
        if isinstance(value, dict):
            causes += self._object(value, path, old)
        elif isinstance(value, list):
            causes += self._array(value, path, old)
        if self.rules and not causes:
            causes += self.rules(self, value, old, path)
        return causes

    def _own(self, value: Any, path: str) -> Iterator[Object]:
        raw = self.raw
        if raw.get("enum") and value not in raw["enum"]:
            yield not_supported(path, value, raw["enum"])
        if isinstance(value, str):
            yield from _check_string(raw, value, path)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield from _check_number(raw, value, path)
        elif isinstance(value, list | dict):
            what = "Items" if isinstance(value, list) else "Properties"
            most, least = raw.get(f"max{what}"), raw.get(f"min{what}")
            if most is not None and len(value) > most:
                yield cause("FieldValueTooMany", f"Too many: {len(value)}: must have at most {most} items", path)
            if least is not None and len(value) < least:
                text = f"{path} in body should have at least {least} {what.lower()}"
                yield invalid_value(path, len(value), text)

    def _junctors(self, value: Any, path: str) -> list[Object]:
        causes: list[Object] = []
        for name, schemas in self.junctors.items():
            found = [one.validate(value, path) for one in schemas]
            passed = sum(not one for one in found)
            if name == "allOf":
                causes += [one for several in found for one in several]
            elif name == "not" and passed:
                causes.append(invalid_value(path, kind_of(value), f"{path} in body must not validate the schema (not)"))
            elif (name == "anyOf" and not passed) or (name == "oneOf" and passed != 1):
                text = "at least one schema (anyOf)" if name == "anyOf" else "one and only one schema (oneOf)"
                causes.append(invalid_value(path, kind_of(value), f"{path} in body must validate {text}"))
                causes += found[0] if not passed and len(found) == 1 else []
        return causes

    def _object(self, value: Object, path: str, old: Any) -> list[Object]:
        before = old if isinstance(old, dict) else {}
        causes = [required(joined(path, name)) for name in self.required if name not in value]
        for name, one in value.items():
            known = self.properties.get(name)
            child = known or self.additional
            if child:
                at = joined(path, name) if known else f"{path}[{name}]" if SPECIAL.search(name) else joined(path, name)
                causes += child.validate(one, at, before.get(name))
        return causes

    def _array(self, value: list[Any], path: str, old: Any) -> list[Object]:
        causes: list[Object] = []
        before: dict[Any, Any] = {}
        if self.map_keys and isinstance(old, list):
            before = {self.keys_of(one): one for one in old}
        seen: list[Any] = []
        for index, one in enumerate(value):
            at = f"{path}[{index}]"
            identity = self.keys_of(one) if self.map_keys else one
            if (self.map_keys or self.set) and identity in seen:
                shown = dict(zip(self.map_keys, identity, strict=True)) if self.map_keys else one
                causes.append(duplicate(at, shown))
            seen.append(identity)
            if self.items:
                causes += self.items.validate(one, at, before.get(identity) if self.map_keys else None)
        return causes


SPECIAL = re.compile(r"[^A-Za-z0-9_-]")
ANY = Schema()


def joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def cloned(value: Any) -> Any:
    """Return a deep copy of JSON data."""
    if isinstance(value, dict):
        return {name: cloned(one) for name, one in value.items()}
    return [cloned(one) for one in value] if isinstance(value, list) else value


def kind_of(value: Any) -> str:
    """Return the JSON type of a value."""
    if value is None:
        return "null"
    return next(name for name, accepts in TYPES.items() if accepts(value))


def type_error(path: str, expected: str, value: Any) -> Object:
    kind = kind_of(value)
    text = f'{path or "body"} in body must be of type {expected}: "{kind}"'
    return cause("FieldValueTypeInvalid", f'Invalid value: "{kind}": {text}', path)


def _check_string(raw: Object, value: str, path: str) -> Iterator[Object]:
    most, least = raw.get("maxLength"), raw.get("minLength")
    if most is not None and len(value) > most:
        yield cause("FieldValueTooLong", f"Too long: may not be more than {most} bytes", path)
    if least is not None and len(value) < least:
        yield invalid_value(path, value, f"{path} in body should be at least {least} chars long")
    if raw.get("pattern") and not re.search(raw["pattern"], value):
        yield invalid_value(path, value, f"{path} in body should match '{raw['pattern']}'")
    form = FORMATS.get(raw.get("format", ""))
    if form and not form.fullmatch(value):
        yield invalid_value(path, value, f"{path} in body must be of type {raw['format']}: {value!r}".replace("'", '"'))


def _check_number(raw: Object, value: float, path: str) -> Iterator[Object]:
    least, most = raw.get("minimum"), raw.get("maximum")
    if least is not None and (value < least or (raw.get("exclusiveMinimum") and value == least)):
        strict = "" if raw.get("exclusiveMinimum") else " or equal to"
        yield invalid_value(path, value, f"{path} in body should be greater than{strict} {least}")
    if most is not None and (value > most or (raw.get("exclusiveMaximum") and value == most)):
        strict = "" if raw.get("exclusiveMaximum") else " or equal to"
        yield invalid_value(path, value, f"{path} in body should be less than{strict} {most}")
    if raw.get("multipleOf") and value % raw["multipleOf"]:
        yield invalid_value(path, value, f"{path} in body should be a multiple of {raw['multipleOf']}")
    low, high = RANGES.get(raw.get("format", ""), (value, value))
    if not low <= value <= high:
        yield invalid_value(path, value, f"{path} in body must be of type {raw['format']}: {value}")
