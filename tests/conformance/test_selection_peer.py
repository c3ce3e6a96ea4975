"""Registrations with `SelectionService` from Python: which workers become schedulable, and why others do not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cluster.peers import require_peer

pytestmark = pytest.mark.conformance

PROGRAM = Path(__file__).parent / "peer_selection.py"
TIMEOUT_S = 60.0


def lines(python: str, home: Path) -> list[str]:
    environment = {**os.environ, "DYN_LOG": "error", "HOME": str(home)}
    if python != sys.executable:
        environment.pop("PYTHONPATH", None)  # It may name our package.
    ended = subprocess.run(
        [python, str(PROGRAM)], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    return ended.stdout.splitlines()


def test_registrations_become_schedulable_as_in_the_released_service(tmp_path: Path) -> None:
    theirs, ours = lines(require_peer(), tmp_path), lines(sys.executable, tmp_path)
    assert len(theirs) > 40
    assert ours == theirs
