"""Options of the endpoint picker."""

import pytest

from dynamo.core.errors import ConfigError
from dynamo.epp.config import read

POOL = {
    "DYN_EPP_MODE": "standalone",
    "DYN_EPP_INFERENCE_POOL_NAME": "pool",
    "POD_NAMESPACE": "space",
    "DYN_MODEL_NAME": "m",
    "DYN_EPP_TOKENIZER_SERVICE_URL": "http://render:8000",
    "DYN_EPP_TOKENIZER_PROTOCOL": "vllm-render",
    "DYN_KV_CACHE_BLOCK_SIZE": "16",
}


def test_epp_defaults_equal_those_of_upstream() -> None:
    options = read([], {})
    assert (options.mode, options.grpc_port, options.grpc_health_port, options.metrics_port) == (
        "dynamo",
        9002,
        9003,
        9090,
    )
    assert options.secure_serving
    assert options.max_inflight_requests == 1024


def test_deprecated_kv_events_variable_applies_unless_the_router_variable_is_set() -> None:
    assert not read([], {"DYN_USE_KV_EVENTS": "false"}).use_kv_events
    assert read([], {"DYN_USE_KV_EVENTS": "false", "DYN_ROUTER_USE_KV_EVENTS": "true"}).use_kv_events


def test_standalone_mode_reads_its_variables() -> None:
    options = read([], POOL)
    assert (options.pool_name, options.block_size, options.kv_event_port) == ("pool", 16, 5557)


@pytest.mark.parametrize("missing", [name for name in POOL if name != "DYN_EPP_MODE"])
def test_standalone_mode_names_a_missing_variable(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"{missing}.*: required by DYN_EPP_MODE=standalone"):
        read([], {name: value for name, value in POOL.items() if name != missing})


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"DYN_EPP_MODE": "full"}, "DYN_EPP_MODE.*full"),
        ({"DYN_EPP_METRICS_PORT": "70000"}, "--metrics-port 70000: must be from 0 to 65535"),
        ({"DYN_EPP_MAX_INFLIGHT_REQUESTS": "0"}, "--max-inflight-requests 0: must be greater than 0"),
        ({"DYN_EPP_GRACEFUL_SHUTDOWN_PROPAGATION_SECS": "-1"}, "must be at least 0"),
        ({"DYN_TLS_CERT_PATH": "a.pem"}, "must be given together"),
        ({"DYN_TLS_CERT_PATH": "a", "DYN_TLS_KEY_PATH": "b", "DYN_SECURE_SERVING": "false"}, "mutually exclusive"),
        ({"DYN_USE_KV_EVENTS": "maybe"}, "DYN_USE_KV_EVENTS"),
        ({**POOL, "DYN_EPP_TOKENIZER_PROTOCOL": "grpc"}, "DYN_EPP_TOKENIZER_PROTOCOL"),
        ({**POOL, "DYN_EPP_TOKENIZER_SERVICE_URL": "render:8000"}, "expected http://host:port"),
        ({**POOL, "DYN_EPP_PEER_SERVICE": "epp"}, "requires --pod-ip"),
    ],
)
def test_invalid_value_is_refused_with_its_name(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read([], variables)
