"""The TLS settings of the request plane: which of them belong together."""

import ssl
from pathlib import Path

import pytest
from tests.certificates import Certificates

from dynamo.core.config import load
from dynamo.core.errors import ConfigError
from dynamo.runtime.config import RuntimeOptions, tcp_options, tcp_tls_files
from dynamo.runtime.request_plane.tcp.tls import TcpTls, TcpTlsFiles


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def test_tcp_tls_is_off_without_settings() -> None:
    tls = tcp_options({}).tls
    assert tls == TcpTls()
    assert not tls.is_half


def test_tcp_tls_every_setting_has_a_variable_and_a_flag() -> None:
    names = {
        "--tcp-tls-cert-path": "DYN_TCP_TLS_CERT_PATH",
        "--tcp-tls-key-path": "DYN_TCP_TLS_KEY_PATH",
        "--tcp-tls-ca-cert-path": "DYN_TCP_TLS_CA_CERT_PATH",
        "--tcp-tls-client-cert-path": "DYN_TCP_TLS_CLIENT_CERT_PATH",
        "--tcp-tls-client-key-path": "DYN_TCP_TLS_CLIENT_KEY_PATH",
        "--tcp-tls-client-ca-cert-path": "DYN_TCP_TLS_CLIENT_CA_CERT_PATH",
        "--tcp-tls-server-name": "DYN_TCP_TLS_SERVER_NAME",
        "--tcp-tls-handshake-timeout": "DYN_TCP_TLS_HANDSHAKE_TIMEOUT_SECS",
    }
    values = {flag: str(number) for number, flag in enumerate(names)}
    by_flag = load(RuntimeOptions, [*(f"{flag}={value}" for flag, value in values.items()), "--tcp-tls-insecure"], {})
    variables = {names[flag]: value for flag, value in values.items()}
    variables["DYN_TCP_TLS_INSECURE"] = "1"
    assert tcp_tls_files(options=by_flag) == tcp_tls_files(variables)
    assert tcp_tls_files(variables) == TcpTlsFiles(
        cert_path="0",
        key_path="1",
        ca_cert_path="2",
        client_cert_path="3",
        client_key_path="4",
        client_ca_cert_path="5",
        is_insecure=True,
        server_name="6",
        handshake_timeout_s=7.0,
    )


def test_tcp_tls_flag_takes_precedence_over_its_variable(tmp_path: Path) -> None:
    options = load(RuntimeOptions, ["--tcp-tls-cert-path", "mine.pem"], {"DYN_TCP_TLS_CERT_PATH": "theirs.pem"})
    assert tcp_tls_files({"DYN_TCP_TLS_CERT_PATH": "theirs.pem"}, options).cert_path == "mine.pem"


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"cert_path"}, "--tcp-tls-cert-path .* requires --tcp-tls-key-path"),
        ({"key_path"}, "--tcp-tls-key-path .* requires --tcp-tls-cert-path"),
        ({"ca_cert_path", "client_cert_path"}, "--tcp-tls-client-cert-path .* requires --tcp-tls-client-key-path"),
        ({"ca_cert_path", "client_key_path"}, "--tcp-tls-client-key-path .* requires --tcp-tls-client-cert-path"),
        ({"client_cert_path", "client_key_path"}, "--tcp-tls-client-cert-path .*: requires --tcp-tls-ca-cert-path"),
        ({"client_ca_cert_path"}, "--tcp-tls-client-ca-cert-path .*: requires --tcp-tls-cert-path"),
    ],
)
def test_tcp_tls_refuses_incomplete_settings(given: set[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        TcpTls.load(TcpTlsFiles(**dict.fromkeys(given, "some.pem")))


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_tcp_tls_refuses_a_zero_handshake_timeout(seconds: str) -> None:
    with pytest.raises(ConfigError, match="--tcp-tls-handshake-timeout"):
        tcp_options({"DYN_TCP_TLS_HANDSHAKE_TIMEOUT_SECS": seconds})


def test_tcp_tls_error_names_a_missing_file() -> None:
    with pytest.raises(ConfigError, match=r"--tcp-tls-ca-cert-path nowhere\.pem: No such file"):
        tcp_options({"DYN_TCP_TLS_CA_CERT_PATH": "nowhere.pem"})


def test_tcp_tls_can_be_enabled_for_one_role(certificates: Certificates) -> None:
    """A worker whose callers are ours dials no caller, and such a caller accepts no connection."""
    server = TcpTls.load(TcpTlsFiles(cert_path=certificates.cert, key_path=certificates.key))
    assert server.server is not None and server.client is None and server.is_half
    client = TcpTls.load(TcpTlsFiles(ca_cert_path=certificates.ca))
    assert client.server is None and client.client is not None and client.is_half
    assert client.client.verify_mode is ssl.CERT_REQUIRED


def test_tcp_tls_insecure_flag_is_enough_for_a_client() -> None:
    client = TcpTls.load(TcpTlsFiles(is_insecure=True)).client
    assert client is not None and client.verify_mode is ssl.CERT_NONE
