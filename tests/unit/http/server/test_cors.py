"""Which web pages may call."""

import pytest

from dynamo.core.errors import ConfigError
from dynamo.http.server.cors import Cors


def test_cors_allows_only_configured_origins() -> None:
    cors = Cors.of(["https://a.example", "http://localhost:3000"])
    assert cors is not None
    assert dict(cors.headers(b"https://A.example"))[b"access-control-allow-origin"] == b"https://A.example"
    assert cors.headers(b"https://b.example") == [(b"vary", b"origin")]
    assert cors.headers(None) == [(b"vary", b"origin")]
    assert b"access-control-allow-methods" not in dict(cors.preflight(b"https://b.example", None))


def test_cors_wildcard_allows_every_origin() -> None:
    cors = Cors.of(["*"])
    assert cors is not None
    assert dict(cors.headers(b"https://b.example"))[b"access-control-allow-origin"] == b"*"


def test_cors_preflight_allows_the_requested_headers() -> None:
    cors = Cors.of(["*"])
    assert cors is not None
    output = dict(cors.preflight(b"https://b.example", b"x-api-key, content-type"))
    assert output[b"access-control-allow-headers"] == b"x-api-key, content-type"
    assert b"POST" in output[b"access-control-allow-methods"]


def test_cors_is_disabled_without_origins() -> None:
    assert Cors.of([]) is None


@pytest.mark.parametrize("origin", ["a.example", "https://", "https://a.example/path", "https://ä.example", "null"])
def test_invalid_cors_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="--cors-origins"):
        Cors.of([origin])
