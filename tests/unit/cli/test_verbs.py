"""Dispatch of commands with verbs."""

import pytest

from dynamo.cli.verbs import run_verb
from dynamo.core.errors import CannotConnect, ConfigError


def fail(argv: list[str]) -> int:
    raise CannotConnect("no server at x")


VERBS = {"show": len, "fail": fail}


def test_verb_receives_the_other_words() -> None:
    assert run_verb("dynamo x", "help\n", VERBS, ["show", "a", "--b"]) == 2


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_text_is_printed_without_a_verb(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb("dynamo x", "help\n", VERBS, argv) == 0
    assert capsys.readouterr().out == "help\n"


def test_unknown_verb_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown command dynamo x y: expected show or fail"):
        run_verb("dynamo x", "", VERBS, ["y"])
    with pytest.raises(ConfigError, match="expected one of show, fail, more"):
        run_verb("dynamo x", "", {**VERBS, "more": len}, ["y"])


def test_failed_request_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb("dynamo x", "", VERBS, ["fail"]) == 1
    assert capsys.readouterr().err == "error: no server at x\n"
