"""Logs that a user names."""

from pathlib import Path
from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.ops.troubleshoot.local import given_logs, of_frontend


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


def test_processes_of_other_graphs_are_left_out_if_the_frontend_has_workers() -> None:
    def process(pid: int, module: str, directory: str) -> dict[str, Any]:
        return {"pid": pid, "module": module, "variables": {"DYN_FILE_KV": directory}}

    one, two, other = (
        process(1, "dynamo.frontend", "/a"),
        process(2, "dynamo.cpu", "/a"),
        process(3, "dynamo.cpu", "/b"),
    )
    assert of_frontend([one, two, other], 1) == [one, two]
    assert of_frontend([one, other], 1) == [one, other]
    assert of_frontend([one, two, other], None) == [one, two, other]
