"""The metrics port bounds its connections and the silence of each."""

import socket
import urllib.request

import pytest

from dynamo.core.metrics import MetricsRegistry
from dynamo.kvbm import metrics
from dynamo.kvbm.metrics import MetricsServer

PATIENCE_S = 20.0


def scrape(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
        return int(answer.status)


def test_metrics_port_closes_connections_beyond_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "SCRAPERS_MAX", 1)
    server = MetricsServer(MetricsRegistry(), 0)
    silent = socket.create_connection(("127.0.0.1", server.port), PATIENCE_S)
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as refused:
        assert refused.recv(1) == b""
    silent.close()
    server.close()


def test_metrics_port_closes_a_silent_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "SILENCE_S", 0.05)
    server = MetricsServer(MetricsRegistry(), 0)
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as silent:
        assert silent.recv(1) == b""
    assert scrape(server.port) == 200
    server.close()
