"""Dynamic flags: arguments of `LLM` on the command line, as `--trtllm.<dotted.name> <value>`."""

import json
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from dynamo.core.errors import ConfigError

logger = logging.getLogger(__name__)

DYNAMIC_FLAG_PREFIX = "--trtllm."
WORDS = {"none": None, "null": None, "true": True, "false": False}


def infer_type(value: str) -> Any:
    """Return a value as null, a number or a boolean if it is one, as JSON if it is an object or a list, else as text."""
    if value.lower() in WORDS:
        return WORDS[value.lower()]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(value)
    if value.startswith(("{", "[")):
        with suppress(ValueError):
            return json.loads(value)
    return value


def set_nested(d: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Set a value below nested keys. Raise `ConfigError` if one of them has a value that is no object."""
    for key in keys[:-1]:
        inner = d.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{key} is {inner!r}: cannot have the field {keys[-1]} as well")
        d = inner
    d[keys[-1]] = value


def split_dynamic_flags(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the other words of a command line, and the arguments of `LLM`. Raise `ConfigError`."""
    others: list[str] = []
    arguments: dict[str, Any] = {}
    words = iter(argv)
    for word in words:
        if not word.startswith(DYNAMIC_FLAG_PREFIX):
            others.append(word)
            continue
        name, equals, value = word.removeprefix(DYNAMIC_FLAG_PREFIX).partition("=")
        if not equals:
            value = next(words, "--")
            if value.startswith("--"):
                raise ConfigError(f"{word}: must have a value")
        keys = name.split(".")
        if not all(keys):
            raise ConfigError(f"{word}: must be {DYNAMIC_FLAG_PREFIX}<dotted.name>")
        try:
            set_nested(arguments, keys, infer_type(value))
        except ConfigError as error:
            raise ConfigError(f"{word}: {error}") from None
    return others, arguments


def parse_dynamic_flags(remaining: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of `LLM` of a command line without other words. Exit with status 1 for an invalid one."""
    try:
        others, arguments = split_dynamic_flags(remaining)
    except ConfigError as error:
        problem = str(error)
    else:
        if not others:
            return arguments
        problem = f"unrecognized argument {others[0]}"
    logger.error("%s", problem)
    sys.exit(1)
