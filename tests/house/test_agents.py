"""AGENTS.md of the components and the skills: the files, tests and commands that they name exist."""

import re
import shlex
from pathlib import Path

import pytest
from tests.house.source import ROOT, relative

from dynamo.cli.commands import COMMANDS

NOTES = sorted((ROOT / "src" / "dynamo").rglob("AGENTS.md"))
SKILLS = sorted((ROOT / ".agents").rglob("SKILL.md"))
LINES_MAX = 15


@pytest.mark.parametrize("path", NOTES, ids=relative)
def test_notes_are_short_and_name_what_exists(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= LINES_MAX
    for name in re.findall(r"`([\w./-]+(?:\.py|\.toml))`", text):
        folder = ROOT / "src" / "dynamo" / path.parent.name
        assert (folder / name).exists() or (ROOT / name).exists(), f"{name} does not exist"
    (tests,) = re.findall(r'make test ARGS="(\S+) -x"', text)
    assert list((ROOT / tests).rglob("test_*.py"))


@pytest.mark.parametrize("path", [*NOTES, *SKILLS], ids=relative)
def test_commands_of_dynamo_exist(path: Path) -> None:
    text = path.read_text()
    words = re.findall(r"(?m)^dynamo ([a-z-]+)|`dynamo ([a-z-]+)", text)
    assert {one or other for one, other in words} <= set(COMMANDS)


@pytest.mark.parametrize("path", SKILLS, ids=relative)
def test_scripts_of_a_skill_exist_and_are_executable(path: Path) -> None:
    folder = path.parent
    for line in re.findall(r"(?m)^(?:python3 )?(\S*scripts/\S+)", path.read_text()):
        name = shlex.split(line)[0]
        script = ROOT / name if name.startswith(".agents") else folder / name
        assert script.is_file(), f"{name} does not exist"
        assert script.stat().st_mode & 0o100
