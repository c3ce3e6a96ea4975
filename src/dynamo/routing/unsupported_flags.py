"""Unsupported flags of routing: upstream's, of routers and of workers that advertise routing settings.

Pure: tables.
"""

from dynamo.core.waiting import Waiting


def _router(word: str, default: str | bool = "", *aliases: str) -> Waiting:
    return Waiting(f"--router-{word}", f"DYN_ROUTER_{word.upper().replace('-', '_')}", default, aliases)


def _ais(word: str, default: str = "") -> Waiting:
    return Waiting(f"--ais-{word}", None, default, (f"--aic-{word}",))


ROUTER: tuple[Waiting, ...] = (
    _router("conditional-disagg", False),
    _router("conditional-disagg-config"),
    _router("prefill-policy"),
    _router("decode-policy"),
)
"""Flags of routers that serve only one worker type."""

ADVERTISED: tuple[Waiting, ...] = (
    *ROUTER,
    _router("session-affinity-ttl-secs"),
    _router("session-affinity-mode", "hard"),
    Waiting("--load-aware", "DYN_ROUTER_LOAD_AWARE", False),
    _router("kv-overlap-score-credit", "1.0"),
    _router("kv-overlap-score-credit-decay", "0.0"),
    Waiting("--router-kv-overlap-score-weight", "DYN_OVERLAP_SCORE_WEIGHT", "", ("--kv-overlap-score-weight",)),
    _router("prefill-load-scale", "1.0"),
    _router("decode-active-request-weight", "0.0"),
    _router("host-cache-hit-weight", "0.75"),
    _router("disk-cache-hit-weight", "0.25"),
    _router("temperature", "0.0"),
    Waiting("--router-kv-events", "DYN_ROUTER_USE_KV_EVENTS", True, ("--kv-events",)),
    _router("replica-sync", False),
    _router("track-active-blocks", True, "--track-active-blocks"),
    _router("track-output-blocks", False, "--track-output-blocks"),
    _router("assume-kv-reuse", True, "--assume-kv-reuse"),
    _router("track-prefill-tokens", True),
    _router("tracking-hash", "public-xxh3-v1"),
    _router("tracking-key-file"),
    _router("tracking-key-id"),
    _router("prefill-load-model", "none"),
    _router("ttl-secs", "120.0"),
    _router("approximate-cache-policy", "ttl"),
    _router("queue-threshold"),
    _router("policy-config"),
    _router("event-threads", "4"),
    _router("queue-policy", "fcfs"),
    Waiting("--use-remote-indexer", "DYN_USE_REMOTE_INDEXER", False),
    Waiting("--enable-session-prefix-index", "DYN_ENABLE_SESSION_PREFIX_INDEX", False),
    Waiting("--shared-cache-multiplier", "DYN_SHARED_CACHE_MULTIPLIER", ""),
    Waiting("--shared-cache-type", "DYN_SHARED_CACHE_TYPE", "none"),
    _router("predicted-ttl-secs"),
)
"""Flags of workers that only advertise the value to routers; routers support them."""

AIS: tuple[Waiting, ...] = (
    _ais("perf-config"),
    _ais("backend"),
    _ais("system"),
    _ais("backend-version"),
    _ais("tp-size"),
    _ais("model-path"),
    _ais("moe-tp-size"),
    _ais("moe-ep-size"),
    _ais("attention-dp-size"),
    _ais("nextn"),
    _ais("nextn-accept-rates"),
    _ais("mtp-seed", "42"),
)
"""Flags of workers for AISimulate, a performance model of engines."""
