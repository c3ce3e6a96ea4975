"""Allowed sources of media, and their size limits."""

import base64
import binascii
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.text.multimodal.source import (
    MIB,
    FetchLimits,
    check_address,
    check_base64,
    check_type,
    decode_data_url,
    is_public,
    local_of,
    remote_of,
)

LIMITS, OPEN = FetchLimits(), FetchLimits(allows_internal=True)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://example.com/a.png?b#c", (True, "example.com", 443, "/a.png?b", "example.com")),
        ("HTTPS://Example.com", (True, "example.com", 443, "/", "example.com")),
        ("https://example.com:8443//x", (True, "example.com", 8443, "/x", "example.com:8443")),
        ("https://[2001:db8::1]/x", (True, "2001:db8::1", 443, "/x", "[2001:db8::1]")),
    ],
)
def test_media_source_splits_a_url_into_host_and_path(url: str, expected: Any) -> None:
    remote = remote_of(url, LIMITS)
    assert (remote.is_tls, remote.host, remote.port, remote.target, remote.authority) == expected


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://example.com/", "only https"),
        ("ftp://example.com/", "scheme 'ftp'"),
        ("gopher://example.com/", "scheme"),
        ("https:///x", "no host"),
        ("https://user:word@example.com/", "user name"),
        ("https://example.com:99999/", "not a URL"),
        ("https://[::1/", "not a URL"),
        ("https://[fe80::1%25eth0]/", "no host"),
        ("https://a\\b/", "no host"),
        ("https://exa mple.com/", "not allowed in a URL"),
        ("https://example.com/\r\nhost: x", "not allowed in a URL"),
        ("https://exämple.com/", "not allowed in a URL"),
        ("https://example.com/" + "x" * 9000, "characters"),
    ],
)
def test_media_source_reports_unsupported_schemes(url: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        remote_of(url, LIMITS)


def test_media_source_fetches_http_where_internal_hosts_are_allowed() -> None:
    assert remote_of("http://localhost:8000/x", OPEN).authority == "localhost:8000"


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1", "64:ff9b::5db8:d822"])
def test_media_source_accepts_public_addresses(address: str) -> None:
    check_address(address, LIMITS)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.1.1", "100.64.0.1",
        "192.0.0.170", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "::", "::1", "fe80::1", "fc00::1",
        "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::1", "64:ff9b::7f00:1", "64:ff9b::a00:1",
        "2001:db8::1", "fec0::1", "feff::1", "192.88.99.1", "161.26.0.10", "166.8.0.58", "199.36.153.8", "::127.0.0.1", "not an address", "fe80::1%lo",
    ],
)  # fmt: skip
def test_media_source_refuses_private_addresses(address: str) -> None:
    with pytest.raises(InvalidArgument, match="not public"):
        check_address(address, LIMITS)
    check_address(address, OPEN)


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "fd00:ec2::254", "fd20:ce::254", "168.63.129.16",
        "::ffff:168.63.129.16", "2002:a83f:8110::1", "64:ff9b::a83f:8110", "100.100.100.200", "169.254.170.2",
        "fd00:ec2::23",
    ],
)  # fmt: skip
def test_media_source_never_accepts_cloud_metadata_services(address: str) -> None:
    for limits in (LIMITS, OPEN):
        with pytest.raises(InvalidArgument, match="metadata service"):
            check_address(address, limits)
    assert not is_public(address)


@settings(max_examples=40, deadline=None)
@given(st.ip_addresses(v=4))
def test_media_source_checks_embedded_addresses(address: Any) -> None:
    for wrapped in (f"::ffff:{address}", f"64:ff9b::{int(address) >> 16:x}:{int(address) & 0xFFFF:x}"):
        assert is_public(wrapped) == is_public(str(address))


@given(st.binary(max_size=200), st.sampled_from(["image/png", "IMAGE/PNG; x=y", ""]))
def test_media_source_reads_data_urls(data: bytes, kind: str) -> None:
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    media = decode_data_url(url, LIMITS, ("image/",))
    assert (media.data, media.content_type) == (data, "image/png" if kind else "")


def test_media_source_reads_percent_encoded_data_urls() -> None:
    assert decode_data_url("data:image/svg+xml,%3Csvg/%3E", LIMITS, ("image/",)).data == b"<svg/>"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,AAA", "not base64"),
        ("data:image/png;base64,AA=A", "not base64"),
        ("data:image/png;base64,A===", "not base64"),
        ("data:image/png;base64,AAA!", "not base64"),
        ("data:image/png;base64,ÄÄÄÄ", "not base64"),
        ("data:text/html;base64,AAAA", "'text/html': expected image/"),
        ("data:image/png;base64," + "A" * 1000, "at most 1000"),
    ],
)
def test_media_source_reports_invalid_data_urls(url: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        decode_data_url(url, FetchLimits(data_url_bytes_max=1000), ("image/",))


@given(st.text(alphabet="AB+/=!", max_size=12))
def test_media_source_base64_check_agrees_with_decoding(text: str) -> None:
    def accepts(read: Callable[[], object]) -> bool:
        try:
            read()
        except (InvalidArgument, binascii.Error):
            return False
        return True

    strictly = accepts(lambda: binascii.a2b_base64(text, strict_mode=True))
    is_padded_right = len(text) % 4 == 0 and not text.endswith("===")  # Python 3.11 reads AAAA= and AAAA==== as well.
    assert accepts(lambda: check_base64(text)) == (strictly and is_padded_right)


def test_media_source_reads_files_from_the_configured_directory_only(tmp_path: Path) -> None:
    limits = FetchLimits(local_path=str(tmp_path / "media"))
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "a b.png").write_bytes(b"x")
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "media" / "link").symlink_to(tmp_path / "secret")
    folder = f"file://{tmp_path}/media"
    assert local_of(f"{folder}/a%20b.png", limits) == str(tmp_path / "media" / "a b.png")
    for path in ("/../secret", "/link", "", "/%2e%2e/secret", "/../media2"):
        with pytest.raises(InvalidArgument, match="not below"):
            local_of(folder + path, limits)
    with pytest.raises(InvalidArgument, match="DYN_MM_LOCAL_PATH"):
        local_of(f"{folder}/a", LIMITS)


def test_media_source_accepts_bytes_of_unknown_type_for_every_kind() -> None:
    for content_type in ("image/png", "", "application/octet-stream"):
        check_type(content_type, ("image/",))
    check_type("text/html", ())
    with pytest.raises(InvalidArgument, match="expected image/"):
        check_type("text/html", ("image/",))


def test_media_source_limits_are_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FetchLimits.from_environment() == LIMITS
    for name, value in (
        ("DYN_MM_MAX_FILE_SIZE_MB", "2"),
        ("DYN_MM_MAX_DATA_URL_MB", "3"),
        ("DYN_MM_ALLOW_INTERNAL", "1"),
        ("DYN_HTTP_TIMEOUT", "4.5"),
    ):
        monkeypatch.setenv(name, value)
    limits = FetchLimits.from_environment()
    assert (limits.file_bytes_max, limits.data_url_bytes_max) == (2 * MIB, 3 * MIB)
    assert (limits.allows_internal, limits.timeout_s) == (True, 4.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [("DYN_MM_MAX_FILE_SIZE_MB", "0"), ("DYN_HTTP_TIMEOUT", "-1"), ("DYN_MM_TRUST_EGRESS_PROXY", "1")],
)
def test_media_source_reports_an_invalid_limit(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        FetchLimits.from_environment()
