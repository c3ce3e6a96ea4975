"""Busy thresholds: detection of workers that are too loaded to receive more requests.

Pure. A worker is busy when it exceeds any threshold that is set; a request is rejected when every worker that could
serve it is busy. An unknown value (a load never published, a capacity missing on the card) does not make a worker busy.
"""

from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.load import KvMetrics

NO_LOAD = (0.0, 0.0)


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """The three thresholds, under the names of `/busy_threshold`; None disables one."""

    active_decode_blocks_threshold: float | None = None
    """Fraction of a worker's KV blocks, 0 to 1 (`--active-decode-blocks-threshold`)."""
    active_prefill_tokens_threshold: int | None = None
    """Tokens (`--active-prefill-tokens-threshold`)."""
    active_prefill_tokens_threshold_frac: float | None = None
    """Multiple of the maximum number of tokens in a worker's batch (`--active-prefill-tokens-threshold-frac`)."""

    @property
    def is_set(self) -> bool:
        """Whether any threshold is set."""
        return not (
            self.active_decode_blocks_threshold is None
            and self.active_prefill_tokens_threshold is None
            and self.active_prefill_tokens_threshold_frac is None
        )

    def merged(self, update: "Thresholds") -> "Thresholds":
        """Return these thresholds with those that `update` sets."""
        given = {name: getattr(update, name) for name in self.__struct_fields__}
        return msgspec.structs.replace(self, **{name: value for name, value in given.items() if value is not None})

    def of_prefill(self) -> "Thresholds":
        """Return the thresholds for workers that only compute prompts, whose blocks are soon free again."""
        return msgspec.structs.replace(self, active_decode_blocks_threshold=None)

    def check(self) -> "Thresholds":
        """Return itself. Raises `InvalidArgument` for a value out of range."""
        share = self.active_decode_blocks_threshold
        if share is not None and not 0 <= share <= 1:
            raise InvalidArgument(f"active_decode_blocks_threshold must be between 0 and 1, got {share}")
        tokens = self.active_prefill_tokens_threshold
        if tokens is not None and tokens < 0:
            raise InvalidArgument(f"active_prefill_tokens_threshold must be 0 or more, got {tokens}")
        multiple = self.active_prefill_tokens_threshold_frac
        if multiple is not None and multiple < 0:
            raise InvalidArgument(f"active_prefill_tokens_threshold_frac must be 0 or more, got {multiple}")
        return self


class Capacity(Struct, frozen=True):
    """Capacity of a worker according to its card."""

    kv_blocks: int | None
    batched_tokens: int | None


class BusyWorkers:
    """Most recent load of each rank of each worker, and the workers that exceed a threshold."""

    def __init__(self, thresholds: Thresholds, capacity: Capacity) -> None:
        self.thresholds = thresholds
        self.capacity = capacity
        self._loads: dict[int, dict[int, KvMetrics]] = {}
        self._booked: dict[int, dict[int, tuple[float, float]]] = {}

    def apply(self, load: KvMetrics) -> None:
        """Store the published load of a rank."""
        self._loads.setdefault(load.worker_id, {})[load.dp_rank] = load

    def book(self, loads: Mapping[tuple[int, int], tuple[float, float, int]], queued_tokens: int = 0) -> None:
        """Replace the loads that a KV router counts: active prefill tokens, blocks and requests by worker and rank.

        They are ahead of the workers' reports, which arrive at intervals: a burst is refused before it is reported.
        `queued_tokens`: uncached prompt tokens in the router's queue, which count as load of the ranks in equal shares.
        """
        self._booked = {}
        share = queued_tokens / len(loads) if loads else 0.0
        for (worker, rank), (tokens, blocks, _) in loads.items():
            self._booked.setdefault(worker, {})[rank] = (tokens + share, blocks)

    def keep(self, workers: Iterable[int]) -> None:
        """Drop the loads of all other workers."""
        present = set(workers)
        for worker in [worker for worker in self._loads if worker not in present]:
            del self._loads[worker]

    def why(self, worker: int) -> str | None:
        """Return the flag of the threshold that a worker exceeds; None if not busy. All ranks must be busy."""
        reported, booked = self._loads.get(worker, {}), self._booked.get(worker, {})
        reasons = [self._why(reported.get(rank), booked.get(rank, NO_LOAD)) for rank in reported.keys() | booked.keys()]
        return reasons[0] if reasons and all(reasons) else None

    def busy(self, workers: Iterable[int]) -> frozenset[int]:
        """Return the busy workers among the given ones."""
        return frozenset(worker for worker in workers if self.why(worker) is not None)

    def _why(self, load: KvMetrics | None, booked: tuple[float, float]) -> str | None:
        tokens, used = booked
        if load is not None:
            used, tokens = max(load.active_decode_blocks or 0, used), max(load.active_prefill_tokens or 0, tokens)
        limits = self.thresholds
        share, blocks = limits.active_decode_blocks_threshold, self.capacity.kv_blocks
        if share is not None and blocks and used > share * blocks:
            return "--active-decode-blocks-threshold"
        most = limits.active_prefill_tokens_threshold
        if most is not None and tokens > most:
            return "--active-prefill-tokens-threshold"
        multiple, batch = limits.active_prefill_tokens_threshold_frac, self.capacity.batched_tokens
        if multiple is not None and batch and tokens > multiple * batch:
            return "--active-prefill-tokens-threshold-frac"
        return None
