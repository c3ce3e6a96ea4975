"""S3 storage with a small server that implements the required part of the protocol and injects faults."""

import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from dynamo.core.errors import ConfigError
from dynamo.kvbm.logical.blocks import BlockIdentity
from dynamo.kvbm.physical.layout import BlockLayout, CorruptBlock
from dynamo.kvbm.physical.objects import ObjectBlocks, ObjectFailure
from dynamo.kvbm.physical.s3 import Credentials, S3Objects

CREDENTIALS = Credentials("key", "secret", "here")
LAYOUT = BlockLayout((4, 100), "float32", "model")
TIMEOUT_S = 10.0


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.status: int | None = None
        self.delay = threading.Event()
        self.delay.set()
        self.requests = 0
        self.ends_connections = False
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("etag", '"1"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        if self.server.ends_connections:
            self.close_connection = True

    def is_signed(self) -> bool:
        scheme, _, rest = self.headers["authorization"].partition(" ")
        return scheme == "AWS4-HMAC-SHA256" and rest.startswith("Credential=key/") and "/here/s3/aws4_request" in rest

    def do_any(self) -> None:
        self.server.requests += 1
        self.server.delay.wait(TIMEOUT_S)
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        objects = self.server.objects
        if not self.is_signed():
            self.answer(403)
        elif self.server.status is not None:
            self.answer(self.server.status)
        elif self.command == "PUT":
            is_there = self.headers["if-none-match"] == "*" and self.path in objects
            objects.setdefault(self.path, body)
            self.answer(412 if is_there else 200)
        else:
            self.answer(200 if self.path in objects else 404, objects.get(self.path, b""))

    do_GET = do_PUT = do_HEAD = do_any  # noqa: N815 - the names that http.server looks for

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.delay.set()
    server.shutdown()
    server.server_close()
    thread.join(TIMEOUT_S)


@pytest.fixture
def store(server: Server) -> Iterator[S3Objects]:
    store = S3Objects(f"http://127.0.0.1:{server.server_port}", "bucket", CREDENTIALS)
    yield store
    store.close()


def test_s3_store_puts_an_object_once_and_reads_it(server: Server, store: S3Objects) -> None:
    assert store.get("a/b", 100, TIMEOUT_S) is None
    assert not store.has("a/b", TIMEOUT_S)
    store.put("a/b", (b"one", memoryview(b"two")), TIMEOUT_S)
    store.put("a/b", (b"other", memoryview(b"")), TIMEOUT_S)
    assert store.get("a/b", 100, TIMEOUT_S) == b"onetwo"
    assert store.has("a/b", TIMEOUT_S)
    assert list(server.objects) == ["/bucket/a/b"]


def test_s3_store_retries_when_the_server_closes_connections(server: Server, store: S3Objects) -> None:
    server.ends_connections = True
    for _ in range(3):
        store.put("x", (b"1", memoryview(b"")), TIMEOUT_S)
    assert store.get("x", 10, TIMEOUT_S) == b"1"


def test_s3_store_refused_request_is_a_failure(server: Server, store: S3Objects) -> None:
    server.status = 503
    with pytest.raises(ObjectFailure, match="503"):
        store.put("x", (b"", memoryview(b"")), TIMEOUT_S)
    with pytest.raises(ObjectFailure, match="503"):
        store.get("x", 10, TIMEOUT_S)
    with pytest.raises(ObjectFailure, match="503"):
        store.has("x", TIMEOUT_S)


def test_s3_store_wrong_key_is_a_failure(server: Server) -> None:
    store = S3Objects(f"http://127.0.0.1:{server.server_port}", "bucket", Credentials("guessed", "secret", "here"))
    with pytest.raises(ObjectFailure, match="403"):
        store.get("x", 10, TIMEOUT_S)
    store.close()


def test_s3_store_times_out(server: Server, store: S3Objects) -> None:
    server.delay.clear()
    began = time.monotonic()
    with pytest.raises(ObjectFailure):
        store.get("x", 10, 0.05)
    assert time.monotonic() - began < TIMEOUT_S / 2


def test_s3_store_unreachable_server_is_a_failure() -> None:
    store = S3Objects("http://127.0.0.1:9", "bucket", CREDENTIALS)
    with pytest.raises(ObjectFailure):
        store.get("x", 10, TIMEOUT_S)
    store.close()


def test_s3_store_does_not_read_an_oversized_object(server: Server, store: S3Objects) -> None:
    server.objects["/bucket/x"] = bytes(1000)
    with pytest.raises(ObjectFailure, match="more than 10"):
        store.get("x", 10, TIMEOUT_S)


def test_s3_store_round_trips_a_block(server: Server, store: S3Objects) -> None:
    blocks = ObjectBlocks(store, LAYOUT, TIMEOUT_S)
    data = np.arange(LAYOUT.block_bytes, dtype=np.uint32).astype(np.uint8)
    blocks.write(BlockIdentity(7, 8, None), data)
    found = np.zeros_like(data)
    assert blocks.read(7, found, TIMEOUT_S) > data.nbytes
    np.testing.assert_array_equal(found, data)
    assert blocks.read(8, found, TIMEOUT_S) == 0


@pytest.mark.parametrize("change", ["shorter", "flipped", "another"])
def test_s3_store_detects_a_corrupt_block(server: Server, store: S3Objects, change: str) -> None:
    blocks = ObjectBlocks(store, LAYOUT, TIMEOUT_S)
    data = np.ones(LAYOUT.block_bytes, np.uint8)
    blocks.write(BlockIdentity(7, 8, None), data)
    (path,) = server.objects
    raw = server.objects[path]
    server.objects[path] = {"shorter": raw[:-1], "flipped": raw[:-1] + b"\0", "another": raw}[change]
    if change == "another":
        server.objects[path.replace(f"{7:016x}", f"{9:016x}")] = raw
    with pytest.raises(CorruptBlock):
        blocks.read(9 if change == "another" else 7, np.zeros_like(data), TIMEOUT_S)


def test_s3_store_refuses_an_invalid_endpoint() -> None:
    with pytest.raises(ConfigError, match="DYN_KVBM_OBJECT_ENDPOINT"):
        S3Objects("ftp://host", "bucket", CREDENTIALS)
    with pytest.raises(ConfigError, match="DYN_KVBM_OBJECT_BUCKET"):
        S3Objects("http://host", "", CREDENTIALS)


def test_missing_obstore_is_reported_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"DYN_KVBM_OBJECT_ENDPOINT: the package obstore is missing: .*pip install"):
        S3Objects("http://host", "bucket", CREDENTIALS)
