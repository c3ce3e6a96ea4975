"""The metrics port limits the number of its connections and the idle time of each."""

import socket
import urllib.request

from dynamo.core.http_server import ServerLimits
from dynamo.core.metrics import MetricsRegistry
from dynamo.kvbm.metrics import MetricsServer

PATIENCE_S = 20.0


def scrape(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
        return int(answer.status)


def test_metrics_port_closes_connections_beyond_its_bound() -> None:
    server = MetricsServer(MetricsRegistry(), 0, ServerLimits(connections=1))
    silent = socket.create_connection(("127.0.0.1", server.port), PATIENCE_S)
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as refused:
        assert refused.recv(1 << 16).startswith(b"HTTP/1.1 503")
        assert refused.recv(1) == b""
    silent.close()
    server.close()


def test_metrics_port_closes_a_silent_connection() -> None:
    server = MetricsServer(MetricsRegistry(), 0, ServerLimits(idle_s=1.0))
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as silent:
        assert silent.recv(1) == b""
    assert scrape(server.port) == 200
    server.close()
