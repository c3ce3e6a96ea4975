"""Router settings of a run: `--router-config` checked against the names and the effects that settings have in a simulation.

Names are those of `RoutingConfig`, `CostWeights` and `RefusalRules`, or upstream's (`KvRouterConfig`). A setting without
effect is an error unless it has its default value, which objects made by upstream's classes contain.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.kv_router.config import BALANCED_QUEUE, CostWeights, RoutingConfig
from dynamo.kv_router.policy import PolicyProfile
from dynamo.kv_router.queue import QUEUE_TIMEOUT_S, PolicyClass
from dynamo.routing.busy import Thresholds
from dynamo.routing.python_config import KvRouterConfig
from dynamo.routing.settings import SETS

FLAG = "--router-config"
ALIASES: Mapping[str, str] = {
    **{name: target.removeprefix("weights.") for name, target in SETS.items()},
    "temperature": "router_temperature",
    "overlap_score_weight": "prefill_load_scale",
}
"""Other names of settings, most of them upstream's."""
OUTSIDE = frozenset(
    {
        "block_size", "use_remote_indexer", "replica_sync", "durable_kv_events", "snapshot_threshold", "reset_states",
        "shared_cache", "shared_cache_multiplier", "tracking_hash", "tracking_key_file", "tracking_key_id",
        "session_prefixes", "track_output_blocks",
    }
)  # fmt: skip
"""Settings of parts that a simulation does not have, or takes from the engine (block size)."""
UPSTREAM_COST = frozenset({"prefill_load_scale", "overlap_score_credit_decay", "decode_active_request_weight"})
"""Settings of upstream's cost function that `balanced` does not read."""


class RefusalRules(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions under which a router refuses a request, as a frontend does with status 503 or 529."""

    queue_timeout_s: float = QUEUE_TIMEOUT_S
    """Maximum wait in the router's queue (DYN_ROUTER_QUEUE_TIMEOUT_SECS)."""
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | None = None
    request_queue_limit_per_worker: int | None = None
    raw_isl_token_queue_limit_per_worker: int | None = None
    cached_token_queue_limit_per_worker: int | None = None

    def check(self) -> "RefusalRules":
        """Return the rules. Raise `InvalidArgument` for a number that is out of range."""
        if not self.queue_timeout_s > 0:
            raise InvalidArgument(f"queue_timeout_s must be more than 0, got {self.queue_timeout_s:g}")
        self.thresholds().check()
        return self

    def thresholds(self) -> Thresholds:
        """Return the busy thresholds."""
        return Thresholds(**{name: getattr(self, name) for name in Thresholds.__struct_fields__})

    def profile(self, config: RoutingConfig) -> PolicyProfile:
        """Return the queue's only class with its limits."""
        limits = {name: getattr(self, name) for name in LIMITS}
        one = PolicyClass(
            queue_policy=config.queue_policy, prefill_busy_threshold_frac=config.queue_threshold, **limits
        )
        return PolicyProfile(policy_classes=[one])


LIMITS = tuple(name for name in RefusalRules.__struct_fields__ if name.endswith("_limit_per_worker"))
OWN = (*CostWeights.__struct_fields__, *RoutingConfig.__struct_fields__, *RefusalRules.__struct_fields__)
NAMES = tuple(sorted(set(OWN) - OUTSIDE - {"weights"}))
"""Settings that can have an effect."""


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """The settings of one router."""

    config: RoutingConfig
    rules: RefusalRules


def router_settings(given: Mapping[str, Any], block_tokens: int, *, is_balanced: bool = False) -> RouterSettings:
    """Return upstream's defaults with the given settings. Raise `ConfigError` for one that is unknown or has no effect."""
    named = canonical_names(given)
    reasons = without_effect(named, is_balanced=is_balanced)
    for name, reason in reasons.items():
        raise ConfigError(f"{FLAG}: {name} {named[name]!r}: {reason}")
    kept = {name: value for name, value in named.items() if name not in OUTSIDE and name in OWN}
    weights = {name: kept.pop(name) for name in CostWeights.__struct_fields__ if name in kept}
    rules = {name: kept.pop(name) for name in RefusalRules.__struct_fields__ if name in kept}
    if is_balanced or kept.get("policy") == "balanced":
        kept = {**BALANCED_QUEUE, **kept, "policy": "balanced"}
    try:
        config = msgspec.convert({"block_size": block_tokens, **kept, "weights": weights}, RoutingConfig)
        config.weights.check()
        return RouterSettings(config, msgspec.convert(rules, RefusalRules).check())
    except (msgspec.ValidationError, InvalidArgument) as error:
        raise ConfigError(f"{FLAG}: {error}") from None


def canonical_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under the names of `NAMES`. Raise `ConfigError` for an unknown one."""
    upstream = {one.name for one in fields(KvRouterConfig)}
    found: dict[str, Any] = {}
    for name, value in given.items():
        own = ALIASES.get(name, name)
        if own not in OWN and own not in upstream:
            raise ConfigError(f"{FLAG}: unknown setting {name}: expected one of {', '.join(NAMES)}")
        if not (own in found and value is None):  # `overlap_score_weight` and `prefill_load_scale` are one setting.
            found[own] = value
    return {name: value for name, value in found.items() if value is not None or _default(name) is None}


def without_effect(named: Mapping[str, Any], *, is_balanced: bool) -> dict[str, str]:
    """Return the settings that have another value than the default and no effect, with the reason."""
    is_balanced = is_balanced or named.get("policy") == "balanced"
    queue = BALANCED_QUEUE if is_balanced else {}
    uses_events = named.get("use_kv_events", True)
    has_queue = named.get("queue_threshold", queue.get("queue_threshold")) is not None
    conditions = {
        **dict.fromkeys(("queue_policy", "queue_timeout_s", *LIMITS), (has_queue, "requires queue_threshold")),
        "affinity_mode": (named.get("affinity_ttl_s") is not None, "requires affinity_ttl_s"),
        "predicted_ttl_s": (uses_events, "requires use_kv_events true"),
        "approximate_ttl_s": (not uses_events, "requires use_kv_events false"),
        "approximate_policy": (not uses_events, "requires use_kv_events false"),
        "prefill_estimate": (named.get("prefill_load_model") == "ais", "requires prefill_load_model ais"),
        **dict.fromkeys(UPSTREAM_COST, (not is_balanced, "has no effect with balanced")),
    }
    found: dict[str, str] = {}
    for name, value in named.items():
        if value == _default(name):
            continue
        if name in OUTSIDE or name not in OWN:
            found[name] = f"has no effect in a simulation; settings with one are {', '.join(NAMES)}"
        elif name in conditions and not conditions[name][0]:
            found[name] = conditions[name][1]
    return found


def _default(name: str) -> Any:
    for struct in (CostWeights, RoutingConfig, RefusalRules):
        if name in struct.__struct_fields__:
            return getattr(struct(), name)
    return getattr(KvRouterConfig(), name, None)
