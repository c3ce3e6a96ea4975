"""SelectOptions: the flags of `python -m dynamo.select_service`."""

from dataclasses import dataclass

from dynamo.core.config import option
from dynamo.core.errors import ConfigError
from dynamo.routing.services.indexer_peers import URL_SCHEMES
from dynamo.routing.services.selection import AFFINITY_MAX_S, CACHE_BYTES, CACHE_ENTRIES, CACHE_TTL_S
from dynamo.routing.settings import TrackingOptions
from dynamo.routing.sync.replica_peers import ReplicaOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectOptions(ReplicaOptions, TrackingOptions):
    """Standalone worker selection: chooses among registered workers, without a Dynamo runtime."""

    port: int = option(8092, "--port", None, "HTTP port")
    threads: int = option(
        4, "--threads", None, "Accepted for compatibility; has no effect: one event loop applies the events"
    )
    indexer_peers: list[str] = option(
        [], "--indexer-peers", None, "URLs of other selection services or indexers whose index is copied at the start"
    )
    session_affinity_ttl_secs: float | None = option(
        None,
        "--session-affinity-ttl-secs",
        None,
        "Idle time after which a session (session_id) loses its worker, in seconds; enables session affinity",
    )
    selection_cache_ttl_secs: float = option(
        CACHE_TTL_S, "--selection-cache-ttl-secs", None, "Time in which a selection can be reserved, in seconds"
    )
    selection_cache_max_entries: int = option(
        CACHE_ENTRIES, "--selection-cache-max-entries", None, "Maximum number of selections that can be reserved"
    )
    selection_cache_max_bytes: int = option(
        CACHE_BYTES, "--selection-cache-max-bytes", None, "Approximate maximum memory of these selections, in bytes"
    )
    assume_kv_reuse: bool = option(
        True, "--router-assume-kv-reuse", None, "Count the common prefix of concurrent requests on a worker once"
    )

    def __post_init__(self) -> None:
        ReplicaOptions.__post_init__(self)
        self.check_tracking()
        for url in self.indexer_peers:
            if not url.startswith(URL_SCHEMES):
                raise ConfigError(f"--indexer-peers {url}: expected http://host:port")
        ttl_s = self.session_affinity_ttl_secs
        if ttl_s is not None and not 1 <= ttl_s <= AFFINITY_MAX_S:
            raise ConfigError(f"--session-affinity-ttl-secs {ttl_s:g}: must be from 1 to {AFFINITY_MAX_S}")
        for flag, value in (
            ("--selection-cache-ttl-secs", self.selection_cache_ttl_secs),
            ("--selection-cache-max-entries", self.selection_cache_max_entries),
            ("--selection-cache-max-bytes", self.selection_cache_max_bytes),
        ):
            if value <= 0:
                raise ConfigError(f"{flag} {value:g}: must be greater than 0")
