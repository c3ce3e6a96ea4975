"""Commands with verbs, such as `dynamo deploy apply`: the dispatch by the first word."""

import sys
from collections.abc import Callable, Mapping, Sequence

from dynamo.core.errors import ConfigError, DynamoException

Verbs = Mapping[str, Callable[[list[str]], int]]


def run_verb(command: str, text: str, verbs: Verbs, argv: Sequence[str]) -> int:
    """Run the verb that the first word names with the other words; print `text` without one. Return the exit status.

    A failed request is one line and status 1. Raise `ConfigError` for an unknown verb and for wrong options.
    """
    word, rest = (argv[0], list(argv[1:])) if argv else ("--help", [])
    if word in {"--help", "-h", "help"}:
        print(text, end="")
        return 0
    verb = verbs.get(word)
    if verb is None:
        expected = " or ".join(verbs) if len(verbs) == 2 else f"one of {', '.join(verbs)}"
        raise ConfigError(f"unknown command {command} {word}: expected {expected}")
    try:
        return verb(rest)
    except ConfigError:
        raise
    except DynamoException as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
