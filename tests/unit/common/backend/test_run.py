"""run: an engine class as a command."""

from typing import Any

import pytest

from dynamo.common.backend import run as module
from dynamo.common.backend.engine import LLMEngine
from dynamo.common.backend.run import run
from dynamo.core.errors import ConfigError


class Refused(LLMEngine):
    """An engine whose command line is invalid."""

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        raise ConfigError(f"--model {argv}: must exist")


def test_invalid_setting_is_one_line_with_status_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module.log, "setup", lambda **_: None)
    with pytest.raises(SystemExit) as ended:
        run(Refused, ["x"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: --model ['x']: must exist\n"


def test_error_of_the_engine_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.log, "setup", lambda **_: None)

    async def broken(argv: list[str] | None) -> Any:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        run(Refused, engine_factory=broken)
