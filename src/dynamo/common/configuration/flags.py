"""Flag: one row of an argparse group, written in a table or taken from the declaration of one of our own options."""

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

from dynamo.common.configuration.utils import (
    Deprecated,
    Parser,
    add_argument,
    add_negatable_bool_argument,
    nullable_float,
    nullable_int,
)


@dataclass(frozen=True)
class Flag:
    """A flag with its environment variable, default and help. One whose default is a boolean has a `--no-` form."""

    name: str
    env: str
    default: Any
    help: str
    type: Callable[[str], Any] = str
    dest: str | None = None
    choices: Sequence[str] | None = None
    obsolete: str | None = None
    deprecated: Deprecated | None = None
    env_type: Callable[[str], Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def add_to(self, group: Parser) -> None:
        """Declare the flag in an argparse group."""
        shared: dict[str, Any] = {
            "flag_name": self.name,
            "env_var": self.env,
            "default": self.default,
            "help": self.help,
            "dest": self.dest,
            "obsolete_flag": self.obsolete,
            "env_value_type": self.env_type,
            "deprecated": self.deprecated,
        }
        if isinstance(self.default, bool):
            add_negatable_bool_argument(group, **shared)
        else:
            if self.choices is not None:
                shared["choices"] = list(self.choices)
            add_argument(group, arg_type=self.type, **shared, **self.extra)


def add_flags(parser: argparse.ArgumentParser, title: str, flags: Iterable[Flag]) -> Parser:
    """Add a titled group with the flags to `parser` and return it."""
    group = parser.add_argument_group(title)
    for flag in flags:
        flag.add_to(group)
    return group


def declared(
    options: type, names: Sequence[str], changes: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[Flag, ...]:
    """Return flags as a class of our options declares them.

    `changes` maps a flag to attributes in which the interface for upstream's users differs.
    """
    hints = get_type_hints(options)
    fields = {one.metadata["flag"]: one for one in dataclasses.fields(options) if "flag" in one.metadata}
    flags = []
    for name in names:
        one = fields[name]
        declaration: dict[str, Any] = {
            "env": one.metadata["env"],
            "default": None if one.default is dataclasses.MISSING else one.default,
            "help": one.metadata["help"],
            "type": _parser_of(hints[one.name], one.metadata["accepts_none"]),
            "dest": one.name,
            "choices": one.metadata["choices"],
            "obsolete": next(iter(one.metadata["aliases"]), None),
        }
        flags.append(Flag(name, **{**declaration, **(changes or {}).get(name, {})}))
    return tuple(flags)


def _parser_of(hint: Any, accepts_none: bool) -> Callable[[str], Any]:
    """Return the function that parses the text of an option with this annotation."""
    kind = next((one for one in (int, float) if hint is one or one in get_args(hint)), str)
    return {int: nullable_int, float: nullable_float}[kind] if accepts_none else kind
