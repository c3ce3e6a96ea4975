"""KvRouterConfig: upstream's Python settings of a KV router, and their conversion to this router's configuration."""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from dynamo.core.codec import json_decode
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.kv_router.config import RouterConfig
from dynamo.kv_router.policy import PolicyProfile
from dynamo.kv_router.tracking import KEYED, PUBLIC, check_tracking
from dynamo.routing.ais_options import perf_config_text
from dynamo.routing.options import KvRouterOptions, router_config
from dynamo.routing.policy_file import RouterPolicy

ONLY: Mapping[str, tuple[Any, ...]] = {
    "router_tracking_hash": (PUBLIC, KEYED),
    "router_prefill_load_model": ("none", "ais", "aic"),
    "shared_cache_type": ("none", "hicache"),
    "conditional_disagg_enabled": (False,),
    "router_queue_policy": ("fcfs", "wspt"),
    "router_approximate_cache_policy": ("ttl", "lru"),
}
"""Supported values of settings that have more values upstream."""


@dataclass
class KvRouterConfig:
    """Settings of a KV router. Raises `ValueError` for a value that is out of range or unsupported by this release."""

    overlap_score_weight: float | None = None
    """Older name of `prefill_load_scale`, which it overrides; 0 also sets the credit to 0."""
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    router_temperature: float = 0.0
    use_kv_events: bool = True
    router_replica_sync: bool = False
    router_track_active_blocks: bool = True
    router_track_output_blocks: bool = False
    router_assume_kv_reuse: bool = True
    router_track_prefill_tokens: bool = True
    router_prefill_load_model: str = "none"
    router_ttl_secs: float = 120.0
    router_approximate_cache_policy: str = "ttl"
    router_queue_threshold: float | None = None
    router_event_threads: int = 4
    """No effect: one loop applies events faster than several threads did."""
    router_queue_policy: str = "fcfs"
    use_remote_indexer: bool = False
    serve_indexer: bool = False
    enable_session_prefix_index: bool = False
    shared_cache_multiplier: float | None = None
    shared_cache_type: str = "none"
    router_predicted_ttl_secs: float | None = None
    conditional_disagg_enabled: bool = False
    conditional_disagg_policy: str = "isl_bounding"
    conditional_disagg_eff_isl_threshold: int = 2048
    conditional_disagg_eff_isl_ratio_threshold: float = 0.7
    conditional_disagg_prefill_busy_threshold: float | None = None
    conditional_disagg_decode_busy_threshold: float | None = None
    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    prefill_load_scale: float = 1.0
    decode_active_request_weight: float = 0.0
    router_policy_config: "str | os.PathLike[str] | None" = None
    router_prefill_policy: str | None = None
    router_decode_policy: str | None = None
    router_tracking_hash: str = "public-xxh3-v1"
    router_tracking_key_file: "str | os.PathLike[str] | None" = None
    router_tracking_key_id: str | None = None

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
            allowed = ONLY.get(name)
            if allowed is not None and value not in allowed:
                raise ValueError(f"{name}={value!r}: expected {' or '.join(map(repr, allowed))}")
        for name in ("host_cache_hit_weight", "disk_cache_hit_weight", "shared_cache_multiplier"):
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
    ) -> RouterConfig:
        """Return the router configuration. Raises `ValueError`."""
        path = self.router_tracking_key_file
        options = KvRouterOptions(
            overlap_score_credit=self.overlap_score_credit,
            overlap_score_credit_decay=self.overlap_score_credit_decay,
            prefill_load_scale=self.prefill_load_scale,
            decode_active_request_weight=self.decode_active_request_weight,
            host_cache_hit_weight=self.host_cache_hit_weight,
            disk_cache_hit_weight=self.disk_cache_hit_weight,
            shared_cache_multiplier=self.shared_cache_multiplier,
            router_temperature=self.router_temperature,
            kv_events=self.use_kv_events,
            track_active_blocks=self.router_track_active_blocks,
            track_output_blocks=self.router_track_output_blocks,
            assume_kv_reuse=self.router_assume_kv_reuse,
            track_prefill_tokens=self.router_track_prefill_tokens,
            router_ttl_secs=self.router_ttl_secs,
            approximate_cache_policy=self.router_approximate_cache_policy,
            predicted_ttl_secs=self.router_predicted_ttl_secs,
            queue_threshold=self.router_queue_threshold,
            queue_policy=self.router_queue_policy,
            replica_sync=self.router_replica_sync,
            use_remote_indexer=self.use_remote_indexer,
            session_affinity_ttl_secs=affinity_ttl_s,
            session_affinity_mode=affinity_mode,
            tracking_hash=self.router_tracking_hash,
            tracking_key_file=None if path is None else os.fspath(path),
            tracking_key_id=self.router_tracking_key_id,
            prefill_load_model=self.router_prefill_load_model,
            shared_cache_type=self.shared_cache_type,
            enable_session_prefix_index=self.enable_session_prefix_index,
            event_threads=self.router_event_threads,
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


def _as_name(flag: re.Match[str]) -> str:
    """Return the Python name of a flag."""
    return flag.group().removeprefix("--").replace("-", "_")
