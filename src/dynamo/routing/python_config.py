"""KvRouterConfig and RouterConfig: upstream's Python settings of routers, and their form on model cards."""

import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace
from typing import Any

from msgspec import to_builtins

from dynamo.core.codec import json_decode
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.kv_router.affinity import Mode
from dynamo.kv_router.config import RoutingConfig
from dynamo.kv_router.policy import PolicyProfile
from dynamo.kv_router.tracking import check_tracking
from dynamo.protocols.model_card import ModelDeploymentCard
from dynamo.routing.ais_options import perf_config_text
from dynamo.routing.busy import Thresholds
from dynamo.routing.policy_file import RouterPolicy
from dynamo.routing.settings import AFFINITY_TTL_MAX_S, DEFAULTS, SETS, KvRouterOptions, KvRouterSettings, router_config
from dynamo.runtime.push_router import RouterMode

logger = logging.getLogger(__name__)

POSITIONAL = (
    "overlap_score_weight", "host_cache_hit_weight", "disk_cache_hit_weight", "router_temperature", "use_kv_events",
)  # fmt: skip
"""Arguments of `KvRouterConfig` that may be passed by position."""
PUBLISHED_ONLY: Mapping[str, Any] = {
    "conditional_disagg_enabled": False,
    "conditional_disagg_policy": "isl_bounding",
    "conditional_disagg_eff_isl_threshold": 2048,
    "conditional_disagg_eff_isl_ratio_threshold": 0.7,
    "conditional_disagg_prefill_busy_threshold": None,
    "conditional_disagg_decode_busy_threshold": None,
    "router_prefill_policy": None,
    "router_decode_policy": None,
}
"""Settings of `KvRouterConfig` that have no effect here except on model cards, with their defaults."""
SHARES = ("host_cache_hit_weight", "disk_cache_hit_weight", "shared_cache_multiplier")
CHOICES: Mapping[str, tuple[Any, ...]] = {
    "conditional_disagg_enabled": (False,),
    **{one.name: tuple(one.metadata["choices"]) for one in fields(KvRouterSettings) if one.metadata["choices"]},
}
"""Supported values of settings that have more values upstream."""
ALWAYS_ON_CARD = frozenset(one.name for one in fields(KvRouterSettings) if one.metadata.get("is_always_on_card", True))
"""Settings that are on a card with their default too."""
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

_DECLARED = {one.name: DEFAULTS.get(one.name, one.default) for one in fields(KvRouterSettings)}
_Settings: Any = make_dataclass(
    "_Settings",
    [
        (name, Any, field(default=default, kw_only=name not in POSITIONAL))
        for name, default in {**dict.fromkeys(POSITIONAL), **_DECLARED, **PUBLISHED_ONLY}.items()
    ],
    namespace={"__post_init__": lambda _: None},  # Calls the one of `KvRouterConfig`.
)


class KvRouterConfig(_Settings):  # type: ignore[misc]
    """Settings of a KV router, those of `KvRouterSettings`.

    Raises `ValueError` for a value that is out of range or unsupported by this release.
    """

    overlap_score_weight: float | None
    """Older name of `prefill_load_scale`, which it overrides; 0 also sets the credit to 0."""
    overlap_score_credit: float
    overlap_score_credit_decay: float
    prefill_load_scale: float
    decode_active_request_weight: float

    def __post_init__(self) -> None:
        if self.overlap_score_weight is not None:
            self.prefill_load_scale = self.overlap_score_weight
            if self.overlap_score_weight == 0:
                self.overlap_score_credit = 0.0
        self.overlap_score_weight = self.prefill_load_scale
        self.check()

    def check(self) -> None:
        """Raise `ValueError` for an invalid setting."""
        for name, value in asdict(self).items():
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a finite, non-negative number, got {value}")
            allowed = CHOICES.get(name)
            if allowed is not None and value not in allowed:
                raise ValueError(f"{name}={value!r}: expected {' or '.join(map(repr, allowed))}")
        for name in SHARES:
            if (getattr(self, name) or 0) > 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        if self.router_approximate_cache_policy == "lru" and self.use_kv_events:
            raise ValueError("router_approximate_cache_policy='lru' requires use_kv_events=False")
        if self.router_predicted_ttl_secs is not None and not self.use_kv_events:
            raise ValueError("router_predicted_ttl_secs requires use_kv_events=True")
        if self.router_event_threads < 1:
            raise ValueError("router_event_threads must be at least 1")
        path, key_id = self.router_tracking_key_file, self.router_tracking_key_id
        try:
            check_tracking(self.router_tracking_hash, None if path is None else os.fspath(path), key_id)
        except ConfigError as error:
            raise ValueError(re.sub(r"--router-tracking-[a-z-]+", _as_name, str(error))) from None

    @staticmethod
    def from_json(config_json: str) -> "KvRouterConfig":
        """Parse `{"name": value}`. Raises `ValueError`."""
        try:
            given = json_decode(config_json)
            if not isinstance(given, dict):
                raise ValueError(f"expected an object, found {config_json[:40]}")  # noqa: TRY004, TRY301
            return KvRouterConfig(**given)
        except (ValueError, TypeError) as error:
            raise ValueError(f"Failed to parse KvRouterConfig JSON: {error}") from None

    def copy(self) -> "KvRouterConfig":
        """Return a copy."""
        return self.with_overrides()

    def with_overrides(
        self,
        overlap_score_weight: float | None = None,
        *,
        overlap_score_credit: float | None = None,
        overlap_score_credit_decay: float | None = None,
        prefill_load_scale: float | None = None,
        decode_active_request_weight: float | None = None,
    ) -> "KvRouterConfig":
        """Return a copy with some settings replaced. Raises `ValueError`."""
        changes = {
            "overlap_score_credit": overlap_score_credit,
            "overlap_score_credit_decay": overlap_score_credit_decay,
            "prefill_load_scale": prefill_load_scale,
            "decode_active_request_weight": decode_active_request_weight,
        }
        given: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
        return replace(self, overlap_score_weight=overlap_score_weight, **given)

    def meaning(
        self,
        block_size: int,
        affinity_ttl_s: int | None = None,
        affinity_mode: str = "hard",
        ais_perf_config: Any = None,
    ) -> RoutingConfig:
        """Return the router configuration. Raises `ValueError`."""
        given = {one.name: getattr(self, one.name) for one in fields(KvRouterSettings) if one.name in SETS}
        path = self.router_tracking_key_file
        options = KvRouterOptions(
            **given | {"router_tracking_key_file": None if path is None else os.fspath(path)},
            session_affinity_ttl_secs=affinity_ttl_s,
            session_affinity_mode=affinity_mode,
            ais_perf_config=perf_config_text(ais_perf_config),
        )
        try:
            config = router_config(options, block_size)
            policy = self._policy()
            return config if policy is None else policy.applied(config)
        except (ConfigError, InvalidArgument) as error:
            raise ValueError(str(error)) from None

    def profile(self, model: str = "") -> PolicyProfile | None:
        """Return the queue classes of its policy file. Raises `ValueError`."""
        try:
            policy = self._policy()
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return None if policy is None else policy.profile(model)

    def _policy(self) -> RouterPolicy | None:
        path = self.router_policy_config
        return None if path is None else RouterPolicy.read(os.fspath(path))


class RouterConfig:
    """Arguments of upstream's `RouterConfig`. Raises `InvalidArgument` for an unsupported value."""

    __slots__ = (
        "enforce_disagg",
        "kv_router_config",
        "load_thresholds",
        "router_mode",
        "session_affinity_mode",
        "session_affinity_ttl_secs",
    )

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
    shown = {name: value for name, value in found.items() if name in ALWAYS_ON_CARD or value != defaults[name]}
    return shown | {"skip_initial_worker_wait": False}


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


def _as_name(flag: re.Match[str]) -> str:
    """Return the Python name of a flag."""
    return flag.group().removeprefix("--").replace("-", "_")
