"""KvRouterOptions: flags, variables and defaults of the KV router, shared by all components that route.

Upstream marks some flags as deprecated in favour of `--router-policy-config`; here they remain fully supported.
"""

from dataclasses import dataclass

from dynamo.core.config import NO_EFFECT, option, setting
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.kv_router.active import EXPIRY_S
from dynamo.kv_router.config import BALANCED_QUEUE_POLICY, BALANCED_QUEUE_THRESHOLD, ESTIMATE, RouterConfig, Weights
from dynamo.kv_router.index import BLOCKS_MAX
from dynamo.kv_router.tracking import KEYED, PUBLIC, read_key
from dynamo.routing.ais_options import AisOptions
from dynamo.routing.tracking_options import TrackingOptions

AFFINITY_TTL_MAX_S = 31_536_000  # One year, as upstream.

FLAGS = {
    "overlap_score_credit": "--router-kv-overlap-score-credit",
    "overlap_score_credit_decay": "--router-kv-overlap-score-credit-decay",
    "router_temperature": "--router-temperature",
    "shared_cache_multiplier": "--shared-cache-multiplier",
}
"""Flags of weights whose names do not derive from the weight's name."""


@dataclass(frozen=True, kw_only=True)  # No slots: it is mixed into the options of the routers.
class KvRouterOptions(AisOptions, TrackingOptions):
    """KV router (`--router-mode kv`)."""

    router_policy: str = option(
        "dynamo",
        "--router-policy",
        "DYN_ROUTER_POLICY",
        "Cost function of kv mode: dynamo (upstream's), or balanced (latency-based, includes the delay of other requests)",
        choices=["dynamo", "balanced"],
    )
    overlap_score_credit: float = option(
        1.0,
        "--router-kv-overlap-score-credit",
        "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
        "Share of a prefill block that a cached block saves; 0 routes by load alone",
    )
    overlap_score_credit_decay: float = option(
        0.0,
        "--router-kv-overlap-score-credit-decay",
        "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",
        "Decrease of that credit on workers with more queued prefill than the others; 0 disables it",
    )
    overlap_score_weight: float | None = option(
        None,
        "--router-kv-overlap-score-weight",
        "DYN_OVERLAP_SCORE_WEIGHT",
        "Former name of --router-prefill-load-scale; 0 also sets the credit to 0",
        aliases=["--kv-overlap-score-weight"],
    )
    prefill_load_scale: float = option(
        1.0,
        "--router-prefill-load-scale",
        "DYN_ROUTER_PREFILL_LOAD_SCALE",
        "Cost of a block to be computed, relative to an occupied block",
    )
    decode_active_request_weight: float = option(
        0.0,
        "--router-decode-active-request-weight",
        "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT",
        "Cost of an active request, in blocks",
    )
    host_cache_hit_weight: float = option(
        0.75,
        "--router-host-cache-hit-weight",
        "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT",
        "Share of a prefill block that a block in host memory saves",
    )
    disk_cache_hit_weight: float = option(
        0.25, "--router-disk-cache-hit-weight", "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT", "The same share for a block on disk"
    )
    shared_cache_multiplier: float | None = option(
        None,
        "--shared-cache-multiplier",
        "DYN_SHARED_CACHE_MULTIPLIER",
        "The same share for a block in a cache that all workers read, 0 to 1; default: 0.5",
    )
    router_temperature: float = option(
        0.0,
        "--router-temperature",
        "DYN_ROUTER_TEMPERATURE",
        "0 chooses the cheapest worker; higher values spread requests over more workers",
    )
    kv_events: bool = option(
        True,
        "--router-kv-events",
        "DYN_ROUTER_USE_KV_EVENTS",
        "Follow the workers' KV events; otherwise cached blocks are predicted from the requests routed to each worker",
        aliases=["--kv-events"],
    )
    load_aware: bool = option(
        False, "--load-aware", "DYN_ROUTER_LOAD_AWARE", "Route by load alone in kv mode: no credit, no events, no reuse"
    )
    track_active_blocks: bool = option(
        True,
        "--router-track-active-blocks",
        "DYN_ROUTER_TRACK_ACTIVE_BLOCKS",
        "Count the blocks of active requests",
        aliases=["--track-active-blocks"],
    )
    track_output_blocks: bool = option(
        False,
        "--router-track-output-blocks",
        "DYN_ROUTER_TRACK_OUTPUT_BLOCKS",
        "Count the blocks of output tokens too",
        aliases=["--track-output-blocks"],
    )
    assume_kv_reuse: bool = option(
        True,
        "--router-assume-kv-reuse",
        "DYN_ROUTER_ASSUME_KV_REUSE",
        "Count the common prefix of concurrent requests on a worker once",
        aliases=["--assume-kv-reuse"],
    )
    track_prefill_tokens: bool = option(
        True,
        "--router-track-prefill-tokens",
        "DYN_ROUTER_TRACK_PREFILL_TOKENS",
        "Count prompts that are being computed",
    )
    router_ttl_secs: float = option(
        120.0, "--router-ttl-secs", "DYN_ROUTER_TTL_SECS", "Lifetime of predicted blocks without KV events, in seconds"
    )
    approximate_cache_policy: str = option(
        "ttl",
        "--router-approximate-cache-policy",
        "DYN_ROUTER_APPROXIMATE_CACHE_POLICY",
        "Expiry of predicted blocks without KV events: after their lifetime (ttl), or when the worker's cache is full (lru)",
        choices=["ttl", "lru"],
    )
    predicted_ttl_secs: float | None = option(
        None,
        "--router-predicted-ttl-secs",
        "DYN_ROUTER_PREDICTED_TTL_SECS",
        "Lifetime of blocks predicted until the worker's own KV event, in seconds; default: no prediction",
    )
    queue_threshold: float | None = option(
        None,
        "--router-queue-threshold",
        "DYN_ROUTER_QUEUE_THRESHOLD",
        "Multiple of a worker's largest batch; requests queue while every worker has more active prefill tokens than that",
    )
    queue_policy: str | None = option(
        None,
        "--router-queue-policy",
        "DYN_ROUTER_QUEUE_POLICY",
        "Order of queued requests: arrival (fcfs), or shortest uncached prompt first (wspt); balanced defaults to wspt",
        choices=["fcfs", "wspt"],
    )
    session_affinity_ttl_secs: int | None = option(
        None,
        "--router-session-affinity-ttl-secs",
        "DYN_ROUTER_SESSION_AFFINITY_TTL_SECS",
        "Idle time after which a session (header x-dynamo-session-id) loses its worker, in seconds; enables session affinity",
    )
    session_affinity_mode: str = option(
        "hard",
        "--router-session-affinity-mode",
        "DYN_ROUTER_SESSION_AFFINITY_MODE",
        "hard: use the session's worker even above its busy threshold; soft: only while it is eligible",
        choices=["hard", "soft"],
    )
    prefill_load_model: str = option(
        "none",
        "--router-prefill-load-model",
        "DYN_ROUTER_PREFILL_LOAD_MODEL",
        "Estimate of prefill progress: ais counts the oldest prompt of a worker less over time (see the --ais- flags)",
        choices=["none", "ais", "aic"],
    )
    shared_cache_type: str = option(
        "none",
        "--shared-cache-type",
        "DYN_SHARED_CACHE_TYPE",
        "Shared cache whose blocks count as cached: hicache follows the Mooncake store of SGLang's HiCache",
        choices=["none", "hicache"],
    )
    enable_session_prefix_index: bool = option(
        False,
        "--enable-session-prefix-index",
        "DYN_ENABLE_SESSION_PREFIX_INDEX",
        "Keep the prompts of sessions, whether cached or not; returned by GET /routing/sessions",
    )
    event_threads: int = option(
        4,
        "--router-event-threads",
        "DYN_ROUTER_EVENT_THREADS",
        f"{NO_EFFECT}: one event loop applies the events",
    )
    use_remote_indexer: bool = option(
        False,
        "--use-remote-indexer",
        "DYN_USE_REMOTE_INDEXER",
        "Query the index of another router (python -m dynamo.router --serve-indexer) for cached blocks",
    )
    serve_indexer: bool = option(
        False,
        "--serve-indexer",
        "DYN_SERVE_INDEXER",
        "Serve this router's index to other routers (--use-remote-indexer)",
    )
    replica_sync: bool = option(
        False,
        "--router-replica-sync",
        "DYN_ROUTER_REPLICA_SYNC",
        "Exchange routed requests with the routers of the same workers",
    )
    durable_kv_events: bool = option(
        False,
        "--durable-kv-events",
        "DYN_DURABLE_KV_EVENTS",
        "Receive KV events through a JetStream stream of the NATS server; workers need the same flag",
    )
    router_snapshot_threshold: int = option(
        1_000_000,
        "--router-snapshot-threshold",
        "DYN_ROUTER_SNAPSHOT_THRESHOLD",
        "Messages in the stream of --durable-kv-events beyond which a snapshot is written and the stream purged",
    )
    router_reset_states: bool = option(
        False,
        "--router-reset-states",
        "DYN_ROUTER_RESET_STATES",
        "Delete the stream and the snapshot of --durable-kv-events at the start",
    )
    policy_config: str | None = option(
        None,
        "--router-policy-config",
        "DYN_ROUTER_POLICY_CONFIG",
        "YAML file with cost parameters and classes of queued requests; overrides the flags above",
    )
    index_blocks_max: int = option(
        BLOCKS_MAX,
        "--router-index-max-blocks",
        "DYN_ROUTER_INDEX_MAX_BLOCKS",
        "Maximum blocks of the index; the least recently used ones are dropped",
    )


def router_config(options: KvRouterOptions, block_size: int) -> RouterConfig:
    """Return the router configuration for a model of that block size. Raises `ConfigError`."""
    credit, scale = options.overlap_score_credit, options.prefill_load_scale
    if options.overlap_score_weight is not None:
        scale = options.overlap_score_weight
        credit = credit if scale else 0.0
    is_load_only = options.load_aware
    shared = Weights().shared_cache_multiplier
    weights = Weights(
        overlap_score_credit=0.0 if is_load_only else credit,
        overlap_score_credit_decay=options.overlap_score_credit_decay,
        prefill_load_scale=scale,
        decode_active_request_weight=options.decode_active_request_weight,
        host_cache_hit_weight=options.host_cache_hit_weight,
        disk_cache_hit_weight=options.disk_cache_hit_weight,
        shared_cache_multiplier=shared if options.shared_cache_multiplier is None else options.shared_cache_multiplier,
        router_temperature=options.router_temperature,
        assume_kv_reuse=options.assume_kv_reuse and not is_load_only,
        track_prefill_tokens=options.track_prefill_tokens or is_load_only,
    )
    try:
        weights.check()
    except InvalidArgument as error:
        name = error.param or ""
        raise ConfigError(str(error).replace(name, FLAGS.get(name, f"--router-{name.replace('_', '-')}"), 1)) from None
    if weights.shared_cache_multiplier > 1:
        raise ConfigError(f"--shared-cache-multiplier {weights.shared_cache_multiplier:g}: must be between 0 and 1")
    ttl_s = options.session_affinity_ttl_secs
    if ttl_s is not None and not 1 <= ttl_s <= AFFINITY_TTL_MAX_S:
        raise ConfigError(f"--router-session-affinity-ttl-secs {ttl_s}: must be between 1 and {AFFINITY_TTL_MAX_S}")
    if options.index_blocks_max < 1:
        raise ConfigError(f"--router-index-max-blocks {options.index_blocks_max}: must be at least 1")
    if options.router_snapshot_threshold < 1:
        raise ConfigError(f"--router-snapshot-threshold {options.router_snapshot_threshold}: must be at least 1")
    if options.serve_indexer and options.use_remote_indexer:
        raise ConfigError("--serve-indexer and --use-remote-indexer are mutually exclusive")
    if options.event_threads < 1:
        raise ConfigError(f"--router-event-threads {options.event_threads}: must be at least 1")
    options.check_tracking()
    is_estimated = options.prefill_load_model != "none"
    if is_estimated:
        options.check_ais()
    threshold, order = options.queue_threshold, options.queue_policy
    if options.router_policy == "balanced" and not is_load_only:
        threshold = BALANCED_QUEUE_THRESHOLD if threshold is None else threshold
        order = order or BALANCED_QUEUE_POLICY
    return RouterConfig(
        weights=weights,
        policy="balanced" if options.router_policy == "balanced" else "dynamo",
        block_size=max(1, block_size),
        use_kv_events=options.kv_events and not is_load_only and credit > 0,
        track_active_blocks=options.track_active_blocks or is_load_only,
        track_output_blocks=options.track_output_blocks,
        approximate_ttl_s=options.router_ttl_secs,
        approximate_policy="lru" if options.approximate_cache_policy == "lru" else "ttl",
        predicted_ttl_s=None if is_load_only else options.predicted_ttl_secs,
        shared_cache="hicache" if options.shared_cache_type == "hicache" and not is_load_only else "none",
        tracking_hash=KEYED if options.tracking_hash == KEYED else PUBLIC,
        tracking_key_file=options.tracking_key_file,
        tracking_key_id=options.tracking_key_id,
        session_prefixes=options.enable_session_prefix_index,
        prefill_load_model="ais" if is_estimated else "none",
        prefill_estimate=options.prefill_estimate() if is_estimated else ESTIMATE,
        queue_threshold=threshold,
        queue_policy="wspt" if order == "wspt" else "fcfs",
        affinity_ttl_s=ttl_s,
        affinity_mode="soft" if options.session_affinity_mode == "soft" else "hard",
        replica_sync=options.replica_sync,
        use_remote_indexer=options.use_remote_indexer and not is_load_only and credit > 0,
        durable_kv_events=options.durable_kv_events,
        snapshot_threshold=options.router_snapshot_threshold,
        reset_states=options.router_reset_states,
        expiry_s=setting("DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS", EXPIRY_S, float),
        blocks_max=options.index_blocks_max,
    )


def check_files(config: RouterConfig) -> RouterConfig:
    """Return `config` unchanged. Raises `ConfigError` for an unreadable key, at startup and not at the first worker."""
    if config.tracking_hash == KEYED:
        read_key(config.tracking_key_file or "", config.tracking_key_id or "")
    return config
