"""RouterConfig: the numbers that decide between workers (serving-plane.md §4.2, §4.3). Defaults are upstream's."""

from typing import Any, Literal

import msgspec

from dynamo.core.errors import InvalidArgument

ESTIMATE = (5e-3, 2e-5, 0.0)
"""A prompt of a mid-sized model on one accelerator: 50,000 tokens a second."""

BALANCED_QUEUE_THRESHOLD: float = 1.0
BALANCED_QUEUE_POLICY: Literal["wspt"] = "wspt"
"""Where requests wait with policy `balanced`, unless it is said otherwise: in the router, while every worker has a batch."""


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """The terms of the cost. A request may override some (`router_config_override`)."""

    overlap_score_credit: float = 1.0
    """How much of a prefill block a cached one saves."""
    overlap_score_credit_decay: float = 0.0
    """How fast that credit shrinks on a worker with more prefill waiting than the others."""
    prefill_load_scale: float = 1.0
    """What a block to be computed costs against one that is occupied."""
    decode_active_request_weight: float = 0.0
    """What a request under way costs, in blocks."""
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    shared_cache_multiplier: float = 0.5
    router_temperature: float = 0.0
    """0: the best worker; above: others too, the more the higher."""
    assume_kv_reuse: bool = True
    """Whether requests that begin alike share blocks on a worker."""
    track_prefill_tokens: bool = True
    """Whether prompts that are being computed count."""

    def overridden(self, given: dict[str, Any] | None) -> "Weights":
        """With what a request says otherwise. Raises `InvalidArgument` for a wrong type; unknown names and nulls are ignored."""
        fields = self.__struct_fields__
        wanted = {name: value for name, value in (given or {}).items() if name in fields and value is not None}
        if not wanted:
            return self
        try:
            return msgspec.convert({**msgspec.to_builtins(self), **wanted}, Weights).check()
        except msgspec.ValidationError as error:
            raise InvalidArgument(f"router_config_override: {error}", param="router_config_override") from None

    def check(self) -> "Weights":
        """Raises `InvalidArgument` for a number that is out of range."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not isinstance(value, bool) and not 0.0 <= value < float("inf"):
                raise InvalidArgument(f"{name} is {value:g}: expected a number from 0 on", param=name)
        return self


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How one worker set is routed to."""

    weights: Weights = Weights()
    policy: Literal["dynamo", "balanced"] = "dynamo"
    """The cost function: upstream's, or ours (docs/routing.md)."""
    block_size: int = 16
    use_kv_events: bool = True
    """Whether workers tell what they hold; else it is guessed from what they were given."""
    track_active_blocks: bool = True
    track_output_blocks: bool = False
    approximate_ttl_s: float = 120.0
    """How long a guess is believed."""
    approximate_policy: Literal["ttl", "lru"] = "ttl"
    predicted_ttl_s: float | None = None
    """How long what was just given to a worker counts as held before it says so itself."""
    queue_threshold: float | None = None
    """Requests wait while every worker has more prefill under way than this part of its largest batch."""
    queue_policy: Literal["fcfs", "wspt"] = "fcfs"
    affinity_ttl_s: float | None = None
    """How long an idle session stays with its worker; None: no session does."""
    affinity_mode: Literal["hard", "soft"] = "hard"
    use_remote_indexer: bool = False
    """Whether another process is asked what workers hold, in place of following their events here."""
    replica_sync: bool = False
    """Whether routers tell each other what they gave to whom."""
    durable_kv_events: bool = False
    """Whether workers tell what they hold through a JetStream stream."""
    snapshot_threshold: int = 1_000_000
    """Messages in that stream beyond which what they say is kept as a snapshot, and they are purged."""
    reset_states: bool = False
    """Whether the stream and the snapshot of former routers are dropped at the start."""
    shared_cache: Literal["none", "hicache"] = "none"
    """Which cache beside the workers' own is asked what it has."""
    tracking_hash: Literal["public-xxh3-v1", "keyed-xxh3-v1"] = "public-xxh3-v1"
    """By which hashes requests under way are known."""
    tracking_key_file: str | None = None
    tracking_key_id: str | None = None
    session_prefixes: bool = False
    """Whether the prompts of sessions are kept, whoever still holds them."""
    prefill_load_model: Literal["none", "ais"] = "none"
    """Whether prompts under way shrink while they are computed."""
    prefill_estimate: tuple[float, float, float] = ESTIMATE
    """Seconds of a prompt before any step was heard: at least, for each token, for each pair of them."""
    expiry_s: float = 300.0
    blocks_max: int = 1 << 24
