"""Logs that a user names."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.ops.troubleshoot.local import default_url, failed_start, given_logs, of_frontend, settings_of


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


@pytest.mark.parametrize(("port", "expected"), [("9000", 9000), (" 9000 ", 9000), ("abc", 8000), ("", 8000)])
def test_default_url_has_the_port_of_the_variable(port: str, expected: int) -> None:
    assert default_url({"DYN_HTTP_PORT": port}) == f"http://127.0.0.1:{expected}"
    assert default_url({}) == "http://127.0.0.1:8000"


def test_failed_start_is_read_for_an_hour_unless_a_graph_started_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    log = tmp_path / "dynamo-failed-1" / "logs" / "dynamo-serve.log"
    log.parent.mkdir(parents=True)
    log.write_text("dynamo serve\nerror: x\n")
    graph = tmp_path / "dynamo-serve-1"
    graph.mkdir()
    os.utime(log.parents[1], (1000, 1000))
    os.utime(graph, (900, 900))
    files = {"logs/failed-start/dynamo-serve.log": "dynamo serve\nerror: x\n"}
    assert failed_start([graph], 1010.0) == failed_start([], 1010.0) == files
    assert failed_start([], 9999.0) == {}
    os.utime(graph, (1001, 1001))
    assert failed_start([graph], 1010.0) == {}


def test_servers_are_those_of_the_frontend_or_of_the_only_graph() -> None:
    def process(pid: int, directory: str) -> dict[str, Any]:
        command = "python -m dynamo.frontend --discovery-backend etcd"
        return {"pid": pid, "command": command, "variables": {"DYN_FILE_KV": directory}}

    one, two = process(-1, "/a"), process(-2, "/b")
    assert settings_of([one, two], -2, {"X": "1"}) == {"X": "1", "DYN_DISCOVERY_BACKEND": "etcd"}
    assert settings_of([one], None, {}) == {"DYN_DISCOVERY_BACKEND": "etcd"}
    assert settings_of([one, two], None, {}) == settings_of([], None, {}) == {}
