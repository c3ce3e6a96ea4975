"""A real frontend's limits, keys, certificates and processes, with real clients and with invalid ones."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from tests.certificates import Certificates
from tests.cluster.cluster import Cluster
from tests.cluster.processes import DEADLINE_S, wait_until

pytestmark = pytest.mark.integration

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
KEY, LIMITED = "sk-secret-key-1", "sk-limited-key-2"
KEYS = f"""
[[keys]]
name = "team"
key = "{KEY}"
[[keys]]
name = "guest"
key = "{LIMITED}"
requests_per_minute = 1
models = ["other"]
"""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start a frontend with keys, short timeouts and small limits."""
    folder = tmp_path_factory.mktemp("guarded")
    keys = folder / "keys.toml"
    keys.write_text(KEYS)
    settings = {
        "DYN_HTTP_REQUEST_ARRIVAL_TIMEOUT_SECS": "5",  # Longer than a busy machine suspends a client that sends.
        "DYN_HTTP_SLOW_READER_TIMEOUT_SECS": "1",
        "DYN_HTTP_HEADER_LIMIT_KB": "8",
        "DYN_HTTP_BODY_LIMIT_MB": "1",
        "DYN_HTTP_MAX_REQUESTS_PER_CONNECTION": "1000",
    }
    with patched(settings):
        cluster = Cluster(
            folder, "--api-keys-file", str(keys), "--cors-origins", "https://chat.example.org", "--enable-anthropic-api"
        )
    try:
        cluster.http.headers["authorization"] = f"Bearer {KEY}"
        cluster.mocker("--speedup-ratio", "0", "--max-model-len", "16384")
        yield cluster
    finally:
        cluster.stop()


@contextlib.contextmanager
def patched(variables: dict[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


def connect(cluster: Cluster) -> socket.socket:
    return socket.create_connection(("127.0.0.1", cluster.port), timeout=DEADLINE_S)


def answer_to(cluster: Cluster, data: bytes) -> bytes:
    """Return all bytes until the frontend closes the connection."""
    with connect(cluster) as client:
        with contextlib.suppress(OSError):
            client.sendall(data)
        return read_all(client)


def read_all(client: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            received += part
    return received


def send_request(client: openai.OpenAI) -> Any:
    return client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=2)


def test_openai_client_needs_a_valid_key_and_respects_its_limits(guarded: Cluster) -> None:
    assert send_request(guarded.openai(KEY)).usage.completion_tokens == 2
    with pytest.raises(openai.AuthenticationError) as wrong:
        send_request(guarded.openai("sk-unknown"))
    assert wrong.value.code == "invalid_api_key"
    guest = guarded.openai(LIMITED)
    with pytest.raises(openai.PermissionDeniedError, match="may not use the model 'm'"):
        send_request(guest)
    with pytest.raises(openai.RateLimitError) as limited:
        send_request(guest)
    assert int(limited.value.response.headers["retry-after"]) > 0


def test_anthropic_client_receives_anthropic_errors(guarded: Cluster) -> None:
    client = guarded.anthropic(KEY)
    output = client.messages.create(model="m", max_tokens=2, messages=[{"role": "user", "content": "hi"}])
    assert output.usage.output_tokens == 2
    unknown_client = guarded.anthropic("sk-unknown")
    with pytest.raises(anthropic.AuthenticationError):
        unknown_client.messages.create(model="m", max_tokens=2, messages=[{"role": "user", "content": "hi"}])


def test_probes_and_scrapes_need_no_key_and_label_callers_by_name(guarded: Cluster) -> None:
    with httpx.Client(base_url=guarded.http.base_url, timeout=DEADLINE_S) as unreachable:
        for path in ("/health", "/live", "/metrics", "/openapi.json", "/docs"):
            assert unreachable.get(path).status_code == 200, path
        assert unreachable.get("/v1/models").status_code == 401
        text = unreachable.get("/metrics").text
    assert 'api_key_requests_total{key="team"}' in text and KEY not in text
    log = b"".join(path.read_bytes() for path in guarded.folder.glob("*.log"))
    assert KEY.encode() not in log and LIMITED.encode() not in log


def test_web_page_of_an_allowed_origin_may_send_requests(guarded: Cluster) -> None:
    origin = {"origin": "https://chat.example.org", "access-control-request-method": "POST"}
    requested = guarded.http.options("/v1/chat/completions", headers=origin)
    assert (requested.status_code, requested.headers["access-control-allow-origin"]) == (204, origin["origin"])
    answer = guarded.http.post("/v1/chat/completions", json=CHAT, headers={"origin": origin["origin"]})
    assert answer.headers["access-control-allow-origin"] == origin["origin"]
    other = guarded.http.get("/v1/models", headers={"origin": "https://elsewhere.example"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    "begun",
    [b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n", b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-secret-key-1\r\ncontent-length: 10\r\n\r\n{"],
    ids=["headers", "body"],
)  # fmt: skip
def test_incomplete_request_times_out(guarded: Cluster, begun: bytes) -> None:
    assert answer_to(guarded, begun).startswith(b"HTTP/1.1 408 ")


def test_headers_and_bodies_over_the_limit_are_refused(guarded: Cluster) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
    assert answer_to(guarded, head + b"x-long: " + b"a" * 20_000).startswith(b"HTTP/1.1 431 ")
    key = b"authorization: Bearer " + KEY.encode() + b"\r\n"
    assert answer_to(guarded, head + key + b"content-length: 2000000\r\n\r\n").startswith(b"HTTP/1.1 413 ")
    big = guarded.http.post("/busy_threshold", content=b" " * 2_000_000)
    assert big.status_code == 413


def test_client_that_does_not_read_is_disconnected_and_counted(guarded: Cluster) -> None:
    before = guarded.metric("dynamo_frontend_http_slow_readers_total")
    body = json.dumps({**CHAT, "max_tokens": 8000, "stream": True, "stream_options": {"include_usage": True}}).encode()
    with connect(guarded) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\ncontent-length: %d\r\n\r\n"
        )
        for _ in range(8):
            client.sendall(head % (KEY.encode(), len(body)) + body)
        wait_until(lambda: guarded.metric("dynamo_frontend_http_slow_readers_total") > before, "it was never cut off")
    wait_until(lambda: guarded.metric("dynamo_frontend_active_requests") == 0, "its request never ended")


def test_malformed_requests_leave_no_state(guarded: Cluster) -> None:
    """Any bytes get a response or a closed connection, and the number of descriptors is the same as before."""
    descriptors = Path(f"/proc/{guarded.frontend.pid}/fd")
    whole = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\ncontent-length: %d\r\n\r\n%b"
    body = json.dumps(CHAT).encode()
    good = whole % (KEY.encode(), len(body), body)
    rng = random.Random(4)
    before = len(os.listdir(descriptors))
    for round_ in range(60):
        data = bytearray(good * rng.choice([1, 1, 3]))
        for _ in range(rng.randrange(6)):
            place = rng.randrange(len(data))
            data[place : place + rng.randrange(4)] = rng.randbytes(rng.randrange(4))
        with connect(guarded) as client, contextlib.suppress(OSError):
            for place in range(0, len(data), step := rng.choice([1 << 20, 1 << 20, 40, 7])):
                client.sendall(data[place : place + step])
            if round_ % 3 == 0:
                client.shutdown(socket.SHUT_WR)
            client.settimeout(0.05)
            client.recv(65536)
    assert guarded.post(CHAT).status_code == 200
    wait_until(lambda: len(os.listdir(descriptors)) <= before + 2, "descriptors were left open")
    wait_until(lambda: guarded.metric("dynamo_frontend_active_requests") == 0, "a request was left open")
    log = (guarded.folder / "frontend0.log").read_text()
    assert "Traceback" not in log


def test_pipelined_requests_are_answered_in_their_order(guarded: Cluster) -> None:
    head = b"GET /v1/models/%b HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " + KEY.encode() + b"\r\n%b\r\n"
    data = b"".join(
        head % (name, b"connection: close\r\n" if name == b"c" else b"") for name in (b"m", b"b", b"m", b"c")
    )
    answer = answer_to(guarded, data)
    assert re.findall(rb"HTTP/1.1 (\d+) ", answer) == [b"200", b"404", b"200", b"404"]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[Cluster]:
    """Start a frontend that requires client certificates."""
    cluster = Cluster(
        tmp_path_factory.mktemp("secured"), "--tls-cert-path", certificates.cert, "--tls-key-path", certificates.key,
        "--tls-client-ca-cert-path", certificates.ca,
    )  # fmt: skip
    cluster.http.close()
    cluster.http = https(cluster, certificates, certificates.client_cert, certificates.client_key)
    try:
        wait_until(cluster.is_live, "the frontend never answered")
        yield cluster
    finally:
        cluster.stop()


def https(cluster: Cluster, certificates: Certificates, *client: str, ca: str = "") -> httpx.Client:
    context = ssl.create_default_context(cafile=ca or certificates.ca)
    if client:
        context.load_cert_chain(*client)
    return httpx.Client(base_url=f"https://127.0.0.1:{cluster.port}", verify=context, timeout=DEADLINE_S)


def test_client_with_certificate_is_served(secured: Cluster) -> None:
    assert secured.http.get("/v1/models").json()["data"] == []


def test_tls_rejects_clients_without_a_trusted_certificate(secured: Cluster, certificates: Certificates) -> None:
    for client in ((), (certificates.other_cert, certificates.other_key)):
        with https(secured, certificates, *client) as http, pytest.raises(httpx.TransportError):
            http.get("/v1/models")


def test_server_without_trusted_certificate_is_refused_by_clients(secured: Cluster, certificates: Certificates) -> None:
    mine = (certificates.client_cert, certificates.client_key)
    with https(secured, certificates, *mine, ca=certificates.other_ca) as http, pytest.raises(httpx.ConnectError):
        http.get("/live")


def test_plain_http_on_a_tls_port_gets_no_response(secured: Cluster) -> None:
    assert b"200 OK" not in answer_to(secured, b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
    assert secured.is_live()


def test_renewed_certificate_is_used_without_a_restart(tmp_path: Path) -> None:
    files = Certificates(tmp_path / "certificates")
    cluster = Cluster(tmp_path, "--tls-cert-path", files.cert, "--tls-key-path", files.key)
    cluster.http.close()
    cluster.http = https(cluster, files)
    try:
        wait_until(cluster.is_live, "the frontend never answered")
        renewed = ssl.PEM_cert_to_DER_cert(Path(files.other_cert).read_text())
        shutil.copy(files.other_key, files.key)
        shutil.copy(files.other_cert, files.cert)

        def is_shown() -> bool:
            return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", cluster.port))) == renewed

        wait_until(is_shown, "the old certificate is still shown")
    finally:
        cluster.stop()


def has_exchanged_placements(cluster: Cluster) -> bool:
    """Send a request; return whether all events of its router reach the other one, which may have joined a moment ago."""

    def counts() -> tuple[float, float]:
        names = ("sent", "received")
        sent, received = (cluster.metric(f"dynamo_router_replica_sync_events_{name}_total") for name in names)
        return sent, sent - received

    sent, missing = counts()
    assert cluster.http.post("/v1/chat/completions", json=CHAT).status_code == 200
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        now = counts()
        if now[0] > sent and now[1] <= missing:
            return True
    return False


def test_processes_sharing_a_port_are_all_in_one_scrape(tmp_path: Path) -> None:
    with Cluster(tmp_path, "--http-workers", "2", "--router-mode", "kv") as cluster:
        cluster.mocker("--speedup-ratio", "0", "--max-model-len", "16384")
        wait_until(lambda: len(children(cluster)) == 2, "there never were two processes")
        for _ in range(12):
            with httpx.Client(base_url=cluster.http.base_url, timeout=DEADLINE_S) as fresh:
                wait_until(
                    lambda http=fresh: http.post("/v1/chat/completions", json=CHAT).status_code == 200, "no answer"
                )
        # A scrape lacks a process that the machine has suspended for longer than the other one waits.
        wait_until(
            lambda: cluster.metric("dynamo_frontend_requests_total", status="success") == 12, "requests are not counted"
        )
        wait_until(lambda: has_exchanged_placements(cluster), "the routers do not exchange their placements")
        victim = children(cluster)[0]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len(children(cluster)) == 2 and victim not in children(cluster), "it was not started again")
        before = children(cluster)
        cluster.frontend.terminate()
        assert cluster.frontend.wait(DEADLINE_S) == 0
        wait_until(lambda: not any(is_there(pid) for pid in before), "a process was left behind")


def test_limit_of_a_key_holds_across_processes_that_share_a_port(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[keys]]\nname = "team"\nkey = "{KEY}"\nrequests_per_minute = 30\n')
    with Cluster(tmp_path, "--http-workers", "2", "--api-keys-file", str(keys)) as cluster:
        wait_until(lambda: listeners(cluster.port) == 2, "the processes do not listen")
        headers = {"authorization": f"Bearer {KEY}"}
        began_s = time.monotonic()
        statuses = [  # Each over a connection of its own, which the kernel gives to either process.
            httpx.get(f"http://127.0.0.1:{cluster.port}/v1/models", headers=headers, timeout=DEADLINE_S).status_code
            for _ in range(90)
        ]
        refilled = int((time.monotonic() - began_s) / 2) + 1
        assert set(statuses) == {200, 429}
        assert 30 <= statuses.count(200) <= 30 + refilled
        assert statuses[:30] == [200] * 30


def listeners(port: int) -> int:
    """Return the number of sockets that listen on a port."""
    lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    return sum(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in lines)


def children(cluster: Cluster) -> list[int]:
    listing = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(cluster.frontend.pid)], capture_output=True, text=True, check=False
    )
    return [int(word) for word in listing.stdout.split()]


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_upload_far_over_the_limit_gets_a_readable_error(guarded: Cluster) -> None:
    for upload in (b"a" * (50 << 20), iter([b"a" * (1 << 20)] * 50)):
        answer = httpx.post(
            f"http://127.0.0.1:{guarded.port}/v1/chat/completions",
            content=upload,
            headers={"authorization": f"Bearer {KEY}"},
            timeout=DEADLINE_S,
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")


def test_half_closed_clients_get_their_responses(guarded: Cluster) -> None:
    for is_stream in (False, True):
        for version in ("1.0", "1.1"):
            body = json.dumps({**CHAT, "stream": is_stream})
            head = f"POST /v1/chat/completions HTTP/{version}\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
            with connect(guarded) as client:
                client.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
                client.shutdown(socket.SHUT_WR)
                answer = read_all(client)
            assert b" 200 OK\r\n" in answer
            assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if is_stream else b"}")
