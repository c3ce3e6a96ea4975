"""AdvertisedOptions: router settings that a worker publishes on its model card for frontends.

The frontend's own routing environment variables are not read here: a frontend may run on the same host.
"""

from dataclasses import dataclass, fields

from dynamo.core.config import option
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.routing.card_config import RouterConfig
from dynamo.routing.python_config import KvRouterConfig
from dynamo.runtime.push_router import RouterMode

MODES = {mode.value: mode for mode in RouterMode}
ANY_MODE = (
    "active_decode_blocks_threshold",
    "active_prefill_tokens_threshold",
    "active_prefill_tokens_threshold_frac",
    "session_affinity_ttl_secs",
    "session_affinity_mode",
)
"""Options that may be published with every mode; the others require kv mode."""


@dataclass(frozen=True, kw_only=True)  # No slots: a base class of the mocker's configuration.
class AdvertisedOptions:
    """Router settings that the worker publishes (with `--router-mode`).

    Fields are named as in `RouterConfig` and `KvRouterConfig`.
    """

    router_mode: str | None = option(
        None,
        "--router-mode",
        None,
        "Router mode that frontends use for this model, in place of their own mode and flags",
        choices=tuple(MODES),
    )
    active_decode_blocks_threshold: float | None = option(
        None,
        "--active-decode-blocks-threshold",
        None,
        "With --router-mode: a worker is busy above this share of used KV blocks",
    )
    active_prefill_tokens_threshold: int | None = option(
        None,
        "--active-prefill-tokens-threshold",
        None,
        "With --router-mode: a worker is busy above this number of queued tokens",
    )
    active_prefill_tokens_threshold_frac: float | None = option(
        None,
        "--active-prefill-tokens-threshold-frac",
        None,
        "The same threshold as a multiple of --max-num-batched-tokens",
    )
    session_affinity_ttl_secs: int | None = option(
        None,
        "--router-session-affinity-ttl-secs",
        None,
        "With --router-mode: seconds of idleness after which a session may change its worker",
    )
    session_affinity_mode: str = option(
        "hard",
        "--router-session-affinity-mode",
        None,
        "hard: keep the session's worker even if it is busy; soft: use another worker then",
        choices=("hard", "soft"),
    )
    overlap_score_credit: float = option(
        1.0,
        "--router-kv-overlap-score-credit",
        None,
        "With --router-mode kv: prefill cost saved by a cached block, in blocks",
    )
    overlap_score_credit_decay: float = option(
        0.0,
        "--router-kv-overlap-score-credit-decay",
        None,
        "Decay rate of that credit with the worker's queued prefill",
    )
    overlap_score_weight: float | None = option(
        None,
        "--router-kv-overlap-score-weight",
        None,
        "Deprecated name of --router-prefill-load-scale; 0 also sets the credit to 0",
        aliases=["--kv-overlap-score-weight"],
    )
    prefill_load_scale: float = option(
        1.0, "--router-prefill-load-scale", None, "Cost of a block to compute relative to an occupied block"
    )
    decode_active_request_weight: float = option(
        0.0, "--router-decode-active-request-weight", None, "Cost of an active request, in blocks"
    )
    host_cache_hit_weight: float = option(
        0.75, "--router-host-cache-hit-weight", None, "Prefill cost saved by a block in host memory, in blocks"
    )
    disk_cache_hit_weight: float = option(
        0.25, "--router-disk-cache-hit-weight", None, "Prefill cost saved by a block on disk, in blocks"
    )
    router_temperature: float = option(
        0.0, "--router-temperature", None, "Softmax temperature of worker selection; 0 selects the best worker"
    )
    use_kv_events: bool = option(
        True, "--router-kv-events", None, "Use KV events from workers", aliases=["--kv-events"]
    )
    router_replica_sync: bool = option(
        False, "--router-replica-sync", None, "Synchronize active requests between routers"
    )
    router_track_active_blocks: bool = option(
        True,
        "--router-track-active-blocks",
        None,
        "Count the blocks of active requests",
        aliases=["--track-active-blocks"],
    )
    router_track_output_blocks: bool = option(
        False,
        "--router-track-output-blocks",
        None,
        "Count output blocks as well",
        aliases=["--track-output-blocks"],
    )
    router_assume_kv_reuse: bool = option(
        True,
        "--router-assume-kv-reuse",
        None,
        "Count the common prefix of concurrent requests on a worker once",
        aliases=["--assume-kv-reuse"],
    )
    router_track_prefill_tokens: bool = option(
        True, "--router-track-prefill-tokens", None, "Count prompt tokens still to be computed"
    )
    router_ttl_secs: float = option(
        120.0, "--router-ttl-secs", None, "Without KV events: seconds for which a routed prompt counts as cached"
    )
    router_approximate_cache_policy: str = option(
        "ttl",
        "--router-approximate-cache-policy",
        None,
        "Without KV events: expire predicted blocks by time, or evict by capacity",
        choices=("ttl", "lru"),
    )
    router_predicted_ttl_secs: float | None = option(
        None, "--router-predicted-ttl-secs", None, "Seconds for which a just routed prompt counts as cached"
    )
    router_queue_threshold: float | None = option(
        None,
        "--router-queue-threshold",
        None,
        "Queue requests while all workers have more prefill than this share of a batch",
    )
    router_queue_policy: str = option(
        "fcfs",
        "--router-queue-policy",
        None,
        "Order of queued requests: first come, or shortest first",
        choices=("fcfs", "wspt"),
    )
    use_remote_indexer: bool = option(False, "--use-remote-indexer", None, "Query the KV index of another router")
    enable_session_prefix_index: bool = option(
        False,
        "--enable-session-prefix-index",
        None,
        "Index the prompts of each session, independent of the workers' caches",
    )
    shared_cache_type: str = option(
        "none",
        "--shared-cache-type",
        None,
        "Shared cache of all workers to count in costs",
        choices=("none", "hicache"),
    )
    shared_cache_multiplier: float | None = option(
        None, "--shared-cache-multiplier", None, "Prefill cost saved by a block in the shared cache, in blocks"
    )

    def routing(self) -> RouterConfig | None:
        """Return the published router settings; None without `--router-mode`. Raise `ConfigError` if invalid."""
        given = [one.name for one in fields(AdvertisedOptions) if getattr(self, one.name) != one.default]
        if self.router_mode is None:
            if given:
                raise ConfigError(f"{FLAGS[given[0]]}: requires --router-mode")
            return None
        of_kv = [name for name in given if name not in (*ANY_MODE, "router_mode")]
        mode = MODES[self.router_mode]
        if of_kv and mode is not RouterMode.KV:
            raise ConfigError(f"{FLAGS[of_kv[0]]}: requires --router-mode kv")
        try:
            kv = self._kv() if mode is RouterMode.KV else None
            return RouterConfig(mode, kv, **{name: getattr(self, name) for name in ANY_MODE})
        except (InvalidArgument, ValueError) as error:
            raise ConfigError(f"--router-mode {self.router_mode}: {error}") from None

    def _kv(self) -> KvRouterConfig:
        """Return the KV router settings."""
        names = [one.name for one in fields(AdvertisedOptions) if one.name not in (*ANY_MODE, "router_mode")]
        given = {name: getattr(self, name) for name in names}
        return KvRouterConfig(**given)


FLAGS: dict[str, str] = {one.name: one.metadata["flag"] for one in fields(AdvertisedOptions)}
