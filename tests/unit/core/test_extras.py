"""Extras: the command in an error message installs the missing packages."""

import shlex
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from dynamo.core.extras import install_command, interpreter, requirements

DECLARED = ["numpy>=1.26", 'grpcio>=1.60; extra == "grpc"', "nats-py[nkeys]>=2.15 ; extra == 'nats'", 'x; sys_platform == "win32"']  # fmt: skip


def test_requirements_are_those_of_the_extra_without_markers() -> None:
    assert requirements("nats", DECLARED) == ["nats-py[nkeys]>=2.15"]
    assert requirements("otel", DECLARED) == []


@pytest.mark.parametrize("extra", ["grpc", "nats", "nixl", "otel", "sglang", "trtllm", "vllm"])
def test_install_command_contains_the_pyproject_requirements_in_one_shell_line(extra: str) -> None:
    pyproject = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    words = shlex.split(install_command(extra, "further"))
    assert Path(words[0]).resolve() == Path(sys.executable).resolve()
    assert words[1:4] + words[-1:] == ["-m", "pip", "install", "further"]
    declared = pyproject["project"]["optional-dependencies"][extra]
    assert list(map(Requirement, words[4:-1])) == list(map(Requirement, declared))  # Bounds may have another order.


def test_interpreter_path_is_relative_only_below_the_current_directory() -> None:
    assert interpreter("/clone/.venv/bin/python", "/clone") == ".venv/bin/python"
    assert interpreter("/usr/bin/python3", "/clone") == "/usr/bin/python3"
    assert interpreter("", "/clone") == "python3"
