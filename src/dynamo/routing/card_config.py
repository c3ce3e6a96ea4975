"""RouterConfig: routing settings that a worker set publishes on its model card and that override the frontend's own."""

import logging
import os
from dataclasses import asdict, dataclass, fields
from typing import Any

from msgspec import to_builtins

from dynamo.core.errors import InvalidArgument
from dynamo.kv_router.affinity import Mode
from dynamo.protocols.model_card import ModelDeploymentCard
from dynamo.routing.busy import Thresholds
from dynamo.routing.options import AFFINITY_TTL_MAX_S
from dynamo.routing.python_config import KvRouterConfig
from dynamo.runtime.push_router import RouterMode

logger = logging.getLogger(__name__)

WORDS = {
    RouterMode.ROUND_ROBIN: "round_robin",
    RouterMode.RANDOM: "random",
    RouterMode.POWER_OF_TWO: "power_of_two_choices",
    RouterMode.LEAST_LOADED: "least_loaded",
    RouterMode.DEVICE_AWARE_WEIGHTED: "device_aware_weighted",
    RouterMode.DIRECT: "direct",
    RouterMode.KV: "k_v",
}
"""Router modes in the spelling of model cards."""
AFFINITY_MODES = ("hard", "soft")
MODES = {word: mode for mode, word in WORDS.items()} | {"kv": RouterMode.KV}
"""Accepted spellings: older cards of this package contain `kv`, which other implementations do not accept."""
KV_NAMES = frozenset(
    {
        "overlap_score_credit", "overlap_score_credit_decay", "prefill_load_scale", "host_cache_hit_weight",
        "disk_cache_hit_weight", "router_temperature", "use_kv_events", "router_replica_sync",
        "router_track_active_blocks", "router_track_output_blocks", "router_assume_kv_reuse",
        "router_track_prefill_tokens", "router_prefill_load_model", "router_ttl_secs", "router_queue_threshold",
        "router_policy_config", "router_event_threads", "router_queue_policy", "use_remote_indexer", "serve_indexer",
        "shared_cache_type", "router_predicted_ttl_secs",
    }
)  # fmt: skip
"""Settings of a KV router that are always on a card; other settings are on it only if they differ from the default."""


class RouterConfig:
    """Arguments of upstream's `RouterConfig`. Raises `InvalidArgument` for an unsupported value."""

    def __init__(
        self,
        mode: RouterMode,
        config: KvRouterConfig | None = None,
        active_decode_blocks_threshold: float | None = None,
        active_prefill_tokens_threshold: int | None = None,
        active_prefill_tokens_threshold_frac: float | None = None,
        enforce_disagg: bool = False,
        session_affinity_ttl_secs: int | None = None,
        session_affinity_mode: str = "hard",
    ) -> None:
        if config is not None and not isinstance(config, KvRouterConfig):
            raise InvalidArgument(f"RouterConfig: config {config!r}: expected a KvRouterConfig", param="config")
        if not isinstance(mode, RouterMode):
            raise InvalidArgument(f"RouterConfig: mode {mode!r}: expected a RouterMode", param="mode")
        if session_affinity_mode not in AFFINITY_MODES:
            expected = " or ".join(AFFINITY_MODES)
            raise InvalidArgument(
                f"RouterConfig: session_affinity_mode {session_affinity_mode!r}: expected {expected}",
                param="session_affinity_mode",
            )
        if session_affinity_ttl_secs is not None and not 1 <= session_affinity_ttl_secs <= AFFINITY_TTL_MAX_S:
            raise InvalidArgument(
                f"RouterConfig: session_affinity_ttl_secs {session_affinity_ttl_secs}: expected 1 to {AFFINITY_TTL_MAX_S}",
                param="session_affinity_ttl_secs",
            )
        self.router_mode = mode
        self.kv_router_config = config
        self.enforce_disagg = enforce_disagg
        self.session_affinity_ttl_secs = session_affinity_ttl_secs
        self.session_affinity_mode = session_affinity_mode
        self.load_thresholds = Thresholds(
            active_decode_blocks_threshold=active_decode_blocks_threshold,
            active_prefill_tokens_threshold=active_prefill_tokens_threshold,
            active_prefill_tokens_threshold_frac=active_prefill_tokens_threshold_frac,
        ).check()

    def on_card(self) -> dict[str, Any]:
        """Return the representation on the model card."""
        limits = {name: value for name, value in to_builtins(self.load_thresholds).items() if value is not None}
        return {
            "router_mode": WORDS[self.router_mode],
            "kv_router_config": {} if self.kv_router_config is None else _kv_on_card(self.kv_router_config),
            "load_threshold_config": limits,
            "enforce_disagg": self.enforce_disagg,
            "session_affinity_ttl_secs": self.session_affinity_ttl_secs,
            "session_affinity_mode": self.session_affinity_mode,
        }


@dataclass(frozen=True, slots=True)
class WantedRouting:
    """Routing settings of a card; None selects the frontend's own."""

    mode: RouterMode | None = None
    thresholds: Thresholds | None = None
    enforce_disagg: bool = False
    """Decode workers compute no prefills, even if the frontend allows it."""
    affinity_ttl_s: int | None = None
    affinity_mode: Mode | None = None
    kv: KvRouterConfig | None = None
    """Settings of the KV router."""


def wanted_routing(card: ModelDeploymentCard) -> WantedRouting:
    """Return the routing settings of a card; an unreadable setting falls back to the frontend's own."""
    wanted = card.router_config or None
    if wanted is None:
        return WantedRouting()
    word, ttl_s = wanted.get("router_mode"), wanted.get("session_affinity_ttl_secs")
    mode = MODES.get(word) if isinstance(word, str) else None
    if mode is None:
        logger.warning(
            "model %s: unsupported router mode %s on the card; using the frontend's", card.display_name, word
        )
    if type(ttl_s) is not int or not 1 <= ttl_s <= AFFINITY_TTL_MAX_S:
        if ttl_s is not None:
            logger.warning("model %s: ignoring invalid session affinity TTL of %s s", card.display_name, ttl_s)
        ttl_s = None
    return WantedRouting(
        mode,
        _thresholds(card, wanted.get("load_threshold_config")),
        enforce_disagg=wanted.get("enforce_disagg") is True,
        affinity_ttl_s=ttl_s,
        affinity_mode=None if ttl_s is None else "soft" if wanted.get("session_affinity_mode") == "soft" else "hard",
        kv=_kv(card, wanted.get("kv_router_config")) if mode is RouterMode.KV else None,
    )


def _kv_on_card(config: KvRouterConfig) -> dict[str, Any]:
    defaults, found = asdict(KvRouterConfig()), asdict(config)
    path = found["router_policy_config"]
    found["router_policy_config"] = None if path is None else os.fspath(path)
    del found["overlap_score_weight"]  # Older name of `prefill_load_scale`.
    said = {name: value for name, value in found.items() if name in KV_NAMES or value != defaults[name]}
    return said | {"skip_initial_worker_wait": False}


def _kv(card: ModelDeploymentCard, given: Any) -> KvRouterConfig | None:
    if not given:
        return None
    try:
        known = {one.name: given[one.name] for one in fields(KvRouterConfig) if one.name in given}
        for one in fields(KvRouterConfig):
            if one.name in known and not _is_like(known[one.name], one.default):
                raise TypeError(f"{one.name} is {known[one.name]!r}")  # noqa: TRY301
        return KvRouterConfig(**known)
    except (ValueError, TypeError, AttributeError) as error:
        logger.warning("model %s: ignoring unreadable KV router settings: %s", card.display_name, error)
        return None


def _is_like(value: Any, default: Any) -> bool:
    """Whether a value has the type of a setting's default; the consumer checks the bounds."""
    if default is None:
        return value is None or (isinstance(value, str | int | float) and not isinstance(value, bool))
    if isinstance(default, bool) or isinstance(value, bool):
        return type(value) is type(default)
    return isinstance(value, str if isinstance(default, str) else int | float)


def _thresholds(card: ModelDeploymentCard, limits: Any) -> Thresholds | None:
    try:
        names = Thresholds.__struct_fields__
        given = {name: value for name, value in (limits or {}).items() if name in names}
        return Thresholds(**given).check() if given else None
    except (InvalidArgument, TypeError, AttributeError) as error:
        logger.warning("model %s: ignoring unreadable load thresholds: %s", card.display_name, error)
        return None
