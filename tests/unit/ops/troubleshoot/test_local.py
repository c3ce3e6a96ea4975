"""Logs that a user names."""

from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.ops.troubleshoot.local import given_logs


def test_file_or_directory_of_logs_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("x")
    (tmp_path / "b.txt").write_text("y")
    assert given_logs(str(tmp_path)) == {"a.log": "x"}
    assert given_logs(str(tmp_path / "b.txt")) == {"b.txt": "y"}


def test_absent_logs_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \*\.log file"):
        given_logs(str(tmp_path))
    with pytest.raises(ConfigError, match=r"--logs .*absent: No such file"):
        given_logs(str(tmp_path / "absent"))
