"""PaceListener: how fast workers compute, heard from the metrics of their steps (topic `forward-pass-metrics`).

The cost function `balanced` weighs seconds, and so wants to know what a prompt token and a step of decoding take; the
model of prompts under way (`--router-prefill-load-model`) wants to know how long a prompt takes. Workers that do not publish their steps leave the router with the paces that it began with.
"""

import logging

from dynamo.core.codec import msgpack_decoder
from dynamo.core.tasks import TaskOwner
from dynamo.kv_router.balanced import Pace
from dynamo.kv_router.prefill_model import PrefillModel
from dynamo.llm.forward_pass import FORWARD_PASS_TOPIC
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.load import ForwardPassMetrics
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.base import Event, Subscriber

logger = logging.getLogger(__name__)

decode = msgpack_decoder(ForwardPassMetrics).decode


class PaceListener:
    """Tells a `Pace`, and a `PrefillModel` where there is one, of every step that the workers of an endpoint publish."""

    def __init__(
        self, runtime: DistributedRuntime, endpoint: EndpointId, pace: Pace, prefill: PrefillModel | None = None
    ) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self._pace = pace
        self._prefill = prefill
        self._tasks = TaskOwner(f"paces of {endpoint}")
        self._subscriber: Subscriber | None = None

    async def start(self) -> None:
        """Begins to listen."""
        self._subscriber = await self._runtime.event_plane.subscriber(self._endpoint, FORWARD_PASS_TOPIC)
        self._tasks.supervise(self._listen, "steps")

    async def close(self) -> None:
        """Ends."""
        await self._tasks.cancel_and_wait()
        if self._subscriber is not None:
            await self._subscriber.close()

    async def _listen(self) -> None:
        assert self._subscriber is not None, "it listens once it is started"
        async for heard in self._subscriber:
            if isinstance(heard, Event):
                self.hear(heard.payload)

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
