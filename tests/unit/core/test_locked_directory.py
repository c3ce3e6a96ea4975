"""Locked directories: one of a running process is kept, one of an ended process is removed."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo.core import locked_directory
from dynamo.core.locked_directory import LOCK, LockedDirectory, remove_abandoned_files, remove_ended

PREFIX = "dynamo-test-"
LOGS_KEPT = 5
KILLED = """
import os, signal, subprocess, sys
from dynamo.core.locked_directory import LockedDirectory
made = LockedDirectory("dynamo-test-", sys.argv[1])
if len(sys.argv) > 2:
    subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], pass_fds=[made.lock])
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(parent: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(parent)], check=False)


def test_directory_is_private_and_removed_by_its_owner(tmp_path: Path) -> None:
    made = LockedDirectory(PREFIX, str(tmp_path))
    assert stat.S_IMODE(os.stat(made.path).st_mode) == 0o700
    assert made.path.name.startswith(PREFIX)
    made.close()
    made.close()
    assert list(tmp_path.iterdir()) == []


def test_directory_of_a_killed_process_is_removed_at_the_next_start(tmp_path: Path) -> None:
    killed(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    made = LockedDirectory(PREFIX, str(tmp_path))
    assert list(tmp_path.iterdir()) == [made.path]
    made.close()


def test_locked_and_foreign_directories_are_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = LockedDirectory(PREFIX, str(tmp_path))
    without_lock, other_name = tmp_path / f"{PREFIX}old", tmp_path / "other"
    linked = tmp_path / f"{PREFIX}link"
    for path in (without_lock, other_name):
        path.mkdir()
    (other_name / LOCK).touch()
    linked.symlink_to(other_name)
    killed(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(locked_directory, "user_id", lambda: os.geteuid() + 1)
        remove_ended(PREFIX, tmp_path)
    assert len(list(tmp_path.iterdir())) == 5
    remove_ended(PREFIX, tmp_path)
    assert set(tmp_path.iterdir()) == {made.path, without_lock, other_name, linked}
    made.close()


def test_directory_in_use_by_a_child_of_its_killed_owner_is_not_removed(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), "child"], stdin=subprocess.PIPE)
    owner.wait()
    remove_ended(PREFIX, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    assert owner.stdin is not None
    owner.stdin.close()


def test_old_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    young, old, other = tmp_path / ".new-1", tmp_path / ".new-2", tmp_path / "block"
    for path in (young, old, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (1, 1))
    remove_abandoned_files(str(tmp_path), ".new-", 3600)
    assert set(tmp_path.iterdir()) == {young, other}
    remove_abandoned_files(str(tmp_path / "absent"), ".new-", 3600)


def with_logs(folder: Path) -> LockedDirectory:
    return LockedDirectory(PREFIX, str(folder), logs_kept=LOGS_KEPT)


def crashed(folder: Path, number: int) -> Path:
    run = with_logs(folder)
    (run.logs / "worker-1.log").write_text("Traceback\n")
    (run.path / "discovery").mkdir()
    run.close(keep_logs=True)
    os.utime(run.path, (number, number))
    return run.path


def test_kept_logs_survive_close_without_the_discovery_records(tmp_path: Path) -> None:
    path = crashed(tmp_path, 1)
    assert (path / "logs" / "worker-1.log").read_text() == "Traceback\n"
    assert not (path / "discovery").exists()


def test_new_run_removes_all_but_the_most_recent_kept_logs(tmp_path: Path) -> None:
    paths = [crashed(tmp_path, number) for number in range(LOGS_KEPT + 3)]
    run = with_logs(tmp_path)
    assert [path for path in paths if path.exists()] == paths[-LOGS_KEPT:]
    run.close(keep_logs=False)


def test_new_run_does_not_remove_running_directories_or_foreign_entries(tmp_path: Path) -> None:
    running = [with_logs(tmp_path) for _ in range(LOGS_KEPT + 2)]
    target = tmp_path / "elsewhere"
    target.mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(target)
    (tmp_path / f"{PREFIX}file").write_text("not a directory")
    with_logs(tmp_path).close(keep_logs=False)
    assert all(run.logs.is_dir() for run in running)
    assert target.is_dir()
    assert (tmp_path / f"{PREFIX}file").exists()
    for run in running:
        run.close(keep_logs=False)
