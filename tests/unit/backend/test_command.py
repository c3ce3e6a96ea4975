"""Command: an engine class as a command."""

from dataclasses import dataclass
from typing import Any

import pytest

from dynamo.backend import WorkerOptions, run
from dynamo.core.config import option
from dynamo.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(WorkerOptions):
    """An engine of the test's."""

    depth: int = option(1, "--depth", None, "How deep")

    def __post_init__(self) -> None:
        WorkerOptions.__post_init__(self)
        if self.depth < 1:
            raise ConfigError("--depth 0: expected 1 or more")


class Engine:
    def __init__(self, depth: int) -> None:
        self.depth = depth

    @classmethod
    def from_options(cls, options: Options) -> Any:
        return cls(options.depth)


def test_command_line_runs_the_engine_and_returns_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def run_worker(options: Options, make_engine: Any) -> int:
        made.append((options.namespace, make_engine().depth))
        return 3

    monkeypatch.setattr("dynamo.backend.command.run_worker", run_worker)
    with pytest.raises(SystemExit) as ended:
        run(Engine, Options, ["--depth", "2", "--namespace", "ns"])
    assert ended.value.code == 3
    assert made == [("ns", 2)]


def test_invalid_option_exits_with_one_error_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(Engine, Options, ["--depth", "0"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: --depth 0: expected 1 or more\n"
