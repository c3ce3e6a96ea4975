"""Finding and missing the released system."""

import os
import sys

import pytest
from benchmarks import peer


def test_peer_directory_is_read_from_its_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("DYNAMO_PEER_HOME", str(tmp_path))
    assert peer.peer_python() == str(tmp_path / "venv" / "bin" / "python")


def test_empty_peer_directory_is_not_ready(tmp_path):
    assert not peer.is_ready(str(tmp_path))


def test_failed_installation_step_is_one_line_with_its_name(tmp_path):
    script = tmp_path / "install.py"
    script.write_text("print('first'); print('no route to host'); raise SystemExit(3)")
    with pytest.raises(peer.PeerMissing, match=r"install\.py: no route to host"):
        peer._run([sys.executable, str(script)], timeout_s=30)


def test_missing_program_is_reported_as_a_missing_peer(tmp_path):
    with pytest.raises(peer.PeerMissing, match="No such file"):
        peer._run([os.path.join(tmp_path, "uv")], timeout_s=5)
