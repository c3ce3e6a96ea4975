"""Validation of media references: schemes, hosts, addresses and local paths, against requests to internal services.

The rules for addresses are those of `text.multimodal.source`, by which frontends fetch media.
"""

import asyncio
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from dynamo.common.utils.media_decoder import positive_int
from dynamo.core.config import environ
from dynamo.text.multimodal.source import is_public

DYN_MM_MAX_DATA_URL_MB: Final = "DYN_MM_MAX_DATA_URL_MB"
DEFAULT_MAX_DATA_URL_MB: Final = 16
SOURCE_LABEL_LIMIT: Final = 120
MIB = 1 << 20
INTERNAL_HOSTS = ("localhost", "localhost.*", "ip6-*", "metadata", "metadata.goog*", "kubernetes.default*")
"""Patterns of names that lead to services of this host, its cloud or its cluster."""
SIZE_REMEDY = f"To raise the limit, set {DYN_MM_MAX_DATA_URL_MB} (in megabytes) on both the frontend and the workers."


class UrlValidationError(ValueError):
    """A media reference that is not permitted."""


@dataclass(frozen=True)
class UrlValidationPolicy:
    """What media references may name."""

    allow_http: bool = False
    allow_private_ips: bool = False
    allowed_local_path: str | None = None

    @classmethod
    def from_env(cls) -> "UrlValidationPolicy":
        """Return the policy of `DYN_MM_ALLOW_INTERNAL` and `DYN_MM_LOCAL_PATH`."""
        is_internal = environ().get("DYN_MM_ALLOW_INTERNAL") == "1"
        directory = environ().get("DYN_MM_LOCAL_PATH", "").strip()
        return cls(allow_http=is_internal, allow_private_ips=is_internal, allowed_local_path=directory or None)


def max_data_url_bytes() -> int:
    """Return the maximum length of a data URL in bytes."""
    return MIB * positive_int(DYN_MM_MAX_DATA_URL_MB, DEFAULT_MAX_DATA_URL_MB)


def describe_media_source(source: str, limit: int = SOURCE_LABEL_LIMIT) -> str:
    """Return a reference for messages, shortened, without the content of a data URL."""
    if not isinstance(source, str):
        return "<non-string media source>"  # type: ignore[unreachable]
    is_data = source.startswith("data:")
    shown = re.split("[;,]", source, maxsplit=1)[0] if is_data else source
    length = f"{len(source)} chars"
    notes = [" (" + length + ", payload elided)"] if is_data else [f"... ({length})"] * (len(shown) > limit)
    return shown[:limit] + "".join(notes)


def describe_error_detail(detail: str, limit: int = SOURCE_LABEL_LIMIT) -> str:
    """Return an error text, whose middle is removed if it exceeds `limit`."""
    if not isinstance(detail, str):
        return f"<{type(detail).__name__}>"  # type: ignore[unreachable]
    removed = f" [{len(detail)} chars] "
    end = max(0, limit - len(removed)) // 2
    return detail if len(detail) <= limit else detail[:end] + removed + detail[-end:]


def is_blocked_ip(ip_text: str) -> bool:
    """Return whether an address is not one of the public internet. Text that is no address is not blocked."""
    with suppress(ValueError):
        address = ip_address(ip_text)
        return getattr(address, "ipv4_mapped", None) is not None or not is_public(ip_text)
    return False


async def validate_url(url: str, policy: UrlValidationPolicy) -> str:
    """Return a data or HTTP URL that is permitted. Raise `UrlValidationError`."""
    parts = _split(url)
    if parts.scheme == "data":
        _check_size(url)
        return url
    host = _permitted_host(parts, policy)
    if not policy.allow_private_ips:
        await _check_host(host)
    return url


def _split(url: str) -> SplitResult:
    if not url:
        raise UrlValidationError("URL is empty")
    try:
        return urlsplit(url)
    except ValueError:
        raise UrlValidationError(f"not a URL: {describe_media_source(url)}") from None


def _check_size(url: str) -> None:
    """Raise `UrlValidationError` for a data URL that is too long in UTF-8."""
    size, limit = len(url.encode("utf-8", "surrogatepass")), max_data_url_bytes()
    if size > limit:
        raise UrlValidationError(f"data URL of {size} bytes exceeds the {limit}-byte limit. {SIZE_REMEDY}")


def _permitted_host(parts: SplitResult, policy: UrlValidationPolicy) -> str:
    """Return the host of an HTTP URL. Raise `UrlValidationError` for another scheme."""
    if parts.scheme not in ("http", "https"):
        raise UrlValidationError(f"scheme '{describe_media_source(parts.scheme)}' is not allowed: expected https")
    if parts.scheme == "http" and not policy.allow_http:
        raise UrlValidationError("scheme 'http' is not allowed: expected https (DYN_MM_ALLOW_INTERNAL=1 allows http)")
    if not parts.hostname:
        raise UrlValidationError(f"no host in {describe_media_source(parts.geturl())}")
    return parts.hostname


async def _check_host(host: str) -> None:
    """Raise `UrlValidationError` if a host is internal, by its name or one of its addresses."""
    label = describe_media_source(host)
    if any(fnmatchcase(host, pattern) for pattern in INTERNAL_HOSTS):
        raise UrlValidationError(f"host {label} is blocked: an internal service")
    if is_blocked_ip(host):
        raise UrlValidationError(f"host {label} is in a blocked range of addresses")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None)
    except socket.gaierror as error:
        raise UrlValidationError(f"Could not resolve {label}: {describe_error_detail(str(error))}") from error
    blocked = [str(address[0]) for *_, address in found if is_blocked_ip(str(address[0]))]
    if blocked:
        raise UrlValidationError(f"host {label} has the blocked IP {blocked[0]}")


def validate_local_path(path: str, policy: UrlValidationPolicy) -> Path:
    """Return the resolved path of a file in the permitted directory. Raise `UrlValidationError`."""
    if policy.allowed_local_path is None:
        raise UrlValidationError("Local media paths are not permitted: DYN_MM_LOCAL_PATH is not set")
    label = describe_media_source(path)
    file = _resolved(path, f"File not found: {label}")
    # The directory is not named: the message is sent to the client.
    directory = _resolved(policy.allowed_local_path, "allowed_local_path does not exist")
    if directory not in (file, *file.parents):
        raise UrlValidationError(f"Path '{label}' is outside the allowed directory")
    return file


def _resolved(path: str, missing: str) -> Path:
    """Return an existing path without links. Raise `UrlValidationError` with the message `missing`."""
    try:
        return Path(path).expanduser().resolve(strict=True)
    except FileNotFoundError:
        raise UrlValidationError(missing) from None
    except (OSError, ValueError, RuntimeError) as error:
        detail = describe_error_detail(str(error))
        raise UrlValidationError(f"cannot use {describe_media_source(path)}: {detail}") from None


async def validate_media_url(url: str, policy: UrlValidationPolicy) -> str:
    """Return a permitted URL; a path becomes a file URL. Raise `UrlValidationError`."""
    file = _local_file(url, policy)
    return await validate_url(url, policy) if file is None else file.as_uri()


async def validate_media_reference(reference: str, policy: UrlValidationPolicy) -> str:
    """Return a permitted URL, or the path of a local file. Raise `UrlValidationError`."""
    file = _local_file(reference, policy)
    return await validate_url(reference, policy) if file is None else str(file)


def _local_file(reference: str, policy: UrlValidationPolicy) -> Path | None:
    """Return the permitted file that a reference names; None for a URL of another scheme."""
    parts = _split(reference)
    if parts.scheme not in ("", "file"):
        return None
    return validate_local_path(unquote(parts.path) if parts.scheme else reference, policy)
