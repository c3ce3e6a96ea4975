"""KV tiers after a killed worker: complete blocks are reused, torn ones are recomputed."""

import struct
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.processes import DEADLINE_S, wait_until
from tests.cluster.worker import WorkerProcess

from dynamo.kvbm.physical.layout import PAGE_BYTES

pytestmark = pytest.mark.integration

PROMPTS = [" ".join(f"{at} holds block {at * 31 + word * 7}" for word in range(14)) for at in range(8)]
SMALL = ("--kv-cache-blocks", "64", "--threads", "1")
PATIENT = {"DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "64", "DYN_KVBM_ONBOARD_TIMEOUT_SECS": str(DEADLINE_S)}


class TieredCluster(Cluster):
    """A frontend, and workers that start and end."""

    def tiered(self, **variables: str) -> WorkerProcess:
        return WorkerProcess(self, *SMALL, module="cpu", **PATIENT, **variables)

    def kill(self, worker: WorkerProcess) -> None:
        before = self.workers()
        worker.process.kill()
        worker.process.wait()
        wait_until(lambda: self.workers() == before - 1, "the frontend still lists the killed worker")

    def generate(self, prompt: str) -> str:
        body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": 8, "temperature": 0}
        answer = self.post(body)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TieredCluster]:
    with TieredCluster(tmp_path) as cluster:
        yield cluster


def tear(path: Path, places: int) -> int:
    """Overwrite the second half of the first blocks of a file, as a crash of the machine would; return their number."""
    torn = 0
    with open(path, "r+b") as file:
        _, _, stride = struct.unpack("<8sQQ", file.read(24))
        for at in range(PAGE_BYTES, path.stat().st_size, stride):
            file.seek(at)
            if file.read(8) == b"DYNKVBM1" and torn < places:
                file.seek(at + PAGE_BYTES + (stride - PAGE_BYTES) // 2)
                file.write(bytes((stride - PAGE_BYTES) // 2))
                torn += 1
    return torn


def test_worker_killed_during_a_disk_write_loads_only_complete_blocks(cluster: TieredCluster) -> None:
    place = cluster.folder / "disk"
    variables = {
        "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": "512",
        "DYN_KVBM_DISK_CACHE_DIR": str(place),
        "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": "true",
    }
    worker = cluster.tiered(**variables)
    answers = [cluster.generate(PROMPTS[0])]
    wait_until(lambda: worker.metric("kvbm_offload_blocks_h2d") >= 4, "nothing came to the disk")
    answers += [cluster.generate(prompt) for prompt in PROMPTS[1:]]
    cluster.kill(worker)  # Its queues are lost, and the current write is incomplete.
    (file,) = place.iterdir()
    assert tear(file, 2) == 2
    worker = cluster.tiered(**variables)
    assert [cluster.generate(prompt) for prompt in PROMPTS] == answers
    assert worker.metric("kvbm_onboard_blocks_d2d") >= 1
    assert worker.metric("kvbm_disk_read_failures") >= 1
    assert [cluster.generate(prompt) for prompt in PROMPTS] == answers


class Store(ThreadingHTTPServer):
    """Object store that can block in the middle of a put."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Objects)
        self.objects: dict[str, bytes] = {}
        self.whole_puts = 6
        """Number of puts before one stays incomplete."""
        self.is_half = threading.Event()
        self.lock = threading.Lock()


class Objects(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Store

    def log_message(self, format: str, *args: object) -> None: ...

    def do_PUT(self) -> None:
        length = int(self.headers["content-length"])
        with self.server.lock:
            self.server.whole_puts -= 1
            is_whole = self.server.whole_puts >= 0
        body = self.rfile.read(length if is_whole else length // 2)
        if not is_whole and not self.server.is_half.is_set():
            self.server.is_half.set()
            while self.connection.recv(1 << 16):  # Blocks until the writing process is dead.
                pass
            self.close_connection = True
            return
        if len(body) < length:
            body += self.rfile.read(length - len(body))
        with self.server.lock:
            self.server.objects.setdefault(self.path, body)
        self.answer(HTTPStatus.OK, b"")

    def do_GET(self) -> None:
        found = self.server.objects.get(self.path)
        self.answer(HTTPStatus.NOT_FOUND if found is None else HTTPStatus.OK, found or b"")

    def do_HEAD(self) -> None:
        self.do_GET()

    def answer(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("etag", '"1"')  # obstore requires it; every object store sends it.
        self.send_header("last-modified", self.date_time_string())
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def store() -> Iterator[Store]:
    with Store() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_store_is_usable_after_a_worker_is_killed_during_a_put(cluster: TieredCluster, store: Store) -> None:
    variables = {
        "DYN_KVBM_OBJECT_ENABLED": "true",
        "DYN_KVBM_OBJECT_ENDPOINT": f"http://127.0.0.1:{store.server_port}",
        "DYN_KVBM_OBJECT_BUCKET": "blocks",
        "DYN_KVBM_OBJECT_TIMEOUT_SECS": str(DEADLINE_S),
    }
    first = cluster.tiered(**variables)
    answers = [cluster.generate(prompt) for prompt in PROMPTS]
    wait_until(store.is_half.is_set, "no put was begun")
    cluster.kill(first)
    assert len(store.objects) == 6
    others = [cluster.tiered(**variables) for _ in range(2)]
    for _ in range(2):  # Round robin: both workers get prompts that the dead one had begun to store.
        assert [cluster.generate(prompt) for prompt in PROMPTS] == answers
    assert sum(one.metric("kvbm_onboard_blocks_o2d") for one in others) >= 1
    assert sum(one.metric("kvbm_object_read_failures") for one in others) == 0
    wait_until(lambda: len(store.objects) > 6, "nothing more was stored")
