"""Programs of the Python API that print the same lines on our runtime as on the released one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cluster.peers import require_peer

pytestmark = pytest.mark.conformance

HERE = Path(__file__).parent
TIMEOUT_S = 60.0


def lines(python: str, program: str, home: Path) -> list[str]:
    """Return the output of a program with a discovery directory of its own."""
    home.mkdir()
    loopback = dict.fromkeys(("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST"), "127.0.0.1")
    environment = {**os.environ, **loopback, "DYN_LOG": "error", "HOME": str(home), "DYN_FILE_KV": str(home / "kv")}
    if python != sys.executable:
        environment.pop("PYTHONPATH", None)  # It may name our package.
    ended = subprocess.run(
        [python, str(HERE / program)], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    return ended.stdout.splitlines()


def assert_same(program: str, home: Path, count: int) -> None:
    theirs, ours = lines(require_peer(), program, home / "theirs"), lines(sys.executable, program, home / "ours")
    assert len(theirs) == count
    assert ours == theirs


def test_registrations_become_schedulable_as_in_the_released_service(tmp_path: Path) -> None:
    assert_same("peer_selection.py", tmp_path, 49)


def test_elements_with_annotations_reach_clients_as_with_the_released_runtime(tmp_path: Path) -> None:
    assert_same("peer_annotations.py", tmp_path, 42)
