"""Forward-pass metrics: one message for each engine step, published for planners.

A message of zeros is sent for each second without a step, so that silence always means a worker that is gone.
"""

import asyncio
from collections.abc import Callable

from dynamo.core.codec import msgpack_encode
from dynamo.protocols.load import FORWARD_PASS_VERSION, ForwardPass, ForwardPassMetrics

FORWARD_PASS_TOPIC = "forward-pass-metrics"  # noqa: S105 - the name of a topic
HEARTBEAT_S = 1.0  # Upstream's.
RESTED = ForwardPass()

Publish = Callable[[bytes], None]
"""Function that sends one message of a topic. Must not block."""


class ForwardPassPublisher:
    """Number and publish the steps of each rank. Belongs to the running loop."""

    def __init__(self, publish: Publish, worker_id: str, ranks: int = 1, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._publish = publish
        self._worker_id = worker_id
        self._heartbeat_s = heartbeat_s
        self._loop = asyncio.get_running_loop()
        self._counters = [0] * ranks
        self._published_s = [self._loop.time()] * ranks
        self._timers: list[asyncio.TimerHandle] = [
            self._loop.call_later(heartbeat_s, self._beat, rank) for rank in range(ranks)
        ]

    def put(self, passed: ForwardPass, dp_rank: int = 0) -> None:
        """Publish a finished step. Raise `IndexError` for an unknown rank."""
        counter = self._counters[dp_rank] = self._counters[dp_rank] + 1
        self._published_s[dp_rank] = self._loop.time()
        metrics = ForwardPassMetrics(
            FORWARD_PASS_VERSION,
            self._worker_id,
            dp_rank,
            counter,
            passed.wall_time,
            passed.scheduled_requests,
            passed.queued_requests,
        )
        self._publish(msgpack_encode(metrics))

    def close(self) -> None:
        """Stop the heartbeats."""
        for timer in self._timers:
            timer.cancel()

    def _beat(self, rank: int) -> None:
        """Run one timer per rank, not one per step: it checks the time of the last step and reschedules itself."""
        due_s = self._published_s[rank] + self._heartbeat_s
        if self._loop.time() >= due_s:
            self.put(RESTED, rank)
            due_s = self._published_s[rank] + self._heartbeat_s
        self._timers[rank] = self._loop.call_at(due_s, self._beat, rank)
