"""RoutingConfig: the settings of the routing decision. Defaults are upstream's."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from dynamo.core.errors import InvalidArgument

ESTIMATE = (5e-3, 2e-5, 0.0)
"""Prefill estimate for a mid-sized model on one accelerator: 50,000 tokens per second."""

BLOCKS_MAX = 1 << 24  # 16 M blocks of an index, about 2 GB: far more than the devices of a deployment hold.

EXPIRY_S = 300.0
"""Age at which an unfinished request is dropped from the load (`DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS`)."""

BALANCED_QUEUE: Mapping[str, Any] = {"queue_threshold": 1.0, "queue_policy": "deadline"}
"""Default queue with `policy="balanced"`: requests wait in the router while every worker has a full batch."""


class CostWeights(msgspec.Struct, frozen=True, kw_only=True):
    """The weights of the cost terms. A request may override some of them (`router_config_override`)."""

    overlap_score_credit: float = 1.0
    """Share of a prefill block that a cached block saves."""
    overlap_score_credit_decay: float = 0.0
    """How fast that credit shrinks on a worker with more queued prefill than the others."""
    prefill_load_scale: float = 1.0
    """Cost of a block to be computed, relative to an occupied block."""
    decode_active_request_weight: float = 0.0
    """Cost of an active request, in blocks."""
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    shared_cache_multiplier: float = 0.5
    router_temperature: float = 0.0
    """0 chooses the cheapest worker; higher values spread requests over more workers."""
    assume_kv_reuse: bool = True
    """Count the common prefix of concurrent requests on a worker once."""
    track_prefill_tokens: bool = True
    """Count prompts that are being computed."""

    def overridden(self, given: dict[str, Any] | None) -> "CostWeights":
        """Return these weights with a request's overrides; unknown names and nulls are ignored.

        Raises `InvalidArgument` for a value of the wrong type.
        """
        if not given:
            return self
        fields = self.__struct_fields__
        wanted = {name: value for name, value in given.items() if name in fields and value is not None}
        if not wanted:
            return self
        try:
            return msgspec.convert({**msgspec.to_builtins(self), **wanted}, CostWeights).check()
        except msgspec.ValidationError as error:
            raise InvalidArgument(f"router_config_override: {error}", param="router_config_override") from None

    def check(self) -> "CostWeights":
        """Return these weights. Raise `InvalidArgument` for a number that is out of range."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not isinstance(value, bool) and not 0.0 <= value < float("inf"):
                raise InvalidArgument(f"{name}: must be at least 0, not {value:g}", param=name)
        return self


class RoutingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one worker set's router."""

    weights: CostWeights = CostWeights()
    policy: Literal["dynamo", "balanced"] = "dynamo"
    """Cost function: `dynamo` (upstream's) or `balanced` (latency-based; docs/routing.md)."""
    block_size: int = 16
    use_kv_events: bool = True
    """Follow the workers' KV events; otherwise cached blocks are predicted from the requests routed to each worker."""
    track_active_blocks: bool = True
    track_output_blocks: bool = False
    approximate_ttl_s: float = 120.0
    """Lifetime of a predicted block, in seconds."""
    approximate_policy: Literal["ttl", "lru"] = "ttl"
    predicted_ttl_s: float | None = None
    """Lifetime of a block predicted at routing time, until the worker's own event confirms it; None disables prediction."""
    queue_threshold: float | None = None
    """Queue requests while every worker's active prefill exceeds this fraction of its largest batch."""
    queue_policy: Literal["fcfs", "lcfs", "wspt", "deadline"] = "fcfs"
    affinity_ttl_s: float | None = None
    """Idle time after which a session loses its worker, in seconds; None disables session affinity."""
    affinity_mode: Literal["hard", "soft"] = "hard"
    use_remote_indexer: bool = False
    """Query another process's index instead of following KV events here."""
    replica_sync: bool = False
    """Exchange routed requests with the router's replicas."""
    durable_kv_events: bool = False
    """Receive KV events through a JetStream stream."""
    snapshot_threshold: int = 1_000_000
    """Messages in the stream beyond which a snapshot is written and the stream purged."""
    reset_states: bool = False
    """Delete the stream and the snapshot of earlier routers at start-up."""
    shared_cache: Literal["none", "hicache"] = "none"
    """Shared cache outside the workers that is queried for cached blocks."""
    tracking_hash: Literal["public-xxh3-v1", "keyed-xxh3-v1"] = "public-xxh3-v1"
    """Hash algorithm that identifies active requests' blocks between routers."""
    tracking_key_file: str | None = None
    tracking_key_id: str | None = None
    session_prefixes: bool = False
    """Keep the prompts of sessions, cached or not (`GET /routing/sessions`)."""
    prefill_load_model: Literal["none", "ais"] = "none"
    """Model that estimates prefill progress; `none` counts a prompt in full until its first token."""
    prefill_estimate: tuple[float, float, float] = ESTIMATE
    """Initial prefill model, in seconds: constant, per token, per token pair."""
    expiry_s: float = 300.0
    blocks_max: int = 1 << 24
