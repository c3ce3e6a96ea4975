"""KV tiers outlive the worker that is killed: what is whole serves again, what is torn is computed anew."""

import struct
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import Popen

import httpx
import pytest
from tests.integration.graph import DEADLINE_S, Graph, free_port, wait_for

from dynamo.kvbm.physical.layout import PAGE_BYTES

pytestmark = pytest.mark.integration

PROMPTS = [" ".join(f"{at} holds block {at * 31 + word * 7}" for word in range(14)) for at in range(8)]
SMALL = ("--kv-cache-blocks", "64", "--threads", "1")
PATIENT = {"DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "64", "DYN_KVBM_ONBOARD_TIMEOUT_SECS": str(DEADLINE_S)}


class Stand(Graph):
    """A frontend, and workers that come and go."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.ports: dict[Popen[bytes], int] = {}

    def tiered(self, **variables: str) -> "Popen[bytes]":
        before, port = self.workers(), free_port()
        worker = self.run("cpu", "--model-name", "m", *SMALL, DYN_SYSTEM_PORT=str(port), **PATIENT, **variables)
        self.ports[worker] = port
        wait_for(lambda: self.workers() > before, "the worker never appeared")
        return worker

    def kill(self, worker: "Popen[bytes]") -> None:
        worker.kill()
        worker.wait()
        wait_for(lambda: self.workers() == len(self.ports) - 1, "the frontend never noticed")
        del self.ports[worker]

    def say(self, prompt: str) -> str:
        body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": 8, "temperature": 0}
        answer = self.post(body)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text

    def metric_of(self, worker: "Popen[bytes]", name: str) -> float:
        text = httpx.get(f"http://127.0.0.1:{self.ports[worker]}/metrics", timeout=DEADLINE_S).text
        return float(next(line.split()[1] for line in text.splitlines() if line.startswith(f"{name} ")))


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    stand = Stand(tmp_path)
    try:
        yield stand
    finally:
        stand.stop()


def tear(path: Path, places: int) -> int:
    """Undoes the second half of the first blocks that a file holds, as a crash of the machine would; how many."""
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


def test_a_worker_that_was_killed_while_it_wrote_to_disk_finds_what_is_whole(stand: Stand) -> None:
    place = stand.folder / "disk"
    variables = {
        "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": "512",
        "DYN_KVBM_DISK_CACHE_DIR": str(place),
        "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": "true",
    }
    worker = stand.tiered(**variables)
    answers = [stand.say(PROMPTS[0])]
    wait_for(lambda: stand.metric_of(worker, "kvbm_offload_blocks_h2d") >= 4, "nothing came to the disk")
    answers += [stand.say(prompt) for prompt in PROMPTS[1:]]
    stand.kill(worker)  # Whatever is in its queues is lost, and what it writes just now is half written.
    (file,) = place.iterdir()
    assert tear(file, 2) == 2
    worker = stand.tiered(**variables)
    assert [stand.say(prompt) for prompt in PROMPTS] == answers
    assert stand.metric_of(worker, "kvbm_onboard_blocks_d2d") >= 1
    assert stand.metric_of(worker, "kvbm_disk_read_failures") >= 1
    assert [stand.say(prompt) for prompt in PROMPTS] == answers


class Store(ThreadingHTTPServer):
    """An object store that can wait in the middle of a put."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Objects)
        self.objects: dict[str, bytes] = {}
        self.whole_puts = 6
        """How many are taken before one stays half done."""
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
            while self.connection.recv(1 << 16):  # Goes on until the one who writes is dead.
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


def test_workers_share_a_store_in_which_another_one_died_in_the_middle_of_a_put(stand: Stand, store: Store) -> None:
    variables = {
        "DYN_KVBM_OBJECT_ENABLED": "true",
        "DYN_KVBM_OBJECT_ENDPOINT": f"http://127.0.0.1:{store.server_port}",
        "DYN_KVBM_OBJECT_BUCKET": "blocks",
        "DYN_KVBM_OBJECT_TIMEOUT_SECS": str(DEADLINE_S),
    }
    first = stand.tiered(**variables)
    answers = [stand.say(prompt) for prompt in PROMPTS]
    wait_for(store.is_half.is_set, "no put was begun")
    stand.kill(first)
    assert len(store.objects) == 6
    others = [stand.tiered(**variables) for _ in range(2)]
    for _ in range(2):  # Round robin: both of them see prompts that the dead one had begun to store.
        assert [stand.say(prompt) for prompt in PROMPTS] == answers
    assert sum(stand.metric_of(one, "kvbm_onboard_blocks_o2d") for one in others) >= 1
    assert sum(stand.metric_of(one, "kvbm_object_read_failures") for one in others) == 0
    wait_for(lambda: len(store.objects) > 6, "nothing more was stored")
