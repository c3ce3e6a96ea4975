"""A new user's first failures: one command without arguments names the cause, after `dynamo serve` or while parts run."""

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.ports import free_port
from tests.cluster.etcd import EtcdCluster
from tests.cluster.processes import ProcessGroup

pytestmark = pytest.mark.integration

PYTHON = [sys.executable, "-m"]
DYNAMO = [*PYTHON, "dynamo.cli"]
INHERITED = ("PATH", "PYTHONPATH", "LANG", "VIRTUAL_ENV")
FULL_DISK = """
for directory in /tmp /var/tmp; do mount --bind $directory $directory && mount -o remount,bind,ro $directory || exit 99; done
mount -t tmpfs -o size=64k none "$0" && cd "$0" && { cat /dev/zero > filled 2> errors || true; } && exec "$@"
"""
"""Runs a command in a mount namespace in which the first argument is a full disk, and other temporary directories are read-only."""


class FreshUser:
    """A user with an empty home and temporary directory, who types commands without arguments."""

    def __init__(self, folder: Path) -> None:
        own = {name: os.environ[name] for name in INHERITED if name in os.environ}
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.variables = {
            **own,
            "HOME": str(folder),
            "TMPDIR": str(self.temporary),
            "DYN_HTTP_PORT": str(free_port()),
            "DYN_SYSTEM_PORT": str(free_port()),
        }
        self.prefix: Sequence[str] = ()
        self.limit: Callable[[], None] | None = None

    def run(self, *words: str, program: Sequence[str] = DYNAMO) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*self.prefix, *program, *words],
            env=self.variables,
            preexec_fn=self.limit,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def fails_to_serve(self, *words: str) -> str:
        """Return the error of `dynamo serve`, which is one line."""
        done = self.run("serve", *words)
        assert done.returncode in {1, 2}
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: ")
        return line

    def troubleshoot(self) -> dict[str, str]:
        """Return the evidence of each failure by its signature."""
        done = self.run("troubleshoot", "--json")
        assert done.returncode == 1, done.stderr or done.stdout
        found = json.loads(done.stdout)["signatures"]
        return {one["signature"]: "\n".join(line["text"] for line in one["evidence"]) for one in found}

    def doctor(self) -> dict[str, dict[str, Any]]:
        """Return the failed checks by their name."""
        done = self.run("doctor", "--json")
        assert done.returncode == 1, done.stderr or done.stdout
        return {one["check"]: one for one in json.loads(done.stdout)["rows"] if one["status"] == "FAIL"}


@pytest.fixture
def user(tmp_path: Path) -> FreshUser:
    return FreshUser(tmp_path)


def test_wrong_model_path(user: FreshUser) -> None:
    user.fails_to_serve("-f", "absent.yaml", "--dry-run")
    assert not list(user.temporary.glob("dynamo-failed-*")), "a dry run starts nothing"
    error = user.fails_to_serve(f"{user.temporary}/lama-3", "--http-port", "0", "--api-key", "secret-key-1")
    assert error == f"error: model {user.temporary}/lama-3: no such directory"
    found = user.troubleshoot()
    assert found["model-path"] == error
    assert "dynamo serve" in found["failed-start"]
    logs = list(user.temporary.glob("dynamo-failed-*/logs/*.log"))
    assert ["secret-key-1" in one.read_text() for one in logs] == [False]


def test_taken_port(user: FreshUser) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(5)
        port = str(taken.getsockname()[1])
        user.variables["DYN_HTTP_PORT"] = port
        error = user.fails_to_serve()
        rows = user.doctor()
        found = user.troubleshoot()
    assert f"--http-port {port} is in use" in error
    assert f"(pid {os.getpid()})" in rows[f"port {port}"]["evidence"]
    assert found["port-clash"] == error


def test_dead_etcd_of_running_parts(user: FreshUser, tmp_path: Path) -> None:
    """The shell of `dynamo troubleshoot` lacks the variables of the graph, which are read from its processes."""
    group = ProcessGroup(tmp_path)
    port = user.variables["DYN_HTTP_PORT"]
    try:
        with EtcdCluster(tmp_path) as etcd:
            endpoints = etcd.wait().endpoints
            address = ["--discovery-backend", "etcd", "--http-host", "127.0.0.1", "--http-port", port]
            group.start("frontend", [*PYTHON, "dynamo.frontend", *address], {"ETCD_ENDPOINTS": endpoints})
            group.wait_until(lambda: is_listening(int(port)), "the frontend did not start")
        found = user.troubleshoot()
        user.variables["ETCD_ENDPOINTS"] = endpoints
        rows = user.doctor()
    finally:
        group.stop()
    assert f"{endpoints}: no connection" in found["doctor"]
    assert f"{endpoints}: no connection" in rows["etcd"]["evidence"]


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(params=["namespace", "limit"])
def full_disk(request: pytest.FixtureRequest, user: FreshUser) -> Iterator[str]:
    """Let the user have no space: a full file system where namespaces are allowed, and a limit of 0 bytes for each file."""
    if request.param == "limit":
        user.limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        yield "File too large"
        return
    user.prefix = ["unshare", "-Urm", "sh", "-c", FULL_DISK, str(user.temporary)]
    if shutil.which("unshare") is None or subprocess.run([*user.prefix, "true"], check=False).returncode:
        pytest.skip("needs user namespaces")
    yield "No space left on device"


def test_full_disk(user: FreshUser, full_disk: str) -> None:
    error = user.fails_to_serve("--http-port", "0")
    assert re.search(f"no usable temporary directory: {user.temporary}: {full_disk}", error)
    assert f"{user.temporary}: {full_disk}" in user.doctor()["disk temporary"]["evidence"]
    assert f"{user.temporary}: {full_disk}" in user.troubleshoot()["doctor"]


def test_part_on_a_full_disk_ends_with_one_line(user: FreshUser, full_disk: str) -> None:
    done = user.run(*PYTHON, "dynamo.frontend", "--http-port", "0", program=())
    assert (done.returncode, done.stderr.count("Traceback")) == (1, 0)
    assert full_disk in done.stderr.splitlines()[-1]


def test_start_that_succeeds_clears_the_failed_one(user: FreshUser, tmp_path: Path) -> None:
    user.fails_to_serve("--portt", "1")
    assert "wrong-flag" in user.troubleshoot()
    group = ProcessGroup(tmp_path)
    group.start("serve", [*DYNAMO, "serve", "--engine", "mocker"], {**user.variables, "DYN_FILE_KV": ""})
    try:
        group.wait_until(lambda: "Press Ctrl-C" in group.logs(), "the graph did not start")
        done = user.run("troubleshoot", "--json")
    finally:
        group.stop()
    assert not {"wrong-flag", "failed-start"} & {one["signature"] for one in json.loads(done.stdout)["signatures"]}
