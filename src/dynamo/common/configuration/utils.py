"""Declaration of argparse flags whose default is an environment variable, and parsers of their values."""

import argparse
import warnings
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, TypeVar, cast

from dynamo.core.config import environ

T = TypeVar("T")

TRUE = frozenset({"1", "true", "on", "yes"})
FALSE = frozenset({"", "0", "false", "off", "no"})
Reader = Callable[[str], Any]
Parser = Any
"""An `argparse.ArgumentParser`, or a group of it."""
READERS: dict[type, Reader] = {bool: lambda text: text.strip().lower() in TRUE, list: str.split, NoneType: str}
"""Parsers of variables whose type is no parser itself."""


@dataclass(frozen=True)
class Deprecated:
    """Deprecation of a flag: what replaces it and the release that removes it."""

    replacement: str
    remove_in: str

    def message(self, name: str) -> str:
        """Return one sentence for the help and the warning."""
        return f"{name} is deprecated and will be removed in {self.remove_in}; use {self.replacement}."

    def warn(self, name: str) -> None:
        """Emit a FutureWarning."""
        warnings.warn(self.message(name), FutureWarning, stacklevel=3)


def parse_bool(value: str) -> bool:
    """Parse a boolean. Raise `argparse.ArgumentTypeError` for other text."""
    meanings = dict.fromkeys(FALSE, False) | dict.fromkeys(TRUE, True)
    found = meanings.get(value.strip().lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"{value!r}: expected one of {', '.join(sorted(meanings))}")
    return found


def split_served_model_names(served_model_name: Any) -> list[str]:
    """Return the names in `--served-model-name`: text or a list of texts, separated by blanks or commas."""
    given = served_model_name if isinstance(served_model_name, list | tuple) else [served_model_name or ""]
    return " ".join(map(str, given)).replace(",", " ").split()


def env_or_default(env_var: str, default: T, value_type: type | Reader | None = None) -> T:
    """Return the value of an environment variable, converted to `value_type` or to the type of the default.

    Text that is no boolean is false. Raises `ValueError` for text that is not of the type.
    """
    if env_var not in environ():
        return default
    kind: Any = type(default) if value_type is None else value_type
    return cast(T, READERS.get(kind, kind)(environ()[env_var]))


def set_env(env_var: str, value: str | None) -> None:
    """Set an environment variable of this process and its children, or remove it if the value is None."""
    variables = cast(MutableMapping[str, str], environ())
    if value is None:
        variables.pop(env_var, None)
    else:
        variables[env_var] = value


def nullable_float(value: str) -> float | None:
    """Parse a number; None for empty text and for `None`."""
    return None if value in (None, "", "None") else float(value)


def nullable_int(value: str) -> int | None:
    """Parse an integer; None for empty text and for `None`."""
    return None if value in (None, "", "None") else int(value)


def add_argument(
    parser: Parser,
    *,
    flag_name: str,
    env_var: str,
    default: Any,
    help: str,
    obsolete_flag: str | None = None,
    arg_type: type | Reader | None = str,
    env_value_type: type | Reader | None = None,
    deprecated: Deprecated | None = None,
    **kwargs: Any,
) -> None:
    """Add a flag whose default is an environment variable, else `default`.

    `obsolete_flag` is a second name. `arg_type` parses the flag, and the variable unless `env_value_type` is given.
    `deprecated` warns when the flag or the variable is used. Other arguments are those of `parser.add_argument`.
    """
    is_list_of_texts = isinstance(default, list) and arg_type in (None, str)
    reader = env_value_type if env_value_type is not None or is_list_of_texts else arg_type
    options: dict[str, Any] = {"help": help, **kwargs}
    options["dest"] = kwargs.get("dest") or flag_name.lstrip("-").replace("-", "_")
    options["default"] = env_or_default(env_var, default, value_type=reader)
    if arg_type is not None:
        options["type"] = arg_type
    if help != argparse.SUPPRESS:
        former = f" Former name: {obsolete_flag}." if obsolete_flag else ""
        notice = f"{deprecated.message(flag_name)} " if deprecated else ""
        options["help"] = f"{notice}{help} [{env_var}; default: {default}]{former}".replace("%", "%%")
    if deprecated is not None:
        if env_var in environ():
            deprecated.warn(env_var)
        options["action"] = _warning_action(parser, options.get("action", "store"), deprecated)
    parser.add_argument(*filter(None, (flag_name, obsolete_flag)), **options)


def add_negatable_bool_argument(
    parser: Parser,
    *,
    flag_name: str,
    env_var: str,
    default: bool | None,
    help: str,
    dest: str | None = None,
    obsolete_flag: str | None = None,
    env_value_type: Callable[..., bool] | None = None,
    deprecated: Deprecated | None = None,
) -> None:
    """Add a flag and its `--no-` form. A default of None stays None while neither is given."""
    add_argument(
        parser,
        flag_name=flag_name,
        env_var=env_var,
        default=default,
        help=help,
        dest=dest,
        obsolete_flag=obsolete_flag,
        arg_type=None,
        env_value_type=env_value_type,
        deprecated=deprecated,
        action=argparse.BooleanOptionalAction,
    )


def _warning_action(parser: Parser, action: Any, deprecated: Deprecated) -> type[argparse.Action]:
    """Return a subclass of an action, given by name or class, that warns before it runs."""

    def warn_and_run(self: Any, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        deprecated.warn(option_string or self.dest)
        base.__call__(self, parser, namespace, values, option_string)

    base: Any = parser._registry_get("action", action, action)
    return type(f"Deprecated{base.__name__}", (base,), {"__call__": warn_and_run})
