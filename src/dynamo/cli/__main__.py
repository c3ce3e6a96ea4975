"""Command line: dispatch of `dynamo COMMAND` to the module of the command, and the help page."""

import sys
import time

from dynamo import __version__
from dynamo.cli.commands import COMMANDS, help_lines
from dynamo.core.config import exit_on_config_error
from dynamo.core.errors import ConfigError

FOOTER = """\
  dynamo COMMAND --help               its common options, their environment variables and defaults (also: dynamo help COMMAND)
  dynamo COMMAND --help-all           all of its options
  dynamo --version

The same processes can be started one by one, on one machine or on several that share a directory:

  python -m dynamo.frontend --discovery-backend file
  python -m dynamo.cpu --discovery-backend file --model-path DIR
  python -m dynamo.mocker --discovery-backend file --model-path DIR
"""
STARTED = time.monotonic()


def main() -> None:
    """Run the `dynamo` command; exit with 0, with 1 after a failure, with 2 if an option is wrong."""
    try:
        exit_on_config_error(lambda: run(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)


def run(argv: list[str]) -> int:
    """Run one command. Raises `ConfigError` for an unknown one."""
    word, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if word == "help" and rest:
        word, rest = rest[0], [*rest[1:], "--help"]
    if word in {"--help", "-h", "help"}:
        print(help_page(), end="")
        return 0
    if word in {"--version", "-V", "version"}:
        print(f"dynamo {__version__}")
        return 0
    command = COMMANDS.get(word)
    if command is not None:
        function = command.function()
        status: int = function(rest, STARTED) if word == "serve" else function(rest)
        return status
    import difflib

    near = difflib.get_close_matches(word, [*COMMANDS, "--help", "--version"], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"unknown command {word}{hint} (see dynamo --help)")


def help_page() -> str:
    """Return the help page: the commands by group."""
    title = f"dynamo {__version__}: serve a language model over the OpenAI API"
    return "\n".join([title, "", *help_lines(), FOOTER])


if __name__ == "__main__":
    main()
