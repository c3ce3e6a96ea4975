"""Local files for media references, for generators that open files only."""

import asyncio
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from dynamo.common import http
from dynamo.common.http.url_validator import (
    MIB,
    UrlValidationError,
    UrlValidationPolicy,
    describe_media_source,
    validate_media_reference,
)
from dynamo.common.utils.media_decoder import positive_int

DYN_MM_MAX_FILE_SIZE_MB = "DYN_MM_MAX_FILE_SIZE_MB"
DEFAULT_MAX_MEDIA_MB = 64
MAX_MEDIA_BYTES = DEFAULT_MAX_MEDIA_MB * MIB
FROM_ENVIRONMENT = -1


def max_media_bytes() -> int:
    """Return the maximum size of a downloaded file."""
    return MIB * positive_int(DYN_MM_MAX_FILE_SIZE_MB, DEFAULT_MAX_MEDIA_MB)


@asynccontextmanager
async def local_media_reference(
    reference: str,
    policy: UrlValidationPolicy,
    *,
    timeout: float = 30.0,  # noqa: ASYNC109 -- part of the interface
    max_bytes: int | None = FROM_ENVIRONMENT,
) -> AsyncIterator[str]:
    """Yield the path of a permitted local file, or of a temporary copy of a URL. Raise `UrlValidationError`."""
    place = await validate_media_reference(reference, policy)
    scheme = urlsplit(place).scheme
    if scheme == "data":
        raise UrlValidationError(f"{describe_media_source(place)} cannot be resolved to a local file")
    if scheme not in ("http", "https"):
        yield place
        return
    limit = max_media_bytes() if max_bytes == FROM_ENVIRONMENT else max_bytes
    content = await http.fetch_bytes(place, timeout, policy=policy, max_bytes=limit)
    # Decoders choose by the suffix; one that is no usual suffix is dropped.
    suffix = re.search("[.][0-9A-Za-z]{1,15}$", urlsplit(place).path)
    with tempfile.TemporaryDirectory(prefix="dynamo-media-") as directory:
        file = Path(directory, f"media{suffix[0] if suffix else ''}")
        await asyncio.to_thread(file.write_bytes, content)
        yield str(file)
