"""Unsupported flags: flags of upstream that a command recognises but does not implement, refused by name. Pure.

A flag that the configuration declares is supported, even if it is still listed here. An unsupported flag is accepted
with its default value, because that requests nothing.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from dynamo.core import config
from dynamo.core.config import environ, read_bool
from dynamo.core.errors import ConfigError

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class UnsupportedFlag:
    """One unsupported flag of upstream."""

    flag: str
    variable: str | None
    default: str | bool
    aliases: tuple[str, ...] = ()
    hint: str = ""
    """The alternative to use, if there is one."""


def declared_flags(config_type: type[Any]) -> set[str]:
    """Return the flags that a configuration supports."""
    return {name for one in fields(config_type) for name in (one.metadata["flag"], *one.metadata["aliases"])}


def load(
    config_type: type[C],
    argv: Sequence[str],
    table: Iterable[UnsupportedFlag],
    prog: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> C:
    """Return a configuration from the environment (`variables`) and a command line that may contain unsupported flags.

    Raises `ConfigError`.
    """
    variables = environ() if variables is None else variables
    kept = drop_unsupported(table, argv, variables, declared_flags(config_type))
    return config.load(config_type, kept, variables, prog=prog)


def drop_unsupported(
    table: Iterable[UnsupportedFlag], argv: Sequence[str], variables: Mapping[str, str], declared: Collection[str]
) -> list[str]:
    """Return the command line without unsupported flags that have their default value.

    `declared` are the supported flags. Raises `ConfigError` for an unsupported flag with another value.
    """
    unsupported = [one for one in table if one.flag not in declared]
    for one in unsupported:
        text = variables.get(one.variable or "")
        if text and not _is_default(one, text):
            raise ConfigError(f"{one.variable}={text}: {one.flag} is {_refusal(one)}")
    names = {name: one for one in unsupported for name in (one.flag, *one.aliases)}
    kept: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, separator, text = word.partition("=")
        found = names.get(name) or names.get(name.replace("--no-", "--", 1))
        if found is None:
            kept.append(word)
            continue
        if isinstance(found.default, bool):
            text = text if separator else str(not name.startswith("--no-"))
        elif not separator:
            text = words.pop(0) if words else ""
        if not _is_default(found, text):
            shown = word if isinstance(found.default, bool) else f"{name} {text}".rstrip()
            raise ConfigError(f"{shown}: {_refusal(found)}")
    return kept


def _refusal(one: UnsupportedFlag) -> str:
    instead = one.hint or ("leave it out" if one.default in {"", True, False} else f"only {one.default} is")
    return f"not supported by this release; {instead}"


def _is_default(one: UnsupportedFlag, text: str) -> bool:
    if isinstance(one.default, bool):
        try:
            return read_bool(text) is one.default
        except ValueError:
            return False
    try:
        return float(text) == float(one.default)
    except ValueError:
        return text == one.default
