"""PaceListener: learns the workers' speed from their forward-pass metrics (topic `forward-pass-metrics`).

The cost function `balanced` is in seconds, and needs the duration of a prompt token and of a decode step; the model of
prefill progress (`--router-prefill-load-model`) needs the duration of a prompt. If workers do not publish their steps,
the router keeps its initial paces.
"""

import logging

from dynamo.core.codec import msgpack_decoder
from dynamo.kv_events.forward_pass import FORWARD_PASS_TOPIC
from dynamo.kv_events.topic import Topic
from dynamo.kv_router.balanced import Pace
from dynamo.kv_router.prefill_model import PrefillModel
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.load import ForwardPassMetrics
from dynamo.runtime.distributed import DistributedRuntime

logger = logging.getLogger(__name__)

decode = msgpack_decoder(ForwardPassMetrics).decode


class PaceListener:
    """Update a `Pace`, and a `PrefillModel` if there is one, from every step that an endpoint's workers publish."""

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
        self._pace.observe(done.sum_prefill_tokens, done.num_decode_requests, done.sum_decode_kv_tokens, step.wall_time)
        if self._prefill is not None and not done.num_decode_requests:
            self._prefill.observe(
                done.num_prefill_requests, done.sum_prefill_tokens, done.sum_prefill_kv_tokens, step.wall_time
            )
