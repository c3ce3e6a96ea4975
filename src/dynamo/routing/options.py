"""KV router options: flags, variables and defaults of serving-plane.md §4.2, shared by whoever routes.

Upstream marks some flags as deprecated in favour of `--router-policy-config`; they work here all the same.
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

AFFINITY_TTL_MAX_S = 31_536_000  # A year, as upstream.

FLAGS = {
    "overlap_score_credit": "--router-kv-overlap-score-credit",
    "overlap_score_credit_decay": "--router-kv-overlap-score-credit-decay",
    "router_temperature": "--router-temperature",
    "shared_cache_multiplier": "--shared-cache-multiplier",
}
"""Of weights whose flags are not `--router-` and their names."""


@dataclass(frozen=True, kw_only=True)  # No slots: it is mixed into the options of those who route.
class KvRouterOptions(AisOptions, TrackingOptions):
    """KV router (`--router-mode kv`)."""

    router_policy: str = option(
        "dynamo",
        "--router-policy",
        "DYN_ROUTER_POLICY",
        "The cost function of kv mode: upstream's, or ours, which counts what a request delays others by",
        choices=["dynamo", "balanced"],
    )
    overlap_score_credit: float = option(
        1.0,
        "--router-kv-overlap-score-credit",
        "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
        "How much of a prefill block a cached one saves; 0 routes by load alone",
    )
    overlap_score_credit_decay: float = option(
        0.0,
        "--router-kv-overlap-score-credit-decay",
        "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",
        "How fast that credit shrinks on a worker with more prefill waiting than the others",
    )
    overlap_score_weight: float | None = option(
        None,
        "--router-kv-overlap-score-weight",
        "DYN_OVERLAP_SCORE_WEIGHT",
        "Older spelling of --router-prefill-load-scale; 0 also sets the credit to 0",
        aliases=["--kv-overlap-score-weight"],
    )
    prefill_load_scale: float = option(
        1.0,
        "--router-prefill-load-scale",
        "DYN_ROUTER_PREFILL_LOAD_SCALE",
        "What a block to be computed costs against one that is occupied",
    )
    decode_active_request_weight: float = option(
        0.0,
        "--router-decode-active-request-weight",
        "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT",
        "What a request under way costs, in blocks",
    )
    host_cache_hit_weight: float = option(
        0.75,
        "--router-host-cache-hit-weight",
        "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT",
        "What a block in host memory saves of one to be computed",
    )
    disk_cache_hit_weight: float = option(
        0.25, "--router-disk-cache-hit-weight", "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT", "The same for a block on disk"
    )
    shared_cache_multiplier: float | None = option(
        None,
        "--shared-cache-multiplier",
        "DYN_SHARED_CACHE_MULTIPLIER",
        "The same for a block in a cache that every worker reads (0.5)",
    )
    router_temperature: float = option(
        0.0,
        "--router-temperature",
        "DYN_ROUTER_TEMPERATURE",
        "0 takes the best worker; above, others are drawn too, the more the higher",
    )
    kv_events: bool = option(
        True,
        "--router-kv-events",
        "DYN_ROUTER_USE_KV_EVENTS",
        "Workers tell what they hold; without, it is guessed from what they were given",
        aliases=["--kv-events"],
    )
    load_aware: bool = option(
        False, "--load-aware", "DYN_ROUTER_LOAD_AWARE", "kv mode by load alone: no credit, no events, no reuse"
    )
    track_active_blocks: bool = option(
        True,
        "--router-track-active-blocks",
        "DYN_ROUTER_TRACK_ACTIVE_BLOCKS",
        "Count the blocks of requests under way",
        aliases=["--track-active-blocks"],
    )
    track_output_blocks: bool = option(
        False,
        "--router-track-output-blocks",
        "DYN_ROUTER_TRACK_OUTPUT_BLOCKS",
        "Count the blocks that outputs fill as well",
        aliases=["--track-output-blocks"],
    )
    assume_kv_reuse: bool = option(
        True,
        "--router-assume-kv-reuse",
        "DYN_ROUTER_ASSUME_KV_REUSE",
        "Requests that begin alike share blocks on a worker",
        aliases=["--assume-kv-reuse"],
    )
    track_prefill_tokens: bool = option(
        True, "--router-track-prefill-tokens", "DYN_ROUTER_TRACK_PREFILL_TOKENS", "Count prompts being computed"
    )
    router_ttl_secs: float = option(
        120.0, "--router-ttl-secs", "DYN_ROUTER_TTL_SECS", "Without KV events: how long a guess is believed"
    )
    approximate_cache_policy: str = option(
        "ttl",
        "--router-approximate-cache-policy",
        "DYN_ROUTER_APPROXIMATE_CACHE_POLICY",
        "Without KV events: guesses end by time, or when a worker's cache must be full",
        choices=["ttl", "lru"],
    )
    predicted_ttl_secs: float | None = option(
        None,
        "--router-predicted-ttl-secs",
        "DYN_ROUTER_PREDICTED_TTL_SECS",
        "With KV events: how long what was just sent to a worker counts as held before it says so",
    )
    queue_threshold: float | None = option(
        None,
        "--router-queue-threshold",
        "DYN_ROUTER_QUEUE_THRESHOLD",
        "Requests wait while every worker has more prefill under way than this multiple of its largest batch",
    )
    queue_policy: str | None = option(
        None,
        "--router-queue-policy",
        "DYN_ROUTER_QUEUE_POLICY",
        "Who waits goes in order of arrival (fcfs), or the shortest uncached prompt first (wspt, which balanced does)",
        choices=["fcfs", "wspt"],
    )
    session_affinity_ttl_secs: int | None = option(
        None,
        "--router-session-affinity-ttl-secs",
        "DYN_ROUTER_SESSION_AFFINITY_TTL_SECS",
        "The turns of a session (header x-dynamo-session-id) go to the worker of its first one until it was idle for so long",
    )
    session_affinity_mode: str = option(
        "hard",
        "--router-session-affinity-mode",
        "DYN_ROUTER_SESSION_AFFINITY_MODE",
        "hard: to that worker even when it is over a busy threshold; soft: while it may be chosen as others may",
        choices=["hard", "soft"],
    )
    prefill_load_model: str = option(
        "none",
        "--router-prefill-load-model",
        "DYN_ROUTER_PREFILL_LOAD_MODEL",
        "ais: the oldest prompt of each worker counts less the longer it is computed; see the --ais- flags",
        choices=["none", "ais", "aic"],
    )
    shared_cache_type: str = option(
        "none",
        "--shared-cache-type",
        "DYN_SHARED_CACHE_TYPE",
        "Count what a cache has that every worker reads: hicache follows the Mooncake store of SGLang's HiCache",
        choices=["none", "hicache"],
    )
    enable_session_prefix_index: bool = option(
        False,
        "--enable-session-prefix-index",
        "DYN_ENABLE_SESSION_PREFIX_INDEX",
        "Keep what each session was told, whoever still holds it; shown by GET /routing/sessions",
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
        "Ask a router that serves its index (python -m dynamo.router --serve-indexer) what workers hold",
    )
    serve_indexer: bool = option(
        False, "--serve-indexer", "DYN_SERVE_INDEXER", "Tell other routers what the workers hold (--use-remote-indexer)"
    )
    replica_sync: bool = option(
        False,
        "--router-replica-sync",
        "DYN_ROUTER_REPLICA_SYNC",
        "Routers of the same workers tell each other what they gave to whom",
    )
    durable_kv_events: bool = option(
        False,
        "--durable-kv-events",
        "DYN_DURABLE_KV_EVENTS",
        "Workers tell what they hold through a JetStream stream of the NATS server, which workers must be told as well",
    )
    router_snapshot_threshold: int = option(
        1_000_000,
        "--router-snapshot-threshold",
        "DYN_ROUTER_SNAPSHOT_THRESHOLD",
        "With --durable-kv-events: beyond so many messages in the stream their sum is kept as a snapshot",
    )
    router_reset_states: bool = option(
        False,
        "--router-reset-states",
        "DYN_ROUTER_RESET_STATES",
        "With --durable-kv-events: drop the stream and the snapshot of former routers at the start",
    )
    policy_config: str | None = option(
        None,
        "--router-policy-config",
        "DYN_ROUTER_POLICY_CONFIG",
        "YAML file with cost parameters and classes of waiting requests; it beats the flags above",
    )
    index_blocks_max: int = option(
        BLOCKS_MAX,
        "--router-index-max-blocks",
        "DYN_ROUTER_INDEX_MAX_BLOCKS",
        "Bound of the index; beyond it what was used longest ago is forgotten",
    )


def router_config(options: KvRouterOptions, block_size: int) -> RouterConfig:
    """What the options mean for a model of that block size. Raises `ConfigError`."""
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
        raise ConfigError(f"--shared-cache-multiplier {weights.shared_cache_multiplier:g}: expected 0 to 1")
    ttl_s = options.session_affinity_ttl_secs
    if ttl_s is not None and not 1 <= ttl_s <= AFFINITY_TTL_MAX_S:
        raise ConfigError(f"--router-session-affinity-ttl-secs {ttl_s}: expected 1 to {AFFINITY_TTL_MAX_S}")
    if options.index_blocks_max < 1:
        raise ConfigError(f"--router-index-max-blocks {options.index_blocks_max}: expected at least 1")
    if options.router_snapshot_threshold < 1:
        raise ConfigError(f"--router-snapshot-threshold {options.router_snapshot_threshold}: expected at least 1")
    if options.serve_indexer and options.use_remote_indexer:
        raise ConfigError("--serve-indexer and --use-remote-indexer exclude each other: who asks has nothing to tell")
    if options.event_threads < 1:
        raise ConfigError(f"--router-event-threads {options.event_threads}: expected at least 1")
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
    """The same. Raises `ConfigError` for a key that cannot be read: better now than with the first worker."""
    if config.tracking_hash == KEYED:
        read_key(config.tracking_key_file or "", config.tracking_key_id or "")
    return config
