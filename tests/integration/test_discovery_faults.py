"""Damaged or removed records of a running worker, and unfinished frames on its port: clients get 200 or 503."""

import contextlib
import json
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.processes import wait_until

pytestmark = pytest.mark.integration

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
FRAME_BYTES = 30 << 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, demo_model: str) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as made:
        made.mocker("--model-path", demo_model, "--speedup-ratio", "100")
        wait_until(lambda: made.post(CHAT).status_code == 200, "the model is not served")
        yield made


@pytest.fixture(scope="module")
def demo_model() -> str:
    import dynamo.cpu

    return str(Path(dynamo.cpu.__file__).parent / "demo_model")


def records(cluster: Cluster) -> list[Path]:
    return [path for path in (cluster.folder / "kv" / "v1").rglob("*") if path.is_file()]


def contents(cluster: Cluster) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in records(cluster)}


def statuses_until_served(cluster: Cluster) -> set[int]:
    """Yield statuses from now on until the model was served for two seconds."""
    found: set[int] = set()
    deadline, well_since = time.monotonic() + 60, time.monotonic()
    while time.monotonic() - well_since < 2:
        status = cluster.post(CHAT).status_code
        found.add(status)
        if status != 200:
            well_since = time.monotonic()
        assert time.monotonic() < deadline, f"the model is not served again: {found}"
    return found


def overwrite(cluster: Cluster) -> None:
    for path in records(cluster):
        path.write_bytes(b"garbage")


def truncate(cluster: Cluster) -> None:
    for path in records(cluster):
        path.write_bytes(b"")


def enlarge(cluster: Cluster) -> None:
    for path in records(cluster):
        with open(path, "r+b") as file:
            file.truncate(300 << 20)


@pytest.mark.parametrize("damage", [overwrite, truncate, enlarge])
def test_requests_succeed_while_records_of_a_living_worker_are_damaged(
    cluster: Cluster, damage: Callable[[Cluster], None]
) -> None:
    before = contents(cluster)
    damage(cluster)
    assert statuses_until_served(cluster) == {200}
    wait_until(lambda: contents(cluster) == before, "the worker did not write its records again")


def remove_files(cluster: Cluster) -> None:
    for path in records(cluster):
        path.unlink()


def remove_directories(cluster: Cluster) -> None:
    shutil.rmtree(cluster.folder / "kv" / "v1")


@pytest.mark.parametrize("remove", [remove_files, remove_directories])
def test_requests_get_503_and_not_404_while_records_of_a_living_worker_are_gone(
    cluster: Cluster, remove: Callable[[Cluster], None]
) -> None:
    before = contents(cluster)
    remove(cluster)
    assert statuses_until_served(cluster) <= {200, 503}
    wait_until(lambda: contents(cluster) == before, "the worker did not write its records again")
    assert statuses_until_served(cluster) <= {200, 503}


def test_worker_refuses_a_discovery_directory_that_others_can_write(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o700)
    (tmp_path / "kv").chmod(0o777)
    ended = subprocess.run(
        [sys.executable, "-m", "dynamo.mocker", "--model-path", "m", "--discovery-backend", "file"],
        env={"DYN_FILE_KV": str(tmp_path / "kv"), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "lets other users write" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_worker_port_bounds_the_memory_of_unfinished_frames(cluster: Cluster) -> None:
    [record] = [path for path in records(cluster) if "generate" in path.name and path.parent.name == "instances"]
    [port] = re.findall(r":(\d+)/", json.loads(record.read_bytes())["transport"]["tcp"])
    worker = cluster.processes[1]
    before = resident_mb(worker.pid)
    head = struct.pack(">H", 4) + b"path" + struct.pack(">H", 2) + b"{}" + struct.pack(">I", FRAME_BYTES + 1)
    links = []
    for _ in range(20):
        link = socket.create_connection(("127.0.0.1", int(port)), 20)
        link.settimeout(0.3)
        with contextlib.suppress(TimeoutError):  # The rest is not read.
            link.sendall(head + bytes(FRAME_BYTES))
        links.append(link)
    assert cluster.post(CHAT).status_code == 200
    assert resident_mb(worker.pid) - before < 350, "unfinished frames are held without a bound"
    for link in links:
        link.close()


def resident_mb(pid: int) -> int:
    [kilobytes] = re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(kilobytes) >> 10
