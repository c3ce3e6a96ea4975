"""Facts about ports, frontends and clocks, from real sockets."""

import socket
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from benchmarks.ports import free_port

from dynamo.ops.doctor.network import clock_of, cluster_facts, etcd_facts, frontend_facts, nats_facts, port_facts

pytestmark = pytest.mark.integration


def test_taken_port_names_this_process_and_a_free_one_has_no_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        facts = port_facts("DYN_HTTP_PORT", "127.0.0.1", port, is_needed=True)
    assert facts.is_in_use
    assert "pid" in facts.owner
    assert port_facts("DYN_HTTP_PORT", "127.0.0.1", free_port(), is_needed=True).error == ""
    assert "assign" in port_facts("DYN_HTTP_PORT", "192.0.2.1", 1234, is_needed=True).error


def test_server_of_another_kind_is_no_frontend() -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"[]")

        def log_message(self, *words: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Other)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        assert frontend_facts("127.0.0.1", server.server_port, {}) == (None, None)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_clock_of_a_response_is_compared_with_this_one() -> None:
    now = time.time()
    assert clock_of("x", {}, now, now) is None
    facts = clock_of("x", {"date": "Thu, 01 Jan 1970 00:01:40 GMT"}, 40.0, 40.2)
    assert facts is not None
    assert facts.skew_s == pytest.approx(60.4)
    assert facts.error_s == pytest.approx(0.6)


async def test_servers_that_are_down_have_their_error() -> None:
    port = free_port()
    (etcd,), clocks = await etcd_facts({"ETCD_ENDPOINTS": f"http://127.0.0.1:{port}"}, is_required=True)
    assert "no connection" in etcd.error
    assert clocks == []
    (wrong,), _ = await etcd_facts({"ETCD_ENDPOINTS": "ftp://x"}, is_required=True)
    assert "must be http://host:port" in wrong.error
    nats = await nats_facts({"NATS_SERVER": f"nats://u:p@127.0.0.1:{port}"}, is_required=True)
    assert "no NATS server" in nats.error
    assert nats.address == f"nats://127.0.0.1:{port}"


async def test_kubernetes_that_is_not_configured_is_no_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/nonexistent")
    assert await cluster_facts({}, is_required=False) is None
