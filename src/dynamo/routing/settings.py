"""Settings of routing: the one declaration of each, from which flags, Python API, model card and policy file derive.

A field has the name that upstream's `KvRouterConfig` gives the setting. `option()` declares flag, variable, default,
choices and help; `surfaces()` declares the field of `kv_router.config.RoutingConfig` that it sets, its range, and its
place in policy files and on model cards. The classes group the settings by the programs that have them:

| class | frontend, router | `KvRouterConfig` | published by workers |
|---|---|---|---|
| `KvOptions` | yes | yes | yes |
| `TrackingOptions`, `KvRouterSettings` | yes | yes | |
| `AffinityOptions` | yes | | yes |
| `KvRouterOptions`, `AisOptions` | yes | | |
| `BusyOptions` | frontend | | yes |
| `DisaggregationOptions` | frontend | | |

Upstream marks some flags as deprecated in favour of `--router-policy-config`; here they remain fully supported.
"""

import inspect
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

from dynamo.core.config import NO_EFFECT, option, setting
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.core.unsupported_flags import UnsupportedFlag
from dynamo.kv_router.config import BALANCED_QUEUE, BLOCKS_MAX, EXPIRY_S, CostWeights, RoutingConfig
from dynamo.kv_router.tracking import KEYED, PUBLIC, TrackingKey, check_tracking, read_key
from dynamo.routing.ais_options import AisOptions
from dynamo.routing.busy import Thresholds
from dynamo.routing.prefill_plan import CONFIG_FLAG, FLAG, Conditional

AFFINITY_TTL_MAX_S = 31_536_000  # One year, as upstream.
LOAD_AWARE: Mapping[str, Any] = {
    "overlap_score_credit": 0.0,
    "use_kv_events": False,
    "use_remote_indexer": False,
    "router_assume_kv_reuse": False,
    "router_track_prefill_tokens": True,
    "router_track_active_blocks": True,
    "router_predicted_ttl_secs": None,
    "shared_cache_type": "none",
}
"""Settings that `--load-aware` replaces."""

C = TypeVar("C")


def surfaces(
    sets: str | None = None,
    *,
    yaml: str | None = None,
    bounds: tuple[int, int | None] | None = None,
    is_always_on_card: bool = True,
) -> dict[str, Any]:
    """Return the metadata of a setting for surfaces other than flags.

    `sets` is the field of `RoutingConfig`; `yaml` the section of a policy file: `router` or `parameters`; `bounds` the
    smallest and the largest value. Settings that are not always on a model card are on it if they are not the default.
    """
    return {"sets": sets, "yaml": yaml, "bounds": bounds, "is_always_on_card": is_always_on_card}


@dataclass(frozen=True, kw_only=True)  # No slots, as the classes below: mixed into the options of several programs.
class BusyOptions:
    """Busy thresholds."""

    # fmt: off
    active_decode_blocks_threshold: float | None = option(None, "--active-decode-blocks-threshold",
        "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD",
        "Share of a worker's KV blocks (0 to 1) above which it is busy; if all are busy, requests get status 529",
        accepts_none=True)
    active_prefill_tokens_threshold: int | None = option(None, "--active-prefill-tokens-threshold",
        "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD", "Prompt tokens queued or being computed above which a worker is busy",
        accepts_none=True)
    active_prefill_tokens_threshold_frac: float | None = option(None, "--active-prefill-tokens-threshold-frac",
        "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC",
        "The same limit as a multiple of the worker's --max-num-batched-tokens", accepts_none=True)
    # fmt: on

    @property
    def thresholds(self) -> Thresholds:
        """Return the initial busy thresholds of every model."""
        return Thresholds(**{one.name: getattr(self, one.name) for one in fields(BusyOptions)})


@dataclass(frozen=True, kw_only=True)
class AffinityOptions:
    """Session affinity."""

    # fmt: off
    session_affinity_ttl_secs: int | None = option(None, "--router-session-affinity-ttl-secs",
        "DYN_ROUTER_SESSION_AFFINITY_TTL_SECS",
        "Idle time after which a session (header x-dynamo-session-id) loses its worker, in seconds; enables session affinity",
        extra=surfaces("affinity_ttl_s", bounds=(1, AFFINITY_TTL_MAX_S)))
    session_affinity_mode: str = option("hard", "--router-session-affinity-mode", "DYN_ROUTER_SESSION_AFFINITY_MODE",
        "hard: use the session's worker even above its busy threshold; soft: only while it is eligible",
        choices=["hard", "soft"], extra=surfaces("affinity_mode"))
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class TrackingOptions:
    """Hashes of active requests."""

    # fmt: off
    router_tracking_hash: str = option(PUBLIC, "--router-tracking-hash", "DYN_ROUTER_TRACKING_HASH",
        "Hash of active requests' blocks, exchanged between routers: public, or with a secret key",
        choices=[PUBLIC, KEYED], extra=surfaces("tracking_hash", yaml="router", is_always_on_card=False))
    router_tracking_key_file: str | None = option(None, "--router-tracking-key-file", "DYN_ROUTER_TRACKING_KEY_FILE",
        "File with the 32-byte binary key of keyed-xxh3-v1",
        extra=surfaces("tracking_key_file", yaml="router", is_always_on_card=False))
    router_tracking_key_id: str | None = option(None, "--router-tracking-key-id", "DYN_ROUTER_TRACKING_KEY_ID",
        "Name of the key of keyed-xxh3-v1", extra=surfaces("tracking_key_id", yaml="router", is_always_on_card=False))
    # fmt: on

    def check_tracking(self) -> None:
        """Raise `ConfigError` for conflicting flags."""
        check_tracking(self.router_tracking_hash, self.router_tracking_key_file, self.router_tracking_key_id)

    def tracking_key(self) -> TrackingKey | None:
        """Return the key, or None without keyed hashes. Raises `ConfigError` if it cannot be read."""
        if self.router_tracking_hash != KEYED:
            return None
        return read_key(self.router_tracking_key_file or "", self.router_tracking_key_id or "")


@dataclass(frozen=True, kw_only=True)
class KvOptions:
    """KV router (`--router-mode kv`)."""

    # fmt: off
    overlap_score_credit: float = option(1.0, "--router-kv-overlap-score-credit", "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
        "Share of a prefill block that a cached block saves; 0 routes by load alone",
        extra=surfaces("weights.overlap_score_credit", yaml="parameters"))
    overlap_score_credit_decay: float = option(0.0, "--router-kv-overlap-score-credit-decay",
        "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",
        "Decrease of that credit on workers with more queued prefill than the others; 0 disables it",
        extra=surfaces("weights.overlap_score_credit_decay", yaml="parameters"))
    overlap_score_weight: float | None = option(None, "--router-kv-overlap-score-weight", "DYN_OVERLAP_SCORE_WEIGHT",
        "Former name of --router-prefill-load-scale; 0 also sets the credit to 0",
        aliases=["--kv-overlap-score-weight"])
    prefill_load_scale: float = option(1.0, "--router-prefill-load-scale", "DYN_ROUTER_PREFILL_LOAD_SCALE",
        "Cost of a block to be computed, relative to an occupied block",
        extra=surfaces("weights.prefill_load_scale", yaml="parameters"))
    decode_active_request_weight: float = option(0.0, "--router-decode-active-request-weight",
        "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT", "Cost of an active request, in blocks",
        extra=surfaces("weights.decode_active_request_weight", yaml="parameters", is_always_on_card=False))
    host_cache_hit_weight: float = option(0.75, "--router-host-cache-hit-weight", "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT",
        "Share of a prefill block that a block in host memory saves",
        extra=surfaces("weights.host_cache_hit_weight", yaml="router"))
    disk_cache_hit_weight: float = option(0.25, "--router-disk-cache-hit-weight", "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT",
        "The same share for a block on disk", extra=surfaces("weights.disk_cache_hit_weight", yaml="router"))
    shared_cache_multiplier: float | None = option(None, "--shared-cache-multiplier", "DYN_SHARED_CACHE_MULTIPLIER",
        "The same share for a block in a cache that all workers read, 0 to 1; default: 0.5",
        extra=surfaces("weights.shared_cache_multiplier", yaml="parameters", bounds=(0, 1), is_always_on_card=False))
    router_temperature: float = option(0.0, "--router-temperature", "DYN_ROUTER_TEMPERATURE",
        "0 chooses the cheapest worker; higher values spread requests over more workers",
        extra=surfaces("weights.router_temperature", yaml="parameters"))
    use_kv_events: bool = option(True, "--router-kv-events", "DYN_ROUTER_USE_KV_EVENTS",
        "Follow the workers' KV events; otherwise cached blocks are predicted from the requests routed to each worker",
        aliases=["--kv-events"], extra=surfaces("use_kv_events", yaml="router"))
    router_track_active_blocks: bool = option(True, "--router-track-active-blocks", "DYN_ROUTER_TRACK_ACTIVE_BLOCKS",
        "Count the blocks of active requests", aliases=["--track-active-blocks"],
        extra=surfaces("track_active_blocks", yaml="router"))
    router_track_output_blocks: bool = option(False, "--router-track-output-blocks", "DYN_ROUTER_TRACK_OUTPUT_BLOCKS",
        "Count the blocks of output tokens too", aliases=["--track-output-blocks"],
        extra=surfaces("track_output_blocks", yaml="router"))
    router_assume_kv_reuse: bool = option(True, "--router-assume-kv-reuse", "DYN_ROUTER_ASSUME_KV_REUSE",
        "Count the common prefix of concurrent requests on a worker once", aliases=["--assume-kv-reuse"],
        extra=surfaces("weights.assume_kv_reuse", yaml="router"))
    router_track_prefill_tokens: bool = option(True, "--router-track-prefill-tokens", "DYN_ROUTER_TRACK_PREFILL_TOKENS",
        "Count prompts that are being computed", extra=surfaces("weights.track_prefill_tokens", yaml="router"))
    router_ttl_secs: float = option(120.0, "--router-ttl-secs", "DYN_ROUTER_TTL_SECS",
        "Lifetime of predicted blocks without KV events, in seconds",
        extra=surfaces("approximate_ttl_s", yaml="router"))
    router_approximate_cache_policy: str = option("ttl", "--router-approximate-cache-policy",
        "DYN_ROUTER_APPROXIMATE_CACHE_POLICY",
        "Expiry of predicted blocks without KV events: after their lifetime (ttl), or when the worker's cache is full (lru)",
        choices=["ttl", "lru"], extra=surfaces("approximate_policy", yaml="router", is_always_on_card=False))
    router_predicted_ttl_secs: float | None = option(None, "--router-predicted-ttl-secs",
        "DYN_ROUTER_PREDICTED_TTL_SECS",
        "Lifetime of blocks predicted until the worker's own KV event, in seconds; default: no prediction",
        extra=surfaces("predicted_ttl_s", yaml="router"))
    router_queue_threshold: float | None = option(None, "--router-queue-threshold", "DYN_ROUTER_QUEUE_THRESHOLD",
        "Multiple of a worker's largest batch; requests queue while every worker has more active prefill tokens than that",
        accepts_none=True, extra=surfaces("queue_threshold"))
    router_queue_policy: str | None = option(None, "--router-queue-policy", "DYN_ROUTER_QUEUE_POLICY",
        "Order of queued requests: arrival (fcfs), newest first (lcfs), shortest uncached prompt first (wspt), or earliest deadline (balanced)",
        choices=["fcfs", "lcfs", "wspt", "deadline"], extra=surfaces("queue_policy"))
    shared_cache_type: str = option("none", "--shared-cache-type", "DYN_SHARED_CACHE_TYPE",
        "Shared cache whose blocks count as cached: hicache follows the Mooncake store of SGLang's HiCache",
        choices=["none", "hicache"], extra=surfaces("shared_cache", yaml="router"))
    enable_session_prefix_index: bool = option(False, "--enable-session-prefix-index",
        "DYN_ENABLE_SESSION_PREFIX_INDEX",
        "Keep the prompts of sessions, whether cached or not; returned by GET /routing/sessions",
        extra=surfaces("session_prefixes", yaml="router", is_always_on_card=False))
    use_remote_indexer: bool = option(False, "--use-remote-indexer", "DYN_USE_REMOTE_INDEXER",
        "Query the index of another router (python -m dynamo.router --serve-indexer) for cached blocks",
        extra=surfaces("use_remote_indexer", yaml="router"))
    router_replica_sync: bool = option(False, "--router-replica-sync", "DYN_ROUTER_REPLICA_SYNC",
        "Exchange routed requests with the routers of the same workers", extra=surfaces("replica_sync", yaml="router"))
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class KvRouterSettings(KvOptions, TrackingOptions):
    """KV router: policy file, indexes served and prefill estimates."""

    # fmt: off
    router_prefill_load_model: str = option("none", "--router-prefill-load-model", "DYN_ROUTER_PREFILL_LOAD_MODEL",
        "Estimate of prefill progress: ais counts the oldest prompt of a worker less over time (see the --ais- flags)",
        choices=["none", "ais", "aic"], extra=surfaces("prefill_load_model", yaml="router"))
    router_event_threads: int = option(4, "--router-event-threads", "DYN_ROUTER_EVENT_THREADS",
        f"{NO_EFFECT}: one event loop applies the events", extra=surfaces(yaml="router", bounds=(1, None)))
    serve_indexer: bool = option(False, "--serve-indexer", "DYN_SERVE_INDEXER",
        "Serve this router's index to other routers (--use-remote-indexer)", extra=surfaces(yaml="router"))
    router_policy_config: str | None = option(None, "--router-policy-config", "DYN_ROUTER_POLICY_CONFIG",
        "YAML file with cost parameters and classes of queued requests; overrides the flags above")
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class KvRouterOptions(AisOptions, AffinityOptions, KvRouterSettings):
    """KV router: cost function and durable KV events."""

    # fmt: off
    router_policy: str = option("dynamo", "--router-policy", "DYN_ROUTER_POLICY",
        "Cost function of kv mode: dynamo (upstream's), or balanced (latency-based, includes the delay of other requests)",
        choices=["dynamo", "balanced"], extra=surfaces("policy"))
    load_aware: bool = option(False, "--load-aware", "DYN_ROUTER_LOAD_AWARE",
        "Route by load alone in kv mode: no credit, no events, no reuse")
    durable_kv_events: bool = option(False, "--durable-kv-events", "DYN_DURABLE_KV_EVENTS",
        "Receive KV events through a JetStream stream of the NATS server; workers need the same flag",
        extra=surfaces("durable_kv_events"))
    router_snapshot_threshold: int = option(1_000_000, "--router-snapshot-threshold", "DYN_ROUTER_SNAPSHOT_THRESHOLD",
        "Messages in the stream of --durable-kv-events beyond which a snapshot is written and the stream purged",
        extra=surfaces("snapshot_threshold", bounds=(1, None)))
    router_reset_states: bool = option(False, "--router-reset-states", "DYN_ROUTER_RESET_STATES",
        "Delete the stream and the snapshot of --durable-kv-events at the start", extra=surfaces("reset_states"))
    index_blocks_max: int = option(BLOCKS_MAX, "--router-index-max-blocks", "DYN_ROUTER_INDEX_MAX_BLOCKS",
        "Maximum blocks of the index; the least recently used ones are dropped",
        extra=surfaces("blocks_max", bounds=(1, None)))
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class DisaggregationOptions:
    """Routing to prefill and decode workers."""

    # fmt: off
    enforce_disagg: bool = option(False, "--enforce-disagg", "DYN_ENFORCE_DISAGG",
        "Fail requests while no prefill worker is available, instead of computing their prompts on decode workers")
    conditional_disagg: bool = option(False, "--router-conditional-disagg", "DYN_ROUTER_CONDITIONAL_DISAGG",
        "Compute a prompt on its decode worker if that is faster; requires kv mode with KV events")
    conditional_disagg_config: str | None = option(None, "--router-conditional-disagg-config",
        "DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG",
        "JSON object with the conditions: policy (isl_bounding, prefill_load, isl_or_load), eff_isl_threshold, " "eff_isl_ratio_threshold, prefill_busy_threshold, decode_busy_threshold")
    router_prefill_policy: str | None = option(None, "--router-prefill-policy", "DYN_ROUTER_PREFILL_POLICY",
        "Routing policy of prefill workers: default, balanced, or an instance of --router-policy-config")
    router_decode_policy: str | None = option(None, "--router-decode-policy", "DYN_ROUTER_DECODE_POLICY",
        "Routing policy of decode workers; same values")
    # fmt: on

    def conditional(self, queue_threshold: float | None) -> Conditional | None:
        """Return the conditions of prefill on decode workers; None if disabled. Raises `ConfigError`."""
        if not self.conditional_disagg:
            if self.conditional_disagg_config is not None:
                raise ConfigError(f"{CONFIG_FLAG} requires {FLAG}")
            return None
        return Conditional.read(self.conditional_disagg_config, queue_threshold)

    def policy_of(self, worker_type: str) -> str | None:
        """Return the policy that a flag names for workers of that type."""
        return {"prefill": self.router_prefill_policy, "decode": self.router_decode_policy}.get(worker_type)


DEFAULTS: Mapping[str, Any] = {"router_queue_policy": "fcfs"}
"""Defaults of `KvRouterConfig` and of workers; in flags of routers they depend on the cost function."""
QUEUE = ("router_queue_threshold", "router_queue_policy")
SETS: Mapping[str, str] = {
    one.name: one.metadata["sets"] for one in fields(KvRouterOptions) if one.metadata.get("sets") is not None
}
"""Setting and field of `RoutingConfig`; those of `CostWeights` have the prefix `weights.`."""
COST_SETTINGS = frozenset(name for name, sets in SETS.items() if sets.startswith("weights.")) | {"overlap_score_weight"}
"""Settings of upstream's cost function."""
OWN_FIELDS = (
    "expiry_s",
    *(sets for name, sets in SETS.items() if name not in {one.name for one in fields(KvRouterSettings)}),
)
"""Fields of `RoutingConfig` that the frontend decides regardless of the model card."""


def router_config(options: KvRouterOptions, block_size: int) -> RoutingConfig:
    """Return the router configuration for a model of that block size. Raises `ConfigError`."""
    values = _effective(options)
    given = {SETS[name]: value for name, value in values.items() if name in SETS and value is not None}
    weights = _weights({name: value for name, value in given.items() if name.startswith("weights.")})
    _check(options)
    more: dict[str, Any] = {name: value for name, value in given.items() if not name.startswith("weights.")}
    if options.router_prefill_load_model != "none":
        more |= {"prefill_load_model": "ais", "prefill_estimate": options.prefill_estimate()}
    expiry_s = setting("DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS", EXPIRY_S, float)
    return RoutingConfig(weights=weights, block_size=max(1, block_size), expiry_s=expiry_s, **more)


def _effective(options: KvRouterOptions) -> dict[str, Any]:
    """Return the values of all settings, with the effect of some on others."""
    values = {one.name: getattr(options, one.name) for one in fields(KvRouterOptions)}
    if options.overlap_score_weight is not None:
        values["prefill_load_scale"] = options.overlap_score_weight
        if not options.overlap_score_weight:
            values["overlap_score_credit"] = 0.0
    if options.load_aware:
        values |= LOAD_AWARE
    elif options.router_policy == "balanced":
        values |= {name: values[name] if values[name] is not None else BALANCED_QUEUE[SETS[name]] for name in QUEUE}
    for name in ("use_kv_events", "use_remote_indexer"):  # Without a credit, cached blocks do not matter.
        values[name] = values[name] and values["overlap_score_credit"] > 0
    return values


def _weights(given: Mapping[str, Any]) -> CostWeights:
    """Return the weights. Raises `ConfigError` that names the flag."""
    try:
        return CostWeights(**{name.removeprefix("weights."): value for name, value in given.items()}).check()
    except InvalidArgument as error:
        flags = {SETS[one.name]: one.metadata["flag"] for one in fields(KvOptions) if one.name in SETS}
        raise ConfigError(str(error).replace(error.param or "", flags[f"weights.{error.param}"], 1)) from None


def _check(options: KvRouterOptions) -> None:
    """Raise `ConfigError` for a value that is out of range, and for settings that exclude each other."""
    for one in fields(KvRouterOptions):
        value, (low, high) = getattr(options, one.name), one.metadata.get("bounds") or (None, None)
        shown = f"{value:g}" if isinstance(value, float) else value
        if value is None or low is None or low <= value <= (value if high is None else high):
            continue
        expected = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ConfigError(f"{one.metadata['flag']} {shown}: must be {expected}")
    if options.serve_indexer and options.use_remote_indexer:
        raise ConfigError("--serve-indexer and --use-remote-indexer are mutually exclusive")
    options.check_tracking()


def check_files(config: RoutingConfig) -> RoutingConfig:
    """Return `config` unchanged. Raises `ConfigError` for an unreadable key, at startup and not at the first worker."""
    if config.tracking_hash == KEYED:
        read_key(config.tracking_key_file or "", config.tracking_key_id or "")
    return config


def without_variables(config_type: type[C]) -> type[C]:
    """Redeclare the inherited options of a class for workers: without environment variables, with `DEFAULTS`.

    A worker must not read the routing variables of a frontend that runs on the same host.
    """
    own = inspect.get_annotations(config_type)
    inherited = {one.name: one for base in config_type.__bases__ for one in fields(base)}
    for name, one in inherited.items():
        metadata = {**one.metadata, "env": None}
        setattr(config_type, name, field(default=DEFAULTS.get(name, one.default), metadata=metadata))
    config_type.__annotations__ = {name: one.type for name, one in inherited.items()} | own
    return config_type


def as_unsupported(one: "Field[Any]") -> UnsupportedFlag:
    """Return a setting as a flag that a program does not support."""
    default = one.default if isinstance(one.default, bool) else "" if one.default is None else str(one.default)
    return UnsupportedFlag(one.metadata["flag"], one.metadata["env"], default, one.metadata["aliases"])
