"""Metrics: load of SGLang's ranks, read from its schedulers' shared memory and published to the routers."""

from collections.abc import Callable
from typing import Any

from dynamo.backend.engine import EngineHost
from dynamo.core.clock import Clock, SystemClock
from dynamo.protocols.load import WorkerLoad

LOAD_INTERVAL_S = 0.25  # Routing decisions concern seconds of work; each poll reads shared memory.


class SglangLoadReporter:
    """Poller that publishes changes of each rank's load; runs until it is cancelled."""

    def __init__(
        self,
        manager: Any,
        host: EngineHost,
        block_tokens: int,
        first_rank: int = 0,
        *,
        is_busy: Callable[[], bool],
        clock: Clock | None = None,
    ) -> None:
        """Set `manager`, SGLang's `TokenizerManager`; an engine that is not `is_busy` is polled once more."""
        self._manager = manager
        self._host = host
        self._block_tokens = block_tokens
        self._first_rank = first_rank
        self._is_busy = is_busy
        self._clock = clock or SystemClock()
        self._published: dict[int, WorkerLoad] = {}
        self._has_settled = False

    async def run(self) -> None:
        while True:
            await self._clock.sleep(LOAD_INTERVAL_S)
            busy = self._is_busy()
            if busy or not self._has_settled:
                self._has_settled = not busy
                await self.look()

    async def look(self) -> None:
        """Publish the load of each rank that has changed."""
        for snapshot in await self._manager.get_loads():
            load = self.load_of(snapshot)
            if self._published.get(load.dp_rank) != load:
                self._published[load.dp_rank] = load
                self._host.publish_load(load)

    def load_of(self, snapshot: Any) -> WorkerLoad:
        """Convert a `LoadSnapshot` into blocks."""
        size = self._block_tokens
        return WorkerLoad(
            dp_rank=self._first_rank + snapshot.dp_rank,
            active_decode_blocks=-(-snapshot.num_active_tokens // size),
            active_prefill_tokens=snapshot.num_waiting_uncached_tokens,
            kv_used_blocks=-(-snapshot.num_used_tokens // size),
            kv_total_blocks=snapshot.max_total_num_tokens // size,
            running_requests=snapshot.num_running_reqs,
            waiting_requests=snapshot.num_waiting_reqs,
        )
