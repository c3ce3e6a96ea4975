"""PaceListener: how fast workers compute, heard from the metrics of their steps (topic `forward-pass-metrics`).

The cost function `balanced` weighs seconds, and so wants to know what a prompt token and a step of decoding take; the
model of prompts under way (`--router-prefill-load-model`) wants to know how long a prompt takes. Workers that do not publish their steps leave the router with the paces that it began with.
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
    """Tells a `Pace`, and a `PrefillModel` where there is one, of every step that the workers of an endpoint publish."""

    def __init__(
        self, runtime: DistributedRuntime, endpoint: EndpointId, pace: Pace, prefill: PrefillModel | None = None
    ) -> None:
        self._endpoint = endpoint
        self._pace = pace
        self._prefill = prefill
        self._topic = Topic(runtime, endpoint, FORWARD_PASS_TOPIC, lambda event: self.hear(event.payload))

    async def start(self) -> None:
        """Begins to listen."""
        await self._topic.start(speaks=False)

    async def close(self) -> None:
        """Ends."""
        await self._topic.close()

    def hear(self, payload: bytes) -> None:
        """One step. What cannot be read is left out, and said."""
        try:
            step = decode(payload)
        except ValueError as error:
            logger.warning("a step of %s cannot be read: %s", self._endpoint, error)
            return
        done = step.scheduled_requests
        self._pace.observe(done.sum_prefill_tokens, done.num_decode_requests, done.sum_decode_kv_tokens, step.wall_time)
        if self._prefill is not None and not done.num_decode_requests:
            self._prefill.observe(
                done.num_prefill_requests, done.sum_prefill_tokens, done.sum_prefill_kv_tokens, step.wall_time
            )
