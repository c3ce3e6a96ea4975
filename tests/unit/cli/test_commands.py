"""Commands: every one has a function, options and a line of the help page."""

import pytest

from dynamo.cli.commands import COMMANDS, Command
from dynamo.cli.completion import flags_of


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda one: str(one.word))
def test_command_can_be_imported_with_its_options(command: Command) -> None:
    assert callable(command.function())
    for subcommand in command.options:
        assert "--help" in flags_of(command, subcommand)
    assert all(usage.split()[0] == command.word for usage, _ in command.lines)
