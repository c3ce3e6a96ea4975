"""Settings of etcd: upstream's names, and errors that name the invalid setting."""

import ssl
from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.runtime.transports.etcd.options import Address, EtcdOptions, etcd_options


def test_etcd_options_defaults_equal_those_of_released_dynamo() -> None:
    assert etcd_options({}) == EtcdOptions(
        addresses=(Address("localhost", 2379, is_tls=False),), lease_ttl_s=30, startup_timeout_s=120.0
    )


def test_etcd_options_have_a_variable_each() -> None:
    options = etcd_options(
        {
            "ETCD_ENDPOINTS": "http://a:1, https://[::1]:2,c:3,https://d",
            "ETCD_AUTH_USERNAME": "u",
            "ETCD_AUTH_PASSWORD": "p",
            "ETCD_AUTH_CA": "ca",
            "ETCD_AUTH_CLIENT_CERT": "cert",
            "ETCD_AUTH_CLIENT_KEY": "key",
            "ETCD_LEASE_TTL": "7",
            "ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS": "1.5",
        }
    )
    assert [str(address) for address in options.addresses] == [
        "http://a:1",
        "https://[::1]:2",
        "http://c:3",
        "https://d:2379",
    ]
    assert (options.username, options.password) == ("u", "p")
    assert (options.ca, options.client_cert, options.client_key) == ("ca", "cert", "key")
    assert (options.lease_ttl_s, options.startup_timeout_s) == (7, 1.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ETCD_ENDPOINTS", "ftp://a:1"),
        ("ETCD_ENDPOINTS", "http://a:port"),
        ("ETCD_ENDPOINTS", "http://a:1/path"),
        ("ETCD_ENDPOINTS", ","),
        ("ETCD_ENDPOINTS", "http://[::1:2379"),
        ("ETCD_LEASE_TTL", "soon"),
        ("ETCD_LEASE_TTL", "0"),
        ("ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS", "0"),
        ("ETCD_AUTH_USERNAME", "alone"),
        ("ETCD_AUTH_PASSWORD", "alone"),
        ("ETCD_AUTH_CLIENT_CERT", "alone"),
        ("ETCD_AUTH_CLIENT_KEY", "alone"),
    ],
)
def test_etcd_options_error_names_a_wrong_setting(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        etcd_options({name: value})


def test_etcd_options_without_https_endpoint_have_no_tls() -> None:
    assert etcd_options({"ETCD_AUTH_CA": "no such file"}).tls() is None


def test_etcd_options_with_https_endpoint_verify_the_server() -> None:
    context = etcd_options({"ETCD_ENDPOINTS": "https://a"}).tls()
    assert context is not None
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname


def test_etcd_options_error_names_an_unreadable_file_and_its_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ETCD_AUTH_CA='nowhere': No such file"):
        etcd_options({"ETCD_ENDPOINTS": "https://a", "ETCD_AUTH_CA": "nowhere"}).tls()
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    papers = {"ETCD_AUTH_CLIENT_CERT": str(junk), "ETCD_AUTH_CLIENT_KEY": str(junk)}
    with pytest.raises(ConfigError, match="ETCD_AUTH_CLIENT_CERT"):
        etcd_options({"ETCD_ENDPOINTS": "https://a", **papers}).tls()
