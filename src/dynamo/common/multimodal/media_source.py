"""Media in data URLs and local files."""

import asyncio
import base64
from urllib.parse import unquote, urlparse
from urllib.request import url2pathname

from dynamo.common.http.url_validator import (
    SOURCE_LABEL_LIMIT,
    UrlValidationError,
    UrlValidationPolicy,
    describe_media_source,
    validate_local_path,
)

__all__ = [
    "LOCAL_MEDIA_SCHEMES",
    "SOURCE_LABEL_LIMIT",
    "decode_data_uri",
    "describe_media_source",
    "is_local_media_url",
    "read_local_media_bytes",
]

LOCAL_MEDIA_SCHEMES = frozenset({"file", "data"})
SMALLEST_RATIO = 4
"""Characters for each byte at most: 4 in base64 for 3 bytes, each an escape of 3."""


def is_local_media_url(url: str) -> bool:
    """Return whether a URL needs no request."""
    return urlparse(url).scheme in LOCAL_MEDIA_SCHEMES


def decode_data_uri(url: str, max_bytes: int | None = None) -> bytes:
    """Return the content of a base64 data URL. Raise `UrlValidationError`."""
    head, comma, payload = url.partition(",")
    if not comma or "base64" not in head.split(";"):
        raise UrlValidationError("data URI: expected base64 content" if comma else "data URI: the comma is missing")
    excess = UrlValidationError(f"data URI: the content exceeds the maximum allowed size of {max_bytes} bytes")
    limit = len(url) if max_bytes is None else max_bytes
    if len(payload) // SMALLEST_RATIO > limit:
        raise excess
    try:
        content = base64.b64decode(unquote(payload), validate=True)
    except ValueError as error:
        raise UrlValidationError(f"Malformed base64 in a data URI: {error}") from error
    if len(content) > limit:
        raise excess
    return content


async def read_local_media_bytes(url: str, policy: UrlValidationPolicy) -> bytes:
    """Return the content of a data URL or of a permitted file. Raise `UrlValidationError`."""
    if not is_local_media_url(url):
        raise UrlValidationError(f"Unsupported local media scheme: {describe_media_source(url)}")
    if url.startswith("data:"):
        return decode_data_uri(url)
    file = validate_local_path(url2pathname(urlparse(url).path), policy)
    return await asyncio.to_thread(file.read_bytes)
