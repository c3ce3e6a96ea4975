"""etcd protocol: messages of its API v3 as JSON, and the renewal schedule of a lease.

Keys and values are base64 in JSON and 64-bit integers are strings; msgspec converts both.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from dynamo.core.codec import UNREADABLE

M = TypeVar("M")

RENEWALS_PER_LEASE = 5
"""Number of renewals per lease TTL. A stalled registry is detected after two intervals at most (one until the next
renewal, one until it times out), long before a lease can expire."""
PAGE_RECORDS = 500  # Page of a listing; with model cards of a few kilobytes far below the limit of a gateway.

INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED, FAILED_PRECONDITION, UNAUTHENTICATED = 3, 5, 7, 9, 16
"""gRPC codes that concern the request; all others mean that the member is unavailable."""

_ABOUT_THE_REQUEST = frozenset({INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED, FAILED_PRECONDITION, UNAUTHENTICATED})


class EtcdUnavailable(Exception):
    """Error of a member that cannot serve now: try another member, or retry later."""


class EtcdRefused(Exception):
    """Error of a request that the member rejected."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Compacted(Exception):
    """Error of a watch whose start revision is compacted or in the future: list the records again."""


class EtcdHeader(msgspec.Struct):
    """Revision of the cluster at the time of the response."""

    revision: int = 0


class KeyValue(msgspec.Struct):
    """Record of etcd."""

    key: bytes
    value: bytes = b""
    mod_revision: int = 0


class Page(msgspec.Struct):
    """Page of a listing."""

    header: EtcdHeader
    kvs: list[KeyValue] = []
    more: bool = False


class LeaseState(msgspec.Struct):
    """State of a lease; a TTL of 0 means that the lease does not exist."""

    id: int = msgspec.field(default=0, name="ID")
    ttl: int = msgspec.field(default=0, name="TTL")
    keys: list[bytes] = []


class WatchEvent(msgspec.Struct):
    """Change of one record."""

    kv: KeyValue
    type: str = "PUT"


class WatchMessage(msgspec.Struct):
    """Message of a watch: its creation, changes, or its cancellation."""

    header: EtcdHeader
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    fragment: bool = False
    events: list[WatchEvent] = []


class Token(msgspec.Struct):
    """Authentication token."""

    token: str


class _Refusal(msgspec.Struct):
    """Error in the formats of different gateway releases."""

    message: str = ""
    code: int = 0
    grpc_code: int = 0


class _StreamLine(msgspec.Struct):
    result: msgspec.Raw = msgspec.Raw()
    error: _Refusal | None = None


_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def encode(message: dict[str, Any]) -> bytes:
    """Encode a request body; `bytes` become base64."""
    return msgspec.json.encode(message)


def decode(kind: type[M], data: bytes | msgspec.Raw) -> M:
    """Decode a response. Raise `EtcdUnavailable` for a malformed one, which is not from a working etcd."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind, strict=False)
    try:
        return decoder.decode(data)  # type: ignore[no-any-return]
    except UNREADABLE as error:
        raise EtcdUnavailable(f"not an etcd response: {error}") from None


def decode_line(kind: type[M], line: bytes) -> M:
    """Decode one message of a stream. Raise `EtcdRefused` or `EtcdUnavailable` for an error message."""
    message = decode(_StreamLine, line)
    if message.error is not None or not bytes(message.result):
        raise _error(message.error or _Refusal(message="empty message"))
    return decode(kind, message.result)


def refusal(status: int, body: bytes) -> EtcdRefused | EtcdUnavailable:
    """Return the error of a response with an HTTP status other than 200."""
    try:
        answer = msgspec.json.decode(body, type=_Refusal, strict=False)
    except UNREADABLE:
        answer = _Refusal()
    return _error(answer if answer.message else _Refusal(message=f"HTTP status {status}"))


def _error(answer: _Refusal) -> EtcdRefused | EtcdUnavailable:
    code = answer.code or answer.grpc_code
    return EtcdRefused(code, answer.message) if code in _ABOUT_THE_REQUEST else EtcdUnavailable(answer.message)


def range_end(prefix: bytes) -> bytes:
    """Return the first key after all keys that begin with `prefix`, which must not end in 0xff."""
    assert prefix, "prefix must not be empty"
    assert prefix[-1] != 0xFF, "prefix must not end in 0xff"
    return prefix[:-1] + bytes([prefix[-1] + 1])


def list_request(prefix: bytes, after: bytes | None = None, revision: int = 0) -> dict[str, Any]:
    """Return the request for the next page of a listing: keys after `after`, at `revision`."""
    start = prefix if after is None else after + b"\0"
    return {"key": start, "range_end": range_end(prefix), "limit": PAGE_RECORDS, "revision": revision}


def probe_request(prefix: bytes) -> dict[str, Any]:
    """Return the request for any one key with that prefix."""
    return {"key": prefix, "range_end": range_end(prefix), "limit": 1, "keys_only": True}


def watch_request(prefix: bytes, start_revision: int) -> dict[str, Any]:
    """Return the request for all changes of a prefix from a revision on; large messages are fragmented."""
    watched = {"key": prefix, "range_end": range_end(prefix)}
    return {"create_request": watched | {"start_revision": start_revision, "fragment": True}}


@dataclass(slots=True)
class EtcdLease:
    """Lease with its local expiry time, counted from the sending of its renewal: never later than etcd's own expiry."""

    id: int
    ttl_s: float
    expires_at: float = 0.0
    renew_at: float = 0.0

    @property
    def interval_s(self) -> float:
        """Return the renewal interval, which is also the timeout of a renewal."""
        return self.ttl_s / RENEWALS_PER_LEASE

    def renewed(self, sent_at: float, ttl_s: float) -> None:
        """Record a grant or renewal."""
        self.ttl_s = ttl_s
        self.expires_at = sent_at + ttl_s
        self.renew_at = sent_at + self.interval_s
