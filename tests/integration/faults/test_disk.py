"""File discovery on a full disk, and in a deleted directory: workers continue to serve and register again."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.processes import wait_until
from tests.cluster.worker import WorkerProcess
from tests.integration.faults.injection import CHAT, RequestThread, SmallDisk, failures, serving

pytestmark = pytest.mark.integration

PACED = ("--speedup-ratio", "1")
REFRESHES_S = 3.5  # At least one refresh; it fails too, and is not logged again.


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    small = SmallDisk(tmp_path / "kv")
    yield small
    small.remove()


def lines(worker: WorkerProcess, words: str) -> int:
    return worker.log.read_text().count(words)


def test_worker_on_a_full_disk_keeps_serving_and_registers_again_later(tmp_path: Path, disk: SmallDisk) -> None:
    with serving(tmp_path) as cluster:
        worker = WorkerProcess(cluster, *PACED)
        record = worker.record.read_bytes()
        stream = RequestThread(cluster, max_tokens=1000)
        wait_until(lambda: stream.has_begun, "the stream never began")

        disk.fill()
        assert cluster.post(CHAT).status_code == 200, "what is registered already needs no room"
        assert lines(worker, " WARN ") == 0

        worker.record.unlink()
        disk.fill()  # No space is left for the record.
        wait_until(lambda: lines(worker, "No space left on device") > 0, "it did not try to register again")
        time.sleep(REFRESHES_S)
        disk.verify()
        assert lines(worker, "No space left on device") == 1
        assert not worker.record.exists()
        assert failures([stream]) == [], "who is not found goes on with what it has"
        assert [path.name for path in disk.root.iterdir() if path.name.startswith(".")] == []

        disk.free()
        wait_until(worker.record.exists, "it did not register again")
        assert worker.record.read_bytes() == record
        wait_until(lambda: lines(worker, "refreshed again") == 1, "it does not say so")
        wait_until(lambda: cluster.post(CHAT).status_code == 200, "it is not found again")


def test_serving_continues_while_the_discovery_directory_is_missing(tmp_path: Path) -> None:
    with serving(tmp_path) as cluster:
        worker = WorkerProcess(cluster, *PACED)
        aside = tmp_path / "aside"
        (tmp_path / "kv").rename(aside)
        (tmp_path / "kv").write_text("no directory")
        wait_until(lambda: lines(worker, "failed to refresh") > 0, "it was not noticed")
        wait_until(lambda: "keeping the last view" in frontend_log(cluster), "the frontend noticed nothing")
        assert cluster.post(CHAT).status_code == 200, "a registry that cannot be read says nothing of the workers"
        time.sleep(REFRESHES_S)  # Until each record of the worker has failed once.
        output = lines(worker, "failed to refresh")
        time.sleep(REFRESHES_S)
        assert lines(worker, "failed to refresh") == output
        assert cluster.post(CHAT).status_code == 200
        (tmp_path / "kv").unlink()
        wait_until(lambda: lines(worker, "refreshed again") == output, "it did not register again")
        wait_until(lambda: "readable again" in frontend_log(cluster), "the frontend does not look again")
        assert worker.record.exists()
        assert cluster.post(CHAT).status_code == 200


def frontend_log(cluster: Cluster) -> str:
    return (cluster.folder / "frontend0.log").read_text()
