"""Servers collect garbage rarely, and not what they made at start-up."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo.core.interpreter import (
    SIMULATION_THRESHOLDS,
    SWITCH_INTERVAL_S,
    THRESHOLDS,
    configure_interpreter,
    paused_collections,
    rare_collections,
)


def test_configured_interpreter_exempts_existing_objects_and_collects_less_often() -> None:
    thresholds, interval, is_enabled = gc.get_threshold(), sys.getswitchinterval(), gc.isenabled()
    kept = [[number] for number in range(100)]
    before = gc.get_freeze_count()
    try:
        configure_interpreter()
        assert gc.get_freeze_count() >= before + len(kept)
        assert gc.get_threshold() == THRESHOLDS
        assert abs(sys.getswitchinterval() - SWITCH_INTERVAL_S) < 1e-6
        assert gc.isenabled() is is_enabled
    finally:
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)


def test_garbage_is_collected_seldom_within_the_block_and_as_before_after_it() -> None:
    before = gc.get_threshold()
    with rare_collections():
        assert gc.get_threshold() == SIMULATION_THRESHOLDS
    assert gc.get_threshold() == before


def test_imports_within_the_block_run_without_collections_and_their_objects_are_exempt_afterwards() -> None:
    frozen = gc.get_freeze_count()
    with paused_collections():
        assert not gc.isenabled()
        kept = [[number] for number in range(100)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(kept)


def test_command_is_imported_without_rarely_used_modules(tmp_path: Path) -> None:
    (tmp_path / "command.py").write_text(
        "import html, sys\n"
        "def main():\n    print('html.entities' in sys.modules, html.escape('<'), 'html.entities' in sys.modules)\n    return 3\n"
    )
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom dynamo.core.interpreter import run_command; run_command('command')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "False &lt; True\n", "")


COMMANDS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "serve": ("dynamo.cli.serve", 270, ("numpy", "zmq", "starlette", "uvicorn", "jinja2", "email", "dynamo.serving", "dynamo.parsers.registry")),
    "status": ("dynamo.cli.machine_graphs", 270, ("numpy", "starlette", "uvicorn", "dynamo.serving")),
    "mocker": ("dynamo.mocker.engine", 400, ("numpy", "email", "starlette", "uvicorn", "tokenizers", "dynamo.parsers.registry")),
    "worker": ("dynamo.backend.process", 330, ("numpy", "email", "starlette", "uvicorn", "tokenizers", "dynamo.kvbm", "dynamo.parsers.registry")),
    "cpu": ("dynamo.cpu.engine", 500, ("starlette", "uvicorn", "tokenizers", "dynamo.parsers.registry", "dynamo.kvbm.metrics", "dynamo.llm.register")),
    "router": ("dynamo.router.main", 350, ("numpy", "email", "starlette", "uvicorn", "tokenizers", "dynamo.serving")),
    "planner": ("dynamo.planner.process", 600, ("scipy", "pandas", "plotly", "tokenizers", "jinja2", "dynamo.serving", "dynamo.http")),
}  # fmt: skip
"""Per command: its module, the most modules after the import (a few more than when this was written), and packages not loaded."""


@pytest.mark.parametrize("command", COMMANDS)
def test_command_imports_no_package_that_its_start_does_not_need(command: str) -> None:
    module, most, deferred = COMMANDS[command]
    code = f"import sys, {module}; print(len(sys.modules), [n for n in {deferred!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, _, loaded = done.stdout.strip().partition(" ")
    assert loaded == "[]"
    assert int(count) <= most
