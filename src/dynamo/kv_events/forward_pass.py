"""Forward-pass metrics: one message for each engine step, published for planners and routers.

A message of zeros is sent for each second without a step, so that silence always means a worker that is gone.
"""

import asyncio
import logging
from collections.abc import Callable

from dynamo.core.codec import msgpack_decoder, msgpack_encode
from dynamo.kv_events.topic import Topic
from dynamo.kv_router.balanced import Pace
from dynamo.kv_router.prefill_model import PrefillModel
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.load import FORWARD_PASS_VERSION, ForwardPass, ForwardPassMetrics
from dynamo.runtime.distributed import DistributedRuntime

FORWARD_PASS_TOPIC = "forward-pass-metrics"  # noqa: S105 - the name of a topic
HEARTBEAT_S = 1.0  # Upstream's.
RESTED = ForwardPass()

Publish = Callable[[bytes], None]
"""Function that sends one message of a topic. Must not block."""

logger = logging.getLogger(__name__)

decode = msgpack_decoder(ForwardPassMetrics).decode


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


class PaceListener:
    """Update a `Pace`, and a `PrefillModel` if there is one, from every step that an endpoint's workers publish.

    The cost function `balanced` is in seconds, and needs the duration of a prompt token and of a decode step; the model of
    prefill progress (`--router-prefill-load-model`) needs the duration of a prompt. If workers do not publish their steps,
    the router keeps its initial paces.
    """

    def __init__(
        self, runtime: DistributedRuntime, endpoint: EndpointId, pace: Pace, prefill: PrefillModel | None = None
    ) -> None:
        self._endpoint = endpoint
        self._pace = pace
        self._prefill = prefill
        self._topic = Topic(runtime, endpoint, FORWARD_PASS_TOPIC, lambda event: self.process(event.payload))

    async def start(self) -> None:
        """Start listening."""
        await self._topic.start(publishes=False)

    async def close(self) -> None:
        """Stop listening."""
        await self._topic.close()

    def process(self, payload: bytes) -> None:
        """Process one step; a malformed one is logged and skipped."""
        try:
            step = decode(payload)
        except ValueError as error:
            logger.warning("malformed forward-pass metrics from %s: %s", self._endpoint, error)
            return
        done = step.scheduled_requests
        rank = (int(step.worker_id), step.dp_rank) if step.worker_id.isdecimal() else None
        self._pace.observe(
            done.sum_prefill_tokens, done.num_decode_requests, done.sum_decode_kv_tokens, step.wall_time, rank
        )
        if self._prefill is not None and not done.num_decode_requests:
            self._prefill.observe(
                done.num_prefill_requests, done.sum_prefill_tokens, done.sum_prefill_kv_tokens, step.wall_time
            )
