"""AdvertisedOptions: how frontends are to route to workers of this kind, told on their card (serving-plane.md §4.2).

The frontend's own variables of routing are not read here: it may run beside the worker.
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
"""What may be told with every mode; the rest is of kv mode."""


@dataclass(frozen=True, kw_only=True)  # No slots: it is mixed into the mocker's configuration.
class AdvertisedOptions:
    """Router settings that the worker publishes (with `--router-mode`).

    Fields are named as in `RouterConfig` and `KvRouterConfig`.
    """

    router_mode: str | None = option(
        None,
        "--router-mode",
        None,
        "How frontends are to route to workers of this kind, whatever their own mode and flags",
        choices=tuple(MODES),
    )
    active_decode_blocks_threshold: float | None = option(
        None, "--active-decode-blocks-threshold", None, "With --router-mode: share of KV blocks from which one is busy"
    )
    active_prefill_tokens_threshold: int | None = option(
        None, "--active-prefill-tokens-threshold", None, "With --router-mode: queued tokens from which one is busy"
    )
    active_prefill_tokens_threshold_frac: float | None = option(
        None, "--active-prefill-tokens-threshold-frac", None, "The same, as a multiple of --max-num-batched-tokens"
    )
    session_affinity_ttl_secs: int | None = option(
        None,
        "--router-session-affinity-ttl-secs",
        None,
        "With --router-mode: a session stays with its worker until it was idle for so long",
    )
    session_affinity_mode: str = option(
        "hard",
        "--router-session-affinity-mode",
        None,
        "hard: even when that worker is busy; soft: not then",
        choices=("hard", "soft"),
    )
    overlap_score_credit: float = option(
        1.0, "--router-kv-overlap-score-credit", None, "With --router-mode kv: what a cached block saves of a prefill"
    )
    overlap_score_credit_decay: float = option(
        0.0, "--router-kv-overlap-score-credit-decay", None, "How fast that shrinks where more prefill waits"
    )
    overlap_score_weight: float | None = option(
        None,
        "--router-kv-overlap-score-weight",
        None,
        "Older spelling of --router-prefill-load-scale; 0 also sets the credit to 0",
        aliases=["--kv-overlap-score-weight"],
    )
    prefill_load_scale: float = option(
        1.0, "--router-prefill-load-scale", None, "What a block to be computed costs against one that is occupied"
    )
    decode_active_request_weight: float = option(
        0.0, "--router-decode-active-request-weight", None, "What a request under way costs, in blocks"
    )
    host_cache_hit_weight: float = option(
        0.75, "--router-host-cache-hit-weight", None, "What a block in the host's memory saves of one to be computed"
    )
    disk_cache_hit_weight: float = option(0.25, "--router-disk-cache-hit-weight", None, "The same for one on disk")
    router_temperature: float = option(
        0.0, "--router-temperature", None, "0 takes the best worker; above, others are drawn too"
    )
    use_kv_events: bool = option(
        True, "--router-kv-events", None, "Believe what workers say of their caches", aliases=["--kv-events"]
    )
    router_replica_sync: bool = option(
        False, "--router-replica-sync", None, "Routers tell each other what they gave to whom"
    )
    router_track_active_blocks: bool = option(
        True,
        "--router-track-active-blocks",
        None,
        "Count the blocks of requests under way",
        aliases=["--track-active-blocks"],
    )
    router_track_output_blocks: bool = option(
        False,
        "--router-track-output-blocks",
        None,
        "Count the blocks that answers fill as well",
        aliases=["--track-output-blocks"],
    )
    router_assume_kv_reuse: bool = option(
        True,
        "--router-assume-kv-reuse",
        None,
        "Requests that begin alike share blocks on a worker",
        aliases=["--assume-kv-reuse"],
    )
    router_track_prefill_tokens: bool = option(
        True, "--router-track-prefill-tokens", None, "Count prompts that are being computed"
    )
    router_ttl_secs: float = option(120.0, "--router-ttl-secs", None, "Without KV events: how long a guess is believed")
    router_approximate_cache_policy: str = option(
        "ttl",
        "--router-approximate-cache-policy",
        None,
        "Without KV events: guesses end by time, or when a cache must be full",
        choices=("ttl", "lru"),
    )
    router_predicted_ttl_secs: float | None = option(
        None, "--router-predicted-ttl-secs", None, "How long what was just sent to a worker counts as held"
    )
    router_queue_threshold: float | None = option(
        None, "--router-queue-threshold", None, "Requests wait while all have more prefill than this part of a batch"
    )
    router_queue_policy: str = option(
        "fcfs", "--router-queue-policy", None, "Who waits first goes first, or the shortest", choices=("fcfs", "wspt")
    )
    use_remote_indexer: bool = option(
        False, "--use-remote-indexer", None, "Ask a router that serves its index what workers hold"
    )
    enable_session_prefix_index: bool = option(
        False, "--enable-session-prefix-index", None, "Keep what each session was told, whoever still holds it"
    )
    shared_cache_type: str = option(
        "none", "--shared-cache-type", None, "Count a cache that every worker reads", choices=("none", "hicache")
    )
    shared_cache_multiplier: float | None = option(
        None, "--shared-cache-multiplier", None, "What a block there saves of one to be computed"
    )

    def routing(self) -> RouterConfig | None:
        """What frontends are told of how to route. Raises `ConfigError` for what cannot be told."""
        told = [one.name for one in fields(AdvertisedOptions) if getattr(self, one.name) != one.default]
        if self.router_mode is None:
            if told:
                raise ConfigError(f"{FLAGS[told[0]]}: it is told to frontends with --router-mode")
            return None
        of_kv = [name for name in told if name not in (*ANY_MODE, "router_mode")]
        mode = MODES[self.router_mode]
        if of_kv and mode is not RouterMode.KV:
            raise ConfigError(f"{FLAGS[of_kv[0]]}: it is told to frontends with --router-mode kv")
        try:
            kv = self._kv() if mode is RouterMode.KV else None
            return RouterConfig(mode, kv, **{name: getattr(self, name) for name in ANY_MODE})
        except (InvalidArgument, ValueError) as error:
            raise ConfigError(f"--router-mode {self.router_mode}: {error}") from None

    def _kv(self) -> KvRouterConfig:
        """What is said of a KV router, and the defaults of the rest."""
        names = [one.name for one in fields(AdvertisedOptions) if one.name not in (*ANY_MODE, "router_mode")]
        told = {name: getattr(self, name) for name in names}
        return KvRouterConfig(**told)


FLAGS: dict[str, str] = {one.name: one.metadata["flag"] for one in fields(AdvertisedOptions)}
