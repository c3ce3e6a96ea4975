"""Run directory: what an ended `dynamo serve` leaves behind, and for how long."""

import os
import stat
from pathlib import Path

from dynamo.cli.run_directory import KEPT_LOGS, PREFIX, RunDirectory


def crashed(folder: Path, number: int) -> Path:
    run = RunDirectory(str(folder))
    (run.logs / "worker-1.log").write_text("Traceback\n")
    run.discovery.mkdir()
    run.close(keep_logs=True)
    os.utime(run.path, (number, number))
    return run.path


def test_run_directory_is_private_and_removed_when_closed(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path))
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    run.close(keep_logs=False)
    assert list(tmp_path.iterdir()) == []


def test_kept_logs_survive_close_without_the_discovery_records(tmp_path: Path) -> None:
    path = crashed(tmp_path, 1)
    assert (path / "logs" / "worker-1.log").read_text() == "Traceback\n"
    assert not (path / "discovery").exists()


def test_new_run_removes_all_but_the_most_recent_kept_logs(tmp_path: Path) -> None:
    paths = [crashed(tmp_path, number) for number in range(KEPT_LOGS + 3)]
    run = RunDirectory(str(tmp_path))
    assert [path for path in paths if path.exists()] == paths[-KEPT_LOGS:]
    run.close(keep_logs=False)


def test_new_run_cleans_up_after_a_run_that_was_killed(tmp_path: Path) -> None:
    killed = RunDirectory(str(tmp_path))
    killed.discovery.mkdir()
    os.close(killed._lock)  # The kernel does this when the process is killed.
    run = RunDirectory(str(tmp_path))
    assert not killed.path.exists()
    run.close(keep_logs=False)


def test_new_run_leaves_running_ones_and_foreign_entries_alone(tmp_path: Path) -> None:
    running = [RunDirectory(str(tmp_path)) for _ in range(KEPT_LOGS + 2)]
    target = tmp_path / "elsewhere"
    target.mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(target)
    (tmp_path / f"{PREFIX}file").write_text("not a directory")
    RunDirectory(str(tmp_path)).close(keep_logs=False)
    assert all(run.logs.is_dir() for run in running)
    assert target.is_dir()
    assert (tmp_path / f"{PREFIX}file").exists()
    for run in running:
        run.close(keep_logs=False)
