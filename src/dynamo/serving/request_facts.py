"""Facts of one request: what the frontend records about its life, for the console and for `dynamo requests`. Pure."""

from typing import NamedTuple

import msgspec


class Move(NamedTuple):
    """Failure of a worker after which a request was sent to another one."""

    at_s: float
    """Time by `time.perf_counter`."""
    worker_id: int | None
    """Worker that failed; None if another cause is known."""
    error: str
    tokens: int
    """Output tokens received before."""
    silent_s: float = 0.0
    """Time of the last output before the failure; 0 without any, or where outputs are not timed."""
    resumed_s: float = 0.0
    """Time of the first output after it; 0 before."""


class RequestFacts(msgspec.Struct, kw_only=True):
    """Facts of one request. Times are those of `time.perf_counter`; 0: not reached."""

    request_id: str
    model: str
    endpoint: str
    request_type: str
    started_s: float
    error_type: str = ""
    """Label of its failure; empty for a success or while it runs."""
    error: str = ""
    ended_at: float = 0.0
    """Wall clock time of its end in seconds since the epoch; 0 while it runs."""
    ended_s: float = 0.0
    prepared_s: float = 0.0
    route_s: tuple[float, float] = (0.0, 0.0)
    """Begin and end of the latest choice of a worker."""
    sent_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    workers: tuple[int, ...] = ()
    """Worker of each engine request."""
    dp_rank: int | None = None
    prefill_worker: int | None = None
    prefill_s: tuple[float, float] = (0.0, 0.0)
    """Time at which the prompt was sent to the prefill worker, and at which it was computed."""
    cost: float | None = None
    """Cost by which the KV router chose the worker."""
    overlap_blocks: int = 0
    """Blocks of the prompt that were cached on the chosen worker."""
    blocks: int = 0
    """Complete blocks of the prompt."""
    queue_depth: int = 0
    """Requests that waited in the router's queue."""
    queue_s: float = 0.0
    """Time in the queue of the KV router that chose the worker, at the end of `route_s`, in seconds."""
    prefill_queue_s: float = 0.0
    """Time in the queue of the prefill workers' KV router, at the beginning of `prefill_s`, in seconds."""
    tokens_ahead: float | None = None
    """Prompt tokens of earlier requests that the worker of the prompt had to compute first; None without a KV router."""
    requests_ahead: int = 0
    """Requests of this frontend that were in flight to the worker when it was chosen."""
    moves: tuple[Move, ...] = ()
    """Failures after which it was sent to another worker."""
    slow_s: float = 0.0
    """Measure of slowness, set at the end: the time to the first token, and that of the output beyond the model's usual pace."""

    @property
    def itl_s(self) -> float | None:
        """Mean time between output tokens; None with fewer than two. Tokens of a unary response are not timed: until its end."""
        gaps = self.output_tokens - 1
        if not self.first_s or gaps < 1:
            return None
        last_s = self.ended_s if self.request_type == "unary" else self.last_s
        return max(0.0, last_s - self.first_s) / gaps
