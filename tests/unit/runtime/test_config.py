"""Runtime options: names, defaults and rules."""

import pytest

from dynamo.core.config import load
from dynamo.core.errors import ConfigError
from dynamo.runtime.config import (
    RuntimeOptions,
    default_discovery,
    device_type,
    inhibited_duration_s,
    request_plane_codec,
    tcp_options,
)


def test_runtime_config_defaults_require_no_infrastructure() -> None:
    assert load(RuntimeOptions, [], {}) == RuntimeOptions(
        discovery_backend="file", request_plane="tcp", event_plane="zmq"
    )


POD = {"KUBERNETES_SERVICE_HOST": "h", "DYN_PARENT_DGD_K8S_NAME": "g", "POD_NAME": "p", "POD_UID": "u"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (POD, "kubernetes"),
        ({**POD, "ETCD_ENDPOINTS": "http://e:2379"}, "etcd"),
        ({**POD, "DYN_PARENT_DGD_K8S_NAME": ""}, "file"),
    ],
)
def test_discovery_backend_is_read_from_the_environment(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert default_discovery() == expected


def test_runtime_config_prefers_flag_over_variable_over_default() -> None:
    variables = {"DYN_DISCOVERY_BACKEND": "mem"}
    assert load(RuntimeOptions, [], variables).discovery_backend == "mem"
    assert load(RuntimeOptions, ["--discovery-backend", "file"], variables).discovery_backend == "file"


def test_runtime_config_refuses_an_unsupported_discovery_backend() -> None:
    with pytest.raises(ConfigError, match="DYN_DISCOVERY_BACKEND"):
        load(RuntimeOptions, [], {"DYN_DISCOVERY_BACKEND": "consul"})
    with pytest.raises(ConfigError, match="--request-plane"):
        load(RuntimeOptions, ["--request-plane", "quic"], {})


def test_tcp_options_have_upstream_defaults_and_variables() -> None:
    options = tcp_options({})
    limits = options.limits
    assert (limits.message_bytes_max, limits.request_timeout_s, limits.connect_timeout_s) == (32 << 20, 10.0, 3.0)
    assert (options.host, options.port, options.answer_host, options.answer_port) == ("", 0, "", 0)
    options = tcp_options(
        {
            "DYN_TCP_RPC_HOST": "h",
            "DYN_TCP_RPC_PORT": "7000",
            "DYN_TCP_RESPONSE_STREAM_HOST": "r",
            "DYN_TCP_RESPONSE_STREAM_PORT": "7001",
            "DYN_TCP_MAX_MESSAGE_SIZE": "1000",
            "DYN_TCP_REQUEST_TIMEOUT": "2.5",
            "DYN_TCP_CONNECT_TIMEOUT": "1",
            "DYN_TCP_LISTEN_BACKLOG": "9",
        }
    )
    assert (options.host, options.port, options.answer_host, options.answer_port) == ("h", 7000, "r", 7001)
    assert (options.limits.message_bytes_max, options.limits.request_timeout_s, options.backlog) == (1000, 2.5, 9)


@pytest.mark.parametrize(
    ("name", "value"),
    [("DYN_TCP_RPC_PORT", "70000"), ("DYN_TCP_RESPONSE_STREAM_PORT", "-1"), ("DYN_TCP_REQUEST_TIMEOUT", "soon")],
)
def test_tcp_options_error_names_an_invalid_variable(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        tcp_options({name: value})


def test_request_plane_codec_and_inhibited_duration_are_read_from_variables() -> None:
    assert request_plane_codec({}) == "msgpack"
    assert request_plane_codec({"DYN_REQUEST_PLANE_CODEC": "json"}) == "json"
    with pytest.raises(ConfigError, match="DYN_REQUEST_PLANE_CODEC"):
        request_plane_codec({"DYN_REQUEST_PLANE_CODEC": "xml"})
    assert inhibited_duration_s({}) == 5.0
    assert inhibited_duration_s({"DYN_RUNTIME_INHIBITED_DURATION_SECS": "0"}) == 0.0


def test_discovery_defaults_to_etcd_when_etcd_endpoints_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ETCD_ENDPOINTS", raising=False)
    assert load(RuntimeOptions, [], {}).discovery_backend == "file"
    monkeypatch.setenv("ETCD_ENDPOINTS", "http://etcd:2379")
    assert load(RuntimeOptions, [], {}).discovery_backend == "etcd"
    assert load(RuntimeOptions, [], {"DYN_DISCOVERY_BACKEND": "mem"}).discovery_backend == "mem"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "cuda"),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "NVIDIA_VISIBLE_DEVICES": "all"}, "cuda"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "cpu"),
        ({"CUDA_VISIBLE_DEVICES": " -1 "}, "cpu"),
        ({"CUDA_VISIBLE_DEVICES": "None"}, "cpu"),
        ({"NVIDIA_VISIBLE_DEVICES": ""}, "cuda"),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, "cpu"),
    ],
)
def test_device_type_is_cpu_only_where_a_variable_hides_the_gpus(variables: dict[str, str], expected: str) -> None:
    assert device_type(variables) == expected
