"""Fetches of media, with a client in memory."""

import asyncio
import errno
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dynamo.common import http
from dynamo.common.http import aiohttp_client
from dynamo.common.http._ssrf_resolver import BlocklistResolver, SsrfBlockedAddress
from dynamo.common.http.aiohttp_client import AiohttpClient
from dynamo.common.http.base import collect_capped
from dynamo.common.http.media_reference import local_media_reference
from dynamo.common.http.url_validator import UrlValidationError, UrlValidationPolicy, is_blocked_ip, validate_local_path

OPEN = UrlValidationPolicy(allow_http=True, allow_private_ips=True)


class Client(http.HttpClient):
    """Client of a fixed site: URL to body, or to the URL of a redirect."""

    def __init__(self, site: dict[str, bytes | str]) -> None:
        super().__init__()
        self.site = site

    async def _fetch_simple(self, url: str, *_: Any, **limits: Any) -> bytes:
        return b"simple"

    async def _fetch_body_or_redirect(self, url: str, *_: Any, **limits: Any) -> tuple[bytes | None, str | None]:
        found = self.site[url]
        return (found, None) if isinstance(found, bytes) else (None, found)

    async def close(self) -> None: ...


async def test_redirects_are_followed_up_to_a_limit() -> None:
    site: dict[str, bytes | str] = {"http://a/1": "http://a/2", "http://a/2": b"body", "http://a/loop": "http://a/loop"}
    assert await Client(site).fetch_bytes("http://a/1", 1.0, policy=OPEN) == b"body"
    with pytest.raises(UrlValidationError, match="Too many redirects"):
        await Client(site).fetch_bytes("http://a/loop", 1.0, policy=OPEN)
    assert await Client(site).fetch_bytes("http://a/1", 1.0) == b"simple"


async def test_redirect_to_an_internal_address_is_refused() -> None:
    client = Client({"https://8.8.8.8/": "https://169.254.169.254/"})
    with pytest.raises(UrlValidationError, match="blocked range"):
        await client.fetch_bytes("https://8.8.8.8/", 1.0, policy=UrlValidationPolicy())


async def test_body_beyond_its_limit_is_not_collected() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"12"

    assert await collect_capped(chunks(), "u", 6) == b"121212"
    with pytest.raises(UrlValidationError, match="download limit of 5 bytes"):
        await collect_capped(chunks(), "u", 5)


def test_status_error_is_bounded_and_keeps_its_status() -> None:
    error = http.HttpStatusError(404, "m" * 100_000, "https://h/" + "u" * 100_000)
    assert (error.status, len(str(error)) < 10_000) == (404, True)


@pytest.mark.parametrize(
    ("address", "is_blocked"),
    [("8.8.8.8", False), ("10.0.0.1", True), ("::1", True), ("::ffff:8.8.8.8", True), ("example.com", False)],
)
def test_internal_and_metadata_addresses_are_blocked(address: str, is_blocked: bool) -> None:
    assert is_blocked_ip(address) is is_blocked


def resolver(*addresses: str) -> BlocklistResolver:
    class System:
        async def resolve(self, host: str, port: int, family: int) -> list[dict[str, Any]]:
            return [{"host": address} for address in addresses]

    made = object.__new__(BlocklistResolver)  # Its own resolver is aiohttp's.
    made._allow_private_ips, made._inner = False, System()
    return made


async def test_connections_are_made_to_permitted_addresses_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    assert await resolver("8.8.8.8", "10.0.0.1").resolve("a") == [{"host": "8.8.8.8"}]
    with pytest.raises(SsrfBlockedAddress) as failure:
        await resolver("10.0.0.1").resolve("a")
    assert failure.value.errno == errno.EHOSTUNREACH


async def test_fetch_by_a_proxy_must_be_permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiohttp_client, "getproxies", lambda: {"https": "http://proxy"})
    monkeypatch.setattr(aiohttp_client, "proxy_bypass", lambda host: host == "direct")
    await AiohttpClient._require_trusted_egress_proxy("https://direct/x")
    with pytest.raises(http.HttpConfigurationError, match="DYN_MM_TRUST_EGRESS_PROXY"):
        await AiohttpClient._require_trusted_egress_proxy("https://other/x")
    monkeypatch.setenv("DYN_MM_TRUST_EGRESS_PROXY", "1")
    await AiohttpClient._require_trusted_egress_proxy("https://other/x")


async def test_remote_reference_becomes_a_temporary_file(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch(url: str, *_: Any, **limits: Any) -> bytes:
        return b"png"

    monkeypatch.setattr(http, "fetch_bytes", fetch)
    async with local_media_reference("http://a/b.png", OPEN) as path:
        assert (await asyncio.to_thread(Path(path).read_bytes), Path(path).suffix) == (b"png", ".png")
    with pytest.raises(UrlValidationError, match="local file"):
        async with local_media_reference("data:image/png;base64,AA==", OPEN):
            pass


def test_file_outside_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out.png").touch()
    (tmp_path / "in" / "a.png").touch()
    policy = UrlValidationPolicy(allowed_local_path=str(tmp_path / "in"))
    assert validate_local_path(str(tmp_path / "in" / "a.png"), policy).name == "a.png"
    for path in (tmp_path / "out.png", tmp_path / "in" / ".." / "out.png", tmp_path / "in" / "absent"):
        with pytest.raises(UrlValidationError):
            validate_local_path(str(path), policy)
