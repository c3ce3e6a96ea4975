import subprocess
import sys
from typing import Any

import pytest

from dynamo.backend import process
from dynamo.core.errors import ConfigError
from dynamo.cpu import __main__ as command
from dynamo.cpu import blas
from dynamo.cpu.engine import CpuEngine


def test_cpu_command_line_starts_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def run_worker(options: Any, make_engine: Any) -> int:
        seen.update(options=options, engine=make_engine())
        return 3

    monkeypatch.setattr(process, "run_worker", run_worker)
    monkeypatch.setattr(blas, "prepare", lambda threads, variables: seen.update(threads=threads))
    monkeypatch.setattr(sys, "argv", ["dynamo.cpu", "--threads", "2", "--model-name", "mine"])
    assert command.main() == 3
    assert (seen["threads"], seen["options"].name) == (2, "mine")
    assert isinstance(seen["engine"], CpuEngine)


def test_cpu_command_line_refuses_an_unknown_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["dynamo.cpu", "--thread", "2"])
    with pytest.raises(ConfigError, match="did you mean --threads"):
        command.main()


def test_cpu_command_line_configures_openblas_before_importing_numpy() -> None:
    code = "import sys, dynamo.cpu.__main__; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
