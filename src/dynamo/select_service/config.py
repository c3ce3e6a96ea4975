"""SelectOptions: the flags of `python -m dynamo.select_service` (serving-plane.md §4.12)."""

from dataclasses import dataclass

from dynamo.core.config import option
from dynamo.core.errors import ConfigError
from dynamo.routing.services.indexer_peers import URL_SCHEMES
from dynamo.routing.services.selection import AFFINITY_MAX_S, CACHE_BYTES, CACHE_ENTRIES, CACHE_TTL_S
from dynamo.routing.sync.replica_peers import ReplicaOptions
from dynamo.routing.tracking_options import TrackingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectOptions(ReplicaOptions, TrackingOptions):
    """Standalone worker selection: chooses among workers that it is told of, without a runtime."""

    port: int = option(8092, "--port", None, "HTTP port")
    threads: int = option(
        4, "--threads", None, "Without effect: one loop applies events faster than several threads did"
    )
    indexer_peers: list[str] = option(
        [], "--indexer-peers", None, "URLs of other selectors or indexers, asked at the start for what they know"
    )
    session_affinity_ttl_secs: float | None = option(
        None,
        "--session-affinity-ttl-secs",
        None,
        "The turns of a session (session_id) go to the worker of its first one until it was idle for so long",
    )
    selection_cache_ttl_secs: float = option(
        CACHE_TTL_S, "--selection-cache-ttl-secs", None, "How long a selection may be reserved"
    )
    selection_cache_max_entries: int = option(
        CACHE_ENTRIES, "--selection-cache-max-entries", None, "How many selections may wait for that"
    )
    selection_cache_max_bytes: int = option(
        CACHE_BYTES, "--selection-cache-max-bytes", None, "How much memory they may take, about"
    )
    assume_kv_reuse: bool = option(
        True, "--router-assume-kv-reuse", None, "Requests that begin alike share blocks on a worker"
    )

    def __post_init__(self) -> None:
        ReplicaOptions.__post_init__(self)
        self.check_tracking()
        for url in self.indexer_peers:
            if not url.startswith(URL_SCHEMES):
                raise ConfigError(f"--indexer-peers {url}: expected http://host:port")
        ttl_s = self.session_affinity_ttl_secs
        if ttl_s is not None and not 1 <= ttl_s <= AFFINITY_MAX_S:
            raise ConfigError(f"--session-affinity-ttl-secs {ttl_s:g}: expected 1 to {AFFINITY_MAX_S}")
        for flag, value in (
            ("--selection-cache-ttl-secs", self.selection_cache_ttl_secs),
            ("--selection-cache-max-entries", self.selection_cache_max_entries),
            ("--selection-cache-max-bytes", self.selection_cache_max_bytes),
        ):
            if value <= 0:
                raise ConfigError(f"{flag} {value:g}: expected more than 0")
