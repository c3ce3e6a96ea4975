"""Malformed HTTP: raw sockets against a real frontend, and the state that they leave."""

import json
import random
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.processes import DEADLINE_S, wait_until
from tests.integration.faults.injection import open_files, resident_mb

pytestmark = pytest.mark.integration

ARRIVAL_S = 5.0  # Longer than a busy machine suspends a client that sends.
GROWN_MB_MAX = 40.0  # Allocators keep some memory after a flood.
STORM = 1500
SEED = 4
PATH = b"/v1/chat/completions"
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
LENGTH = b"content-length: %d" % len(BODY)
CHUNKED = b"transfer-encoding: chunked"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
MESSAGES = b'"content":"Hello there."'


def request(*headers: bytes, body: bytes = BODY, line: bytes = b"POST " + PATH + b" HTTP/1.1") -> bytes:
    return b"\r\n".join([line, b"host: x", *headers]) + b"\r\n\r\n" + body


def chunked(body: bytes) -> bytes:
    return request(CHUNKED, body=body)


GOOD = request(LENGTH)


class Client:
    """One connection."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def is_open_after_more(self) -> bool:
        try:
            more = self.socket.recv(65536)
        except ConnectionError:
            more = b""
        self.received += more
        return bool(more)

    def answer(self) -> tuple[int, bytes]:
        """Return the next complete response: its status and its body."""
        while b"\r\n\r\n" not in self.received:
            assert self.is_open_after_more(), f"closed after {self.received!r}"
        head, _, rest = self.received.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if status == 100:
            self.received = rest
            return status, b""
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        while len(self.received) < len(head) + 4 + length:
            assert self.is_open_after_more(), f"closed after {self.received!r}"
        body, self.received = self.received[len(head) + 4 :][:length], self.received[len(head) + 4 + length :]
        return status, body

    def rest(self) -> bytes:
        """Return all bytes until the server closes."""
        while self.is_open_after_more():
            pass
        return self.received


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DYN_HTTP_REQUEST_ARRIVAL_TIMEOUT_SECS", str(ARRIVAL_S))
        patch.setenv("DYN_HTTP_BODY_LIMIT_MB", "1")
        cluster = Cluster(tmp_path_factory.mktemp("fuzz"))
    try:
        cluster.scripted_worker()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(autouse=True)
def check_server_answers(cluster: Cluster) -> Iterator[None]:
    """Check that the next client is served."""
    yield
    with Client(cluster.port) as client:
        client.send(GOOD)
        status, body = client.answer()
    assert status == 200 and MESSAGES in body


# Refused requests
# ------------------------------------------------------------------------------------------------------

REFUSED = {
    "a TLS greeting": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50)),
    "noise": (400, b"\xff\xfe\xfd" * 20 + b"\r\n\r\n"),
    "zeros": (400, bytes(100)),
    "half a request line": (400, b"GET\r\n\r\n"),
    "HTTP/2": (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "HTTP of the future": (400, request(LENGTH, line=b"POST " + PATH + b" HTTP/9.9")),
    "a version with a tail": (400, request(LENGTH, line=b"POST " + PATH + b" HTTP/1.1x")),
    "an unknown method": (400, request(body=b"", line=b"BREW /live HTTP/1.1")),
    "a tunnel": (400, request(body=b"", line=b"CONNECT x:1 HTTP/1.1")),
    "a letter that is no ASCII": (400, request(body=b"", line="GET /é HTTP/1.1".encode())),
    "lines that end in LF": (400, GOOD.replace(b"\r\n", b"\n")),
    "lines that end in CR": (400, GOOD.replace(b"\r\n", b"\r")),
    "two lengths": (400, request(LENGTH, b"content-length: 5")),
    "one length twice": (400, request(LENGTH, LENGTH)),
    "a list of lengths": (400, request(LENGTH + b", 5")),
    "a length and chunks": (400, request(LENGTH, CHUNKED, body=CHUNKS)),
    "chunks and a length": (400, request(CHUNKED, LENGTH, body=CHUNKS)),
    "an encoding that is none": (400, request(b"transfer-encoding: identity", body=CHUNKS)),
    "an unknown encoding": (400, request(b"transfer-encoding: xchunked", body=CHUNKS)),
    "chunks, but not last": (400, request(b"transfer-encoding: chunked, identity", body=CHUNKS)),
    "chunks twice": (400, request(CHUNKED, CHUNKED, body=CHUNKS)),
    "chunks, then none": (400, request(CHUNKED, b"transfer-encoding: identity", body=CHUNKS)),
    "chunks in quotes": (400, request(b'transfer-encoding: "chunked"', body=CHUNKS)),
    "chunks behind a blank": (400, request(b"transfer-encoding : chunked", body=CHUNKS)),
    "chunks behind a control character": (400, request(b"transfer-encoding: \x0bchunked", body=CHUNKS)),
    "chunks on the next line": (400, request(b"transfer-encoding:\r\n chunked", body=CHUNKS)),
    "a length below zero": (400, request(b"content-length: -5")),
    "a length with a sign": (400, request(b"content-length: +5")),
    "a length in hex": (400, request(b"content-length: 0x10")),
    "a length of two numbers": (400, request(b"content-length: 5 5")),
    "a length of a word": (400, request(b"content-length: five")),
    "no length": (400, request(b"content-length: ")),
    "a length of thirty digits": (400, request(b"content-length: " + b"9" * 30)),
    "a chunk of twenty digits": (400, chunked(b"F" * 20 + b"\r\n")),
    "a chunk below zero": (400, chunked(b"-1\r\na\r\n0\r\n\r\n")),
    "a chunk with a prefix": (400, chunked(b"0x5\r\nhello\r\n0\r\n\r\n")),
    "a chunk with a blank": (400, chunked(b"5 \r\nhello\r\n0\r\n\r\n")),
    "a chunk that is longer than it says": (400, chunked(b"5\r\nhelloXX\r\n0\r\n\r\n")),
    "a chunk of no size": (400, chunked(b"\r\n\r\n")),
    "a length among the trailers": (400, chunked(CHUNKS[:-2] + b"content-length: 5\r\n\r\n")),
    "NUL in a value": (400, request(b"x-a: a\0b", LENGTH)),
    "NUL in a name": (400, request(b"x\0a: b", LENGTH)),
    "NUL in the path": (400, request(LENGTH, line=b"POST /v1\0/chat HTTP/1.1")),
    "CR in a value": (400, request(b"x-a: b\rc: d", LENGTH)),
    "a name with a blank": (400, request(b"x a: b", LENGTH)),
    "a header without a colon": (400, request(b"x-a", LENGTH)),
    "a header without a name": (400, request(b": b", LENGTH)),
    "a header that begins with a blank": (400, request(b" x: b", LENGTH)),
    "a long request line": (431, request(body=b"", line=b"GET /" + b"a" * 100_000 + b" HTTP/1.1")),
    "a long header": (431, request(b"x-a: " + b"a" * 100_000, LENGTH)),
    "many headers": (431, request(*(b"x-%d: a" % number for number in range(200)), LENGTH)),
    "a header without an end": (431, request(b"x-a: " + b"a" * 200_000)[:-4]),
    "a body over the limit": (413, request(b"content-length: 2000000", body=b"")),
    "chunks over the limit": (413, chunked(b"10000\r\n%b\r\n" % (b"a" * 0x10000) * 20)),
    "trailers over the limit": (400, chunked(CHUNKS[:-2] + b"x-a: %b\r\n" % (b"a" * 3_000_000))),
    "trailers without an end": (400, chunked(CHUNKS[:-2] + b"x-a: b\r\n" * 300_000)),
    "an extension over the limit": (400, chunked(b"5;a=" + b"a" * 3_000_000)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_malformed_request_is_refused_and_the_rest_is_not_read(cluster: Cluster, name: str) -> None:
    status, data = REFUSED[name]
    with Client(cluster.port) as client:
        try:
            client.send(data)
            client.send(GOOD)  # A server that misjudges the end of the first request would read this as a second one.
        except ConnectionError:
            pass  # The server has read enough.
        answers = client.rest()
    assert answers.count(b"HTTP/1.1 ") == 1, answers[:300]
    head, _, body = answers.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"connection: close" in head.lower()
    assert json.loads(body)["error"]["message"]


# Unusual requests that are answered
# ------------------------------------------------------------------------------------

UNUSUAL = {
    "chunks": chunked(CHUNKS),
    "a chunk for each byte": chunked(b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"),
    "a chunk with an extension": chunked(CHUNKS.replace(b"\r\n", b";a=b\r\n", 1)),
    "trailers": chunked(CHUNKS[:-2] + b"x-a: b\r\nx-c: d\r\n\r\n"),
    "capital letters": request(b"Transfer-Encoding: CHUNKED", body=CHUNKS),
    "an absolute address": request(LENGTH, line=b"POST http://elsewhere" + PATH + b" HTTP/1.1"),
    "a query": request(LENGTH, line=b"POST " + PATH + b"?a=b HTTP/1.1"),
    "empty lines before it": b"\r\n\r\n" + GOOD,
    "a wish for HTTP/2": request(
        b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAMA", LENGTH
    ),
    "a wish for HTTP/2 before chunks": request(b"connection: upgrade", b"upgrade: h2c", CHUNKED, body=CHUNKS),
    "a wish for something else": request(b"expect: tea", LENGTH),
    "bytes that are no ASCII in a header": request(b"x-a: \xff\xfe", LENGTH),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_valid_request_is_served_and_the_connection_kept(cluster: Cluster, name: str) -> None:
    with Client(cluster.port) as client:
        for _ in range(2):
            client.send(UNUSUAL[name])
            status, body = client.answer()
            assert status == 200 and MESSAGES in body


def test_trailer_is_not_a_header(cluster: Cluster) -> None:
    with Client(cluster.port) as client:
        client.send(chunked(CHUNKS[:-2] + b"x-dynamo-worker-instance-id: 1\r\n\r\n"))
        assert client.answer()[0] == 200, "a worker that is not there was chosen"
        client.send(request(b"x-dynamo-worker-instance-id: 1", CHUNKED, body=CHUNKS))
        assert client.answer()[0] == 400


@pytest.mark.parametrize("line", [b"POST " + PATH + b" HTTP/1.0", b"POST " + PATH + b" HTTP/1.1"])
def test_connection_close_request_gets_one_response_and_a_closed_connection(cluster: Cluster, line: bytes) -> None:
    with Client(cluster.port) as client:
        client.send(request(b"connection: close", LENGTH, line=line))
        status, body = client.answer()
        assert status == 200 and MESSAGES in body
        assert client.rest() == b""


def test_expect_100_continue_is_answered_before_the_body(cluster: Cluster) -> None:
    with Client(cluster.port) as client:
        client.send(request(b"expect: 100-continue", LENGTH, body=b""))
        assert client.answer() == (100, b"")
        client.send(BODY)
        assert client.answer()[0] == 200


def test_requests_in_one_packet_are_answered_in_order(cluster: Cluster) -> None:
    bad = b'{"model": "m"}'
    requests = [
        GOOD,
        request(body=b"", line=b"GET /live HTTP/1.1"),
        request(b"content-length: %d" % len(bad), body=bad),
        chunked(CHUNKS),
        request(body=b"", line=b"GET /nowhere HTTP/1.1"),
        GOOD,
    ]
    with Client(cluster.port) as client:
        client.send(b"".join(requests))
        assert [client.answer()[0] for _ in requests] == [200, 200, 400, 200, 404, 200]


@pytest.mark.parametrize("data", [GOOD, chunked(CHUNKS[:-2] + b"x-a: b\r\n\r\n")], ids=["plain", "chunked"])
def test_request_may_be_split_at_every_byte(cluster: Cluster, data: bytes) -> None:
    with Client(cluster.port) as client:
        for place in range(1, len(data)):
            client.send(data[:place])
            time.sleep(0.001)
            client.send(data[place:])
            status, body = client.answer()
            assert status == 200 and MESSAGES in body, place
        for byte in data:
            client.send(bytes([byte]))
        assert client.answer()[0] == 200


# Slow and disconnecting clients
# ----------------------------------------------------------------------------------------

SLOW = {
    "in the request line": b"",
    "in the headers": b"POST " + PATH + b" HTTP/1.1\r\nhost: x\r\n",
    "in the body": request(b"content-length: 100000", body=b""),
    "in a chunk": chunked(b"fffff\r\n"),
    "in the trailers": chunked(CHUNKS[:-2]),
}


@pytest.mark.parametrize("phase", SLOW)
def test_slow_sender_is_disconnected_after_the_timeout(cluster: Cluster, phase: str) -> None:
    with Client(cluster.port) as client:
        client.send(SLOW[phase])
        client.socket.settimeout(0.1)
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            try:
                client.send(b"x-a: b\r\n" if phase in ("in the headers", "in the trailers") else b"G")
                if not client.is_open_after_more():
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("it is waited for")
    assert client.received.startswith((b"HTTP/1.1 408 ", b"HTTP/1.1 400 "))


def test_half_closed_connection_is_a_disconnect(cluster: Cluster) -> None:
    with Client(cluster.port) as client:
        client.send(GOOD[:-5])
        client.socket.shutdown(socket.SHUT_WR)
        assert client.rest() == b""


def leave(port: int, number: int) -> None:
    """Send a random part of a random request, and disconnect in a random way."""
    dice = random.Random(f"{SEED} {number}")
    kinds: Sequence[bytes] = (GOOD, GOOD * 3, *UNUSUAL.values(), *(data for _, data in REFUSED.values()))
    data = bytearray(dice.choice(kinds))
    for _ in range(dice.choice((0, 0, 1, 5))):
        data[dice.randrange(len(data))] = dice.randrange(256)
    if dice.random() < 0.7:
        del data[dice.randrange(len(data) + 1) :]
    client = Client(port)
    try:
        for start in range(0, len(data), size := dice.choice((10, 1000, 10_000_000))):
            client.send(data[start : start + size][:100_000])
            if start > 20 * size:
                break
        how = dice.random()
        if how < 0.3:
            client.socket.settimeout(0.05)
            client.is_open_after_more()
        elif how < 0.6:
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif how < 0.7:
            client.socket.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # The connection was refused first.
    finally:
        client.socket.close()


def test_many_malformed_requests_leave_no_state(cluster: Cluster) -> None:
    def storm(first: int, count: int) -> None:
        with ThreadPoolExecutor(16) as pool:
            for _ in pool.map(lambda number: leave(cluster.port, number), range(first, first + count)):
                pass

    pid = cluster.frontend.pid
    # This client's connection and the one to the worker are part of the baseline.
    assert cluster.http.get("/live").status_code == 200
    assert cluster.post({"model": "m", "prompt": "a", "max_tokens": 1}, "/v1/completions").status_code == 200
    files = open_files(pid)
    storm(0, STORM)  # After this, the buffers kept for the next connection exist.
    wait_until(lambda: open_files(pid) <= files, "connections are left open")
    before_mb = resident_mb(pid)
    storm(STORM, STORM)
    wait_until(lambda: open_files(pid) <= files, "connections are left open")
    wait_until(lambda: cluster.metric("dynamo_frontend_inflight_requests") == 0, "requests are left over")
    grown_mb = resident_mb(pid) - before_mb
    print(f"{STORM} clients: {before_mb:.0f} MB before, {grown_mb:+.1f} MB after")
    assert grown_mb < GROWN_MB_MAX
    assert cluster.frontend.poll() is None
    log = (cluster.folder / "frontend0.log").read_text()
    assert "Traceback" not in log, log[-3000:]
