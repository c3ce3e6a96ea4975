"""Metrics: vLLM's own metrics on the worker's system port, and the load reports for the routers."""

import asyncio
from typing import Any

from dynamo.backend.engine import EngineHost
from dynamo.protocols.load import WorkerLoad

LOAD_INTERVAL_S = 0.1  # Routing decisions concern seconds of work: a report per step would only add load.


class VllmLoadReporter:
    """A stat logger of vLLM that publishes the load of one rank.

    A report that follows the previous one too early is delayed, so that the latest load is always published.
    """

    def __init__(self, host: EngineHost, rank: int, loop: asyncio.AbstractEventLoop, blocks: int = 0) -> None:
        self._host = host
        self._rank = rank
        self.blocks = blocks
        """KV blocks of the rank; set when the engine runs."""
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._newest: WorkerLoad | None = None
        self._published: WorkerLoad | None = None
        self._published_at = float("-inf")

    # vLLM's StatLoggerBase interface.

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Store the load after a step and schedule its publication."""
        if scheduler_stats is None:
            return
        used = round(scheduler_stats.kv_cache_usage * self.blocks)
        self._newest = WorkerLoad(
            dp_rank=self._rank,
            active_decode_blocks=used,
            kv_used_blocks=used,
            kv_total_blocks=self.blocks,
            running_requests=scheduler_stats.num_running_reqs,
            waiting_requests=scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
        )
        if self._timer is None:
            wait_s = max(0.0, self._published_at + LOAD_INTERVAL_S - self._loop.time())
            self._timer = self._loop.call_later(wait_s, self._publish)

    def log_engine_initialized(self) -> None:
        """Do nothing; called when the engine was set up."""

    def log(self) -> None:
        """Do nothing: vLLM's own logger writes these values."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Do nothing: a sleeping worker leaves discovery."""

    def close(self) -> None:
        """Stop publishing."""
        if self._timer is not None:
            self._timer.cancel()

    def _publish(self) -> None:
        self._timer = None
        self._published_at = self._loop.time()
        if self._newest is not None and self._newest != self._published:
            self._published = self._newest
            self._host.publish_load(self._newest)
