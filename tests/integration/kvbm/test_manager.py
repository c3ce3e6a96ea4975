"""The metrics server of the block manager."""

import urllib.request

import pytest
from tests.unit.kvbm.test_manager import PATIENCE_S

from dynamo.core.errors import ConfigError
from dynamo.core.metrics import MetricsRegistry
from dynamo.kvbm.metrics import MetricsServer


def test_block_manager_metrics_have_their_own_port() -> None:
    registry = MetricsRegistry()
    registry.counter("kvbm_matched_tokens", "what").labels().inc(3)
    server = MetricsServer(registry, 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=PATIENCE_S) as answer:
            assert b"kvbm_matched_tokens 3" in answer.read()
        with pytest.raises(ConfigError, match="DYN_KVBM_METRICS_PORT"):
            MetricsServer(registry, server.port)
    finally:
        server.close()
