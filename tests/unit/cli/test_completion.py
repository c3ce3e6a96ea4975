"""Shell completion: the scripts contain the commands, their subcommands and their flags."""

import pytest

from dynamo.cli.commands import COMMANDS
from dynamo.cli.completion import SHELLS, completion, values_of_commands, words_of_commands
from dynamo.core.errors import ConfigError


def test_completion_words_are_the_declared_options() -> None:
    words = words_of_commands()
    assert {"--engine", "--workers", "--router-mode"} <= set(words["serve", ""])
    assert set(words["deploy", ""]) >= {"validate", "apply"}
    assert "--tail" in words["deploy", "logs"]


def test_values_of_flags_are_the_declared_choices() -> None:
    values = values_of_commands()
    assert set(values["serve", "--engine"]) >= {"cpu", "mocker", "vllm"}
    assert values["recipe", "--format"] == ["table", "json"]
    assert ("serve", "--http-port") not in values


@pytest.mark.parametrize("shell", SHELLS)
def test_script_of_each_shell_names_each_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert completion([shell]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in COMMANDS)
    assert "prefill-workers" in text


def test_unsupported_shell_is_refused() -> None:
    with pytest.raises(ConfigError, match="dynamo completion tcsh: expected one of bash, zsh, fish"):
        completion(["tcsh"])
