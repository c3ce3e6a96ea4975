"""Media sources: allowed origins and maximum sizes of the images, videos and sounds of a request. Pure.

The rules and variables are upstream's: https, and http only if internal hosts are allowed; no host with a non-public
address; `data:` within its own limit; files only below a configured directory.
"""

import base64
import binascii
import functools
import ipaddress
import os
import re
import urllib.parse

from msgspec import Struct

from dynamo.core.config import read_bool, setting
from dynamo.core.errors import ConfigError, InvalidArgument

MIB = 1 << 20
URL_CHARS_MAX = 8192  # As servers accept them. Longer URLs contain their data.
SHOWN_CHARS_MAX = 120  # Enough to identify a URL in a message.
BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
ANY_TYPES = frozenset({"", "application/octet-stream", "binary/octet-stream"})
"""Content types that servers send for bytes of unknown type."""
NAT64 = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))
CLOUD_SERVICES = tuple(
    ipaddress.ip_network(text)
    for text in (
        "fec0::/10",  # Site-local, deprecated by RFC 3879 and still routed inside some networks.
        "192.88.99.0/24",  # 6to4 relays, deprecated by RFC 7526.
        "161.26.0.0/16",  # IBM Cloud: services of the private network.
        "166.8.0.0/14",
        "199.36.153.4/30",  # Google Cloud: its APIs under addresses of the private network.
        "199.36.153.8/30",
    )
)
"""Networks that Python's `is_global` treats as public, but that only hosts inside a network or cloud reach."""
METADATA_SERVICES = frozenset(
    ipaddress.ip_address(text)
    for text in (
        "169.254.169.254",  # AWS, Azure, Google, Oracle, OpenStack and others.
        "fd00:ec2::254",  # AWS
        "fd20:ce::254",  # Google
        "169.254.170.2",  # AWS: credentials of ECS tasks
        "169.254.170.23",  # AWS: credentials of EKS pods
        "fd00:ec2::23",
        "168.63.129.16",  # Azure's wire server
        "100.100.100.200",  # Alibaba
        "169.254.0.23",  # Tencent
        "169.254.42.42",  # Scaleway
        "fd00:42::42",
        "192.0.0.192",  # Oracle, classic
    )
)
"""Addresses under which clouds serve credentials to their own hosts; never fetched from."""
DATA = re.compile(r"data:(?P<type>[^,;]*)(?P<parameters>(?:;[^,;]*)*),", re.IGNORECASE)


class FetchLimits(Struct, frozen=True):
    """Limits on the size, origin and duration of fetches."""

    file_bytes_max: int = 64 * MIB
    data_url_bytes_max: int = 16 * MIB
    """Maximum length of the whole URL."""
    allows_internal: bool = False
    """Allow hosts that are not public, and http."""
    local_path: str = ""
    """Directory below which files may be read; empty: none."""
    connect_timeout_s: float = 5.0
    timeout_s: float = 30.0
    """Timeout of the whole fetch, including redirects."""
    redirects_max: int = 3
    concurrency: int = 50

    @classmethod
    def from_environment(cls) -> "FetchLimits":
        """Return the limits set by the environment. Raise `ConfigError`."""
        own = cls()
        if setting("DYN_MM_TRUST_EGRESS_PROXY", False, read_bool):
            raise ConfigError("DYN_MM_TRUST_EGRESS_PROXY: not supported; media are fetched without a proxy")
        return cls(
            file_bytes_max=_positive("DYN_MM_MAX_FILE_SIZE_MB", own.file_bytes_max // MIB) * MIB,
            data_url_bytes_max=_positive("DYN_MM_MAX_DATA_URL_MB", own.data_url_bytes_max // MIB) * MIB,
            allows_internal=setting("DYN_MM_ALLOW_INTERNAL", own.allows_internal, read_bool),
            local_path=setting("DYN_MM_LOCAL_PATH", "", str),
            connect_timeout_s=_seconds("DYN_HTTP_CONNECT_TIMEOUT", own.connect_timeout_s),
            timeout_s=_seconds("DYN_HTTP_TIMEOUT", own.timeout_s),
            concurrency=_positive("DYN_HTTP_CONCURRENCY", own.concurrency),
        )


@functools.cache
def environment_limits() -> FetchLimits:
    """Return the limits of the environment, read once."""
    return FetchLimits.from_environment()


class Media(Struct, frozen=True):
    """Content of a media source."""

    data: bytes
    content_type: str
    """Content type in lower case, without parameters; empty if unknown."""


class Remote(Struct, frozen=True):
    """A host and the request to send to it."""

    is_tls: bool
    host: str
    port: int
    target: str
    """Path and query."""

    @property
    def authority(self) -> str:
        """Host and port in the form of an HTTP request."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"


def remote_of(url: str, limits: FetchLimits) -> Remote:
    """Return the host of a URL and the request target. Raise `InvalidArgument` if the URL is not allowed."""
    if len(url) > URL_CHARS_MAX:
        raise InvalidArgument(f"the URL has {len(url)} characters: expected at most {URL_CHARS_MAX}")
    if not url.isascii() or any(character <= " " or character == "\x7f" for character in url):
        raise InvalidArgument(f"the URL {shown(url)} has characters that are not allowed in a URL")
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise InvalidArgument(f"{shown(url)} is not a URL") from None
    if parts.scheme not in ("http", "https"):
        raise InvalidArgument(f"the scheme {shown(parts.scheme)!r} is not allowed: expected https or data")
    if parts.scheme == "http" and not limits.allows_internal:
        raise InvalidArgument("http is not allowed, only https; DYN_MM_ALLOW_INTERNAL=1 allows it")
    if not host or "%" in host or "\\" in parts.netloc:
        raise InvalidArgument(f"{shown(url)} has no host")
    if parts.username is not None or parts.password is not None:
        raise InvalidArgument("a URL with a user name or password is not allowed")
    is_tls = parts.scheme == "https"
    target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
    target = "/" + target.lstrip("/") if not target.startswith("/") or target.startswith("//") else target
    return Remote(is_tls, host, port or (443 if is_tls else 80), target)


def check_address(address: str, limits: FetchLimits) -> None:
    """Raise `InvalidArgument` for an address that this host can reach but public hosts cannot.

    `limits.allows_internal` allows all of these except metadata services.
    """
    if is_metadata_service(address):
        raise InvalidArgument("the URL's host is a cloud's metadata service")
    if not limits.allows_internal and not is_public(address):
        raise InvalidArgument("the URL's host is not public; DYN_MM_ALLOW_INTERNAL=1 allows it")


def is_public(address: str) -> bool:
    """Return whether an address is on the public internet; an embedded IPv4 address is checked as itself."""
    ip = _innermost(address)
    if ip is None or ip in METADATA_SERVICES or any(ip in network for network in CLOUD_SERVICES):
        return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def is_metadata_service(address: str) -> bool:
    """Return whether an address belongs to a cloud's metadata service."""
    return _innermost(address) in METADATA_SERVICES


def _innermost(address: str) -> "ipaddress.IPv4Address | ipaddress.IPv6Address | None":
    """Return an address, or the IPv4 address embedded in it; None for text that is not an address."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return None
    if isinstance(ip, ipaddress.IPv4Address):
        return ip
    inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
    if inner is None and any(ip in network for network in NAT64):
        inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    if inner is not None:
        return inner
    return ipaddress.IPv6Address(int(ip)) if ip.scope_id else ip


def check_type(content_type: str, accepts: tuple[str, ...]) -> None:
    """Raise `InvalidArgument` if no accepted kind (`image/`, …) matches; bytes of unknown type match any."""
    if accepts and content_type not in ANY_TYPES and not content_type.startswith(accepts):
        expected = " or ".join(f"{one}*" for one in accepts)
        raise InvalidArgument(f"the content type is {shown(content_type)!r}: expected {expected}")


def type_of(header: str) -> str:
    """Return a content type without its parameters."""
    return header.partition(";")[0].strip().lower()


def is_data(url: str) -> bool:
    return url[:5].lower() == "data:"


def check_data_url(url: str, limits: FetchLimits, accepts: tuple[str, ...] = ()) -> "re.Match[str]":
    """Match the head of a `data:` URL. Raise `InvalidArgument` if it is malformed or too long."""
    if len(url) > limits.data_url_bytes_max:
        reason = f"the data: URL has {len(url)} bytes: expected at most {limits.data_url_bytes_max}"
        raise InvalidArgument(f"{reason} (DYN_MM_MAX_DATA_URL_MB)")
    head = DATA.match(url)
    if head is None:
        raise InvalidArgument("the data: URL has no comma: expected data:<type>;base64,<data>")
    check_type(type_of(head["type"]), accepts)
    if _is_base64(head):
        check_base64(url[head.end() :])
    return head


def check_base64(text: str) -> None:
    """Raise `InvalidArgument` for invalid base64. Much faster than decoding it."""
    body = text.encode("utf-8", "replace")
    data = body.rstrip(b"=")
    if len(body) % 4 or len(body) - len(data) > 2 or data.translate(None, BASE64):
        raise InvalidArgument("the data is not base64")


def decode_data_url(url: str, limits: FetchLimits, accepts: tuple[str, ...] = ()) -> Media:
    """Return the content of a `data:` URL. Raise `InvalidArgument`."""
    head = check_data_url(url, limits, accepts)
    text = url[head.end() :]
    try:
        data = base64.b64decode(text, validate=True) if _is_base64(head) else urllib.parse.unquote_to_bytes(text)
    except binascii.Error:
        raise InvalidArgument("the data is not base64") from None
    return Media(data, type_of(head["type"]))


def local_of(url: str, limits: FetchLimits) -> str:
    """Return the path of a `file:` URL. Raise `InvalidArgument` for a file that must not be read."""
    if not limits.local_path:
        raise InvalidArgument("files are not read; set DYN_MM_LOCAL_PATH to a directory to allow them")
    path = os.path.realpath(urllib.parse.unquote(urllib.parse.urlsplit(url).path))
    folder = os.path.realpath(limits.local_path)
    if os.path.commonpath([folder, path]) != folder or path == folder:
        raise InvalidArgument("the file is not below the directory DYN_MM_LOCAL_PATH")
    return path


def shown(text: str) -> str:
    """Shorten a URL, or part of one, for a message."""
    return text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "…"


def _is_base64(head: "re.Match[str]") -> bool:
    return head["parameters"].lower().endswith(";base64")


def _positive(variable: str, default: int) -> int:
    value = setting(variable, default, int)
    if value < 1:
        raise ConfigError(f"{variable}={value}: expected 1 or more")
    return value


def _seconds(variable: str, default: float) -> float:
    value = setting(variable, default, float)
    if not 0 < value < 86400:
        raise ConfigError(f"{variable}={value}: expected seconds above 0")
    return value
