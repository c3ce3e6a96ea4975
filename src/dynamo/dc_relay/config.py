"""RelayConfig: data center, selected namespaces, gRPC address and limits of a relay."""

import contextlib
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.dc_relay.bucket_images import FRAME_BYTES_MAX
from dynamo.dc_relay.cuckoo_filter import BUCKETS_MAX, buckets_for

TIMER_MS_MAX = 31_536_000_000  # One year.
FANOUT_MAX = 65_536
PORT_MAX = 65_535
MESSAGE_BYTES_MIN = FRAME_BYTES_MAX + 64 * 1024  # One frame, its identities and the protobuf fields.
QUEUE_BYTES_MIN = FRAME_BYTES_MAX + 256  # One frame and its overhead.
PRODUCER_SETTINGS = ("publication_threshold", "publication_delay_ms", "recovery_attempt_timeout_ms")
"""Settings that need no gRPC address."""


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """Times, sizes and counts; each is at least 1.

    `publication_encoding_concurrency` and `max_initialized_pool_hubs` have no effect: snapshots are encoded frame by
    frame on the event loop, and the publication of a pool needs no initialization.
    """

    publication_threshold: int = 16
    publication_delay_ms: int = 1
    recovery_attempt_timeout_ms: int = 30_000
    max_message_bytes: int = 8 * 1024 * 1024
    keepalive_interval_ms: int = 20_000
    keepalive_timeout_ms: int = 10_000
    pool_heartbeat_interval_ms: int = 10_000
    readiness_heartbeat_interval_ms: int = 10_000
    snapshot_progress_timeout_ms: int = 60_000
    load_window_ms: int = 1000
    load_fanout_capacity: int = 16
    publication_queue_capacity: int = 16
    publication_queue_bytes: int = 16 * 1024 * 1024
    publication_encoding_concurrency: int = 2
    max_initialized_pool_hubs: int = 64
    max_catalog_subscribers: int = 64
    max_pool_streams_total: int = 64
    max_subscribers_per_pool: int = 64
    max_readiness_subscribers: int = 64
    max_load_subscribers: int = 64

    def check(self) -> None:
        """Raise `ConfigError` for a value out of range."""
        for one in fields(self):
            value = getattr(self, one.name)
            if value < 1:
                raise ConfigError(f"KvDcRelay {one.name} {value}: must be positive")
            if one.name.endswith("_ms") and value > TIMER_MS_MAX:
                raise ConfigError(f"KvDcRelay {one.name} {value}: must be at most {TIMER_MS_MAX}")
        if self.load_fanout_capacity > FANOUT_MAX:
            raise ConfigError(
                f"KvDcRelay load_fanout_capacity {self.load_fanout_capacity}: must be at most {FANOUT_MAX}"
            )
        if self.max_message_bytes < MESSAGE_BYTES_MIN:
            raise ConfigError(
                f"KvDcRelay max_message_bytes {self.max_message_bytes}: must be at least {MESSAGE_BYTES_MIN}"
            )
        if self.publication_queue_bytes < QUEUE_BYTES_MIN:
            raise ConfigError(
                f"KvDcRelay publication_queue_bytes {self.publication_queue_bytes}: must be at least {QUEUE_BYTES_MIN}"
            )


LIMIT_NAMES = tuple(one.name for one in fields(RelayLimits))


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """Settings of one relay."""

    dc_id: str
    namespaces: tuple[str, ...] = ()
    """Selected namespaces; empty for all."""
    endpoint_prefixes: tuple[str, ...] = ()
    sources_file: str | None = None
    connection_revision: str | None = None
    expected_unique_blocks: int = 1_048_576
    bind: str | None = None
    limits: RelayLimits = field(default_factory=RelayLimits)

    @property
    def bucket_count(self) -> int:
        return buckets_for(self.expected_unique_blocks)

    def check(self) -> None:
        """Raise `ConfigError` for a setting that cannot be used."""
        if not self.dc_id or self.dc_id != self.dc_id.strip():
            raise ConfigError(f"KvDcRelay dc_id {self.dc_id!r}: must not be empty or begin or end with white space")
        self.limits.check()
        if self.expected_unique_blocks < 1:
            raise ConfigError(f"KvDcRelay expected_unique_blocks {self.expected_unique_blocks}: must be positive")
        if self.bucket_count > BUCKETS_MAX:
            raise ConfigError(
                f"KvDcRelay expected_unique_blocks {self.expected_unique_blocks}: requires {self.bucket_count} filter"
                f" buckets; at most {BUCKETS_MAX} are possible"
            )
        _check_list("namespaces", self.namespaces)
        _check_list("endpoint_prefixes", self.endpoint_prefixes)
        for prefix in self.endpoint_prefixes if self.namespaces else ():
            if prefix.partition(".")[0] not in self.namespaces:
                raise ConfigError(f"KvDcRelay endpoint_prefixes {prefix!r}: must begin with a selected namespace")


def limits_of(settings: Mapping[str, int], tuning: Mapping[str, int] | None, *, has_listener: bool) -> RelayLimits:
    """Return the limits, with the overrides of `tuning`. Raises `InvalidArgument` for an unsuitable key or value."""
    given: dict[str, Any] = dict(settings)
    for name, value in (tuning or {}).items():
        if name not in LIMIT_NAMES:
            raise InvalidArgument(f"tuning {name!r}: must be one of {', '.join(LIMIT_NAMES)}", param="tuning")
        if not isinstance(value, int):
            raise TypeError(f"tuning {name} {value!r}: must be an integer")
        if name not in PRODUCER_SETTINGS and not has_listener:
            raise InvalidArgument(f"tuning {name}: requires bind", param="tuning")
        given[name] = value
    for name, value in given.items():
        if value < 0:
            raise OverflowError(f"{name} {value}: must not be negative")
    return RelayLimits(**given)


def check_address(bind: str) -> None:
    """Raise `InvalidArgument` unless a text is a numeric IP address and a port."""
    host, _, port = bind.rpartition(":")
    version = 0
    with contextlib.suppress(ValueError):
        version = int(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).version)
    has_brackets = host.startswith("[") and host.endswith("]")
    if version != (6 if has_brackets else 4) or not port.isdecimal() or int(port) > PORT_MAX:
        raise InvalidArgument(f"bind {bind!r}: must be IP:PORT, such as 127.0.0.1:5561 or [::1]:5561", param="bind")


def selected(
    namespace_filter: str | None, namespaces: Sequence[str] | None, *, watch_all: bool | None
) -> tuple[str, ...]:
    """Return the selected namespaces, none for all. Raises `InvalidArgument` for a contradiction."""
    if namespace_filter is not None and namespaces is not None:
        raise InvalidArgument("namespace_filter and namespaces are mutually exclusive")
    found = (namespace_filter,) if namespace_filter is not None else tuple(namespaces or ())
    if found and watch_all:
        raise InvalidArgument("watch_all and a list of namespaces are mutually exclusive")
    if not found and watch_all is False:
        raise InvalidArgument("watch_all False: requires at least one namespace")
    return found


def _check_list(name: str, values: Sequence[str]) -> None:
    if not all(values):
        raise ConfigError(f"KvDcRelay {name}: must not contain an empty text")
    repeated = next((value for value in values if values.count(value) > 1), None)
    if repeated is not None:
        raise ConfigError(f"KvDcRelay {name}: {repeated!r} is repeated")
