"""Metrics: vLLM's own series on the worker's system port, and its load for the routers."""

import asyncio
from typing import Any

from dynamo.backend.engine import EngineHost
from dynamo.protocols.load import WorkerLoad

LOAD_INTERVAL_S = 0.1  # Routers choose between seconds of work; hearing of every step would only cost them.


class LoadReporter:
    """Hears vLLM's statistics of one rank after every step, and tells the load: a stat logger of vLLM's.

    What comes too early after the last is told when its time has come, so that the newest is always heard.
    """

    def __init__(self, host: EngineHost, rank: int, loop: asyncio.AbstractEventLoop, blocks: int = 0) -> None:
        self._host = host
        self._rank = rank
        self.blocks = blocks
        """KV blocks of the rank; known once the engine runs."""
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._newest: WorkerLoad | None = None
        self._told: WorkerLoad | None = None
        self._told_at = float("-inf")

    # What vLLM calls: StatLoggerBase.

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """A step ended."""
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
            wait_s = max(0.0, self._told_at + LOAD_INTERVAL_S - self._loop.time())
            self._timer = self._loop.call_later(wait_s, self._tell)

    def log_engine_initialized(self) -> None:
        """The engine was set up."""

    def log(self) -> None:
        """VLLM's own log writes that."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Who sleeps is not found any more."""

    def close(self) -> None:
        """Tells nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    def _tell(self) -> None:
        self._timer = None
        self._told_at = self._loop.time()
        if self._newest is not None and self._newest != self._told:
            self._told = self._newest
            self._host.publish_load(self._newest)
