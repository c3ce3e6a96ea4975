"""Worker load: messages of the topics `kv_metrics` and `forward-pass-metrics`."""

import msgspec

FORWARD_PASS_VERSION = 1


class WorkerLoad(msgspec.Struct):
    """One rank's load after an engine step, in KV blocks, tokens and requests."""

    dp_rank: int = 0
    active_decode_blocks: int | None = 0
    active_prefill_tokens: int | None = 0
    kv_used_blocks: int = 0
    kv_total_blocks: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    cache_hit_rate: float | None = None
    """Fraction of prompt tokens found in the cache, 0 to 1; None if it was not measured."""


class KvMetrics(msgspec.Struct):
    """A `kv_metrics` message."""

    worker_id: int
    dp_rank: int
    active_decode_blocks: int | None
    active_prefill_tokens: int | None
    kv_used_blocks: int | None


class ScheduledRequests(msgspec.Struct):
    """Requests computed in one step. Lengths are those of whole prompts; KV tokens include the token being computed."""

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    """Prompt tokens that were computed, without cached ones."""
    var_prefill_length: float = 0.0
    sum_prefill_kv_tokens: int = 0
    """Cached tokens of those prompts."""
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class QueuedRequests(msgspec.Struct):
    """Requests queued during the step: prompts, and preempted decode requests."""

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class ForwardPass(msgspec.Struct):
    """One step of one rank. All zero: no computation for one second."""

    wall_time: float = 0.0
    """Duration of the step in seconds."""
    scheduled_requests: ScheduledRequests = msgspec.field(default_factory=ScheduledRequests)
    queued_requests: QueuedRequests = msgspec.field(default_factory=QueuedRequests)


class ForwardPassMetrics(msgspec.Struct):
    """A `forward-pass-metrics` message."""

    version: int
    worker_id: str
    """The instance id in decimal digits."""
    dp_rank: int
    counter_id: int
    """Sequence number per rank, from 1."""
    wall_time: float
    scheduled_requests: ScheduledRequests
    queued_requests: QueuedRequests
