"""Reader of nested settings: converts JSON values into frozen dataclasses by their annotations.

Scalars are converted as pydantic's lax mode does, because released configurations rely on it: `"5"` and `5.0` are integers,
`"yes"` is true. Every refusal is one line that names the field, its value and what is allowed.
"""

import dataclasses
import enum
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from dynamo.core.errors import ConfigError

C = TypeVar("C")

TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})
FALSE = frozenset({"0", "false", "f", "no", "n", "off"})
VALUE_CHARS_MAX = 80
"""Characters of a wrong value in an error; a whole document in one line would hide the field's name."""


def setting_field(
    default: Any = dataclasses.MISSING,
    *,
    gt: float | None = None,
    ge: float | None = None,
    le: float | None = None,
    aliases: tuple[str, ...] = (),
    env: str | None = None,
    is_secret: bool = False,
    is_dumped: bool = True,
) -> Any:
    """Return a dataclass field with its bounds, other accepted names and environment variable.

    A mutable default is given as a function without arguments. `is_dumped=False` keeps the field out of `dump`.
    """
    metadata = {
        "gt": gt,
        "ge": ge,
        "le": le,
        "aliases": aliases,
        "env": env,
        "is_secret": is_secret,
        "is_dumped": is_dumped,
    }
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def read(config_type: type[C], raw: Any, *, path: str = "", allows_unknown: bool = False) -> C:
    """Return an instance of a dataclass from a mapping. Raise `ConfigError` for a wrong or an unknown field."""
    if isinstance(raw, config_type):
        return raw
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path or 'configuration'}: {_shown(raw)}: must be an object with named fields")
    hints = typing.get_type_hints(config_type)
    values: dict[str, Any] = {}
    known: set[str] = set()
    for field in dataclasses.fields(config_type):  # type: ignore[arg-type]
        names = (field.name, *field.metadata.get("aliases", ()))
        known.update(names)
        given = next((name for name in names if name in raw), None)
        if given is not None:
            values[field.name] = _value(hints[field.name], raw[given], _join(path, given), field.metadata)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            name = field.metadata.get("dumped_as", field.name)
            raise ConfigError(f"{_join(path, name)}: missing; must be {_expected(hints[field.name], field.metadata)}")
    unknown = sorted(str(name) for name in raw if name not in known)
    if unknown and not allows_unknown:
        raise ConfigError(f"{_join(path, unknown[0])}: unknown field; must be one of {', '.join(sorted(known))}")
    return config_type(**values)


def unknown_fields(config_type: type[Any], raw: Mapping[str, Any]) -> list[str]:
    """Return the names in a mapping that are no field and no alias of a configuration."""
    known = {
        name for field in dataclasses.fields(config_type) for name in (field.name, *field.metadata.get("aliases", ()))
    }
    return sorted(str(name) for name in raw if name not in known)


def dump(config: Any) -> dict[str, Any]:
    """Return the JSON form of a configuration, without secrets and the fields that are not dumped."""
    return {
        field.metadata.get("dumped_as", field.name): _plain(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.metadata.get("is_dumped", True) and not field.metadata.get("is_secret")
    }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dump(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {_plain(key): _plain(one) for key, one in value.items()}
    return value


def _value(hint: Any, raw: Any, path: str, bounds: Mapping[str, Any]) -> Any:
    """Return one converted value. Raise `ConfigError` naming `path`."""
    origin = typing.get_origin(hint)
    if origin is types.UnionType or origin is typing.Union:
        inner = next(part for part in typing.get_args(hint) if part is not types.NoneType)
        return None if raw is None else _value(inner, raw, path, {**bounds, "is_optional": True})
    if origin is list:
        if not isinstance(raw, (list, tuple)):
            raise ConfigError(f"{path}: {_shown(raw)}: must be a list")
        (inner,) = typing.get_args(hint)
        return [_value(inner, one, f"{path}.{index}", {}) for index, one in enumerate(raw)]
    if origin is dict:
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{path}: {_shown(raw)}: must be an object")
        key_type, inner = typing.get_args(hint)
        return {
            _value(key_type, key, f"{path} key", {}): _value(inner, one, _join(path, str(key)), {})
            for key, one in raw.items()
        }
    if hint is Any:
        return raw
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return read(hint, raw, path=path)
    try:
        value = _scalar(hint, raw)
    except (ValueError, TypeError):
        raise ConfigError(f"{path}: {_shown(raw, bounds)}: must be {_expected(hint, bounds)}") from None
    if not _within(value, bounds):
        raise ConfigError(f"{path}: {_shown(raw, bounds)}: must be {_expected(hint, bounds)}")
    return value


def _scalar(hint: Any, raw: Any) -> Any:
    """Return a number, a text, a boolean or an enum member. Raise `ValueError` or `TypeError`."""
    if hint is bool:
        return _boolean(raw)
    if hint is int:
        return _integer(raw)
    if hint is float:
        if not isinstance(raw, (int, float, str)):
            raise TypeError(raw)
        return float(raw)
    if isinstance(hint, type) and issubclass(hint, enum.IntEnum):
        return hint[raw.upper()] if isinstance(raw, str) and raw.upper() in hint.__members__ else hint(raw)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(raw)
    if not isinstance(raw, str):
        raise TypeError(raw)
    return raw


def _boolean(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, (int, float)) and raw in (0, 1):
        return bool(raw)
    word = raw.lower() if isinstance(raw, str) else ""
    if word in TRUE or word in FALSE:
        return word in TRUE
    raise ValueError(raw)


def _integer(raw: Any) -> int:
    if isinstance(raw, int):
        return int(raw)
    if isinstance(raw, float):
        if not raw.is_integer():
            raise ValueError(raw)
        return int(raw)
    if isinstance(raw, str):
        text = raw.strip()
        whole, dot, fraction = text.partition(".")
        return int(whole if dot and fraction.strip("0") == "" and whole else text)
    raise TypeError(raw)


def _within(value: Any, bounds: Mapping[str, Any]) -> bool:
    """Return whether a number is within its bounds; NaN is within none."""
    lower, least, most = bounds.get("gt"), bounds.get("ge"), bounds.get("le")
    if lower is least is most is None:
        return True
    if isinstance(value, str):
        return len(value) >= (least or 0)
    return (
        (lower is None or value > lower)
        and (least is None or value >= least)
        and (most is None or value <= most)
        and not math.isnan(value)
    )


def _expected(hint: Any, bounds: Mapping[str, Any]) -> str:
    """Return what a field allows, in words."""
    if bounds.get("is_optional"):
        return f"{_expected(hint, {**bounds, 'is_optional': False})}, or null"
    if isinstance(hint, type) and issubclass(hint, enum.IntEnum):
        return "one of " + ", ".join(f"{one.name} ({one.value})" for one in hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "one of " + ", ".join(str(one.value) for one in hint)
    if hint is str and bounds.get("ge"):
        return "text that is not empty"
    kind = {bool: "true or false", int: "an integer", float: "a number", str: "text"}.get(hint, "a valid value")
    limits = [
        text
        for text, bound in (
            ("greater than {}", bounds.get("gt")),
            ("at least {}", bounds.get("ge")),
            ("at most {}", bounds.get("le")),
        )
        if bound is not None
        for text in [text.format(bound)]
    ]
    return f"{kind} {' and '.join(limits)}" if limits else kind


def _shown(raw: Any, bounds: Mapping[str, Any] | None = None) -> str:
    if bounds and bounds.get("is_secret"):
        return "(secret)"
    text = repr(raw)
    return text if len(text) <= VALUE_CHARS_MAX else f"{text[:VALUE_CHARS_MAX]}…"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
