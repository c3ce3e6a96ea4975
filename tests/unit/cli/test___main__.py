"""Output of the `dynamo` command itself."""

import re

import pytest

import dynamo
from dynamo.cli.__main__ import COMMANDS, run
from dynamo.core.errors import ConfigError


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_the_commands(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argv) == 0
    page = capsys.readouterr().out
    assert set(re.findall(r"^  dynamo ([a-z][a-z-]*)", page, re.MULTILINE)) == set(COMMANDS)
    assert {"dynamo.frontend", "dynamo.cpu", "dynamo.mocker"} == set(re.findall(r"python -m (\S+)", page))


def test_help_command_shows_the_help_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    pages = []
    for argv in (["help", "serve"], ["serve", "--help"]):
        with pytest.raises(SystemExit) as ended:
            run(argv)
        assert ended.value.code == 0
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1]
    assert pages[0].startswith("usage: dynamo serve")
    with pytest.raises(ConfigError, match="unknown command serv; did you mean serve"):
        run(["help", "serv"])


@pytest.mark.parametrize("word", ["--version", "-V", "version"])
def test_version_option_prints_the_package_version(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([word]) == 0
    assert capsys.readouterr().out == f"dynamo {dynamo.__version__}\n"


@pytest.mark.parametrize(("word", "near"), [("server", "serve"), ("chatt", "chat"), ("--hepl", "--help")])
def test_unknown_command_error_names_the_nearest_command(word: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown command {word}; did you mean {near}\\?"):
        run([word])


def test_unknown_command_without_a_similar_name_refers_to_the_help() -> None:
    with pytest.raises(ConfigError, match=r"unknown command zzz \(see dynamo --help\)"):
        run(["zzz"])
