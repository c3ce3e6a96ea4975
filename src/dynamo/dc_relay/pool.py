"""Pool: the live cached blocks and loads of one endpoint, followed over the event plane."""

import logging
from dataclasses import dataclass

from dynamo.core.codec import UNREADABLE, msgpack_decoder
from dynamo.dc_relay.config import RelayConfig
from dynamo.dc_relay.membership import Rank, RelayPoolPlan
from dynamo.dc_relay.publication import PoolPublication
from dynamo.kv_events.subscriber import KvView
from dynamo.kv_events.topic import Topic
from dynamo.kv_events.worker_publishers import KV_METRICS_TOPIC
from dynamo.protocols.load import KvMetrics
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.base import Event

logger = logging.getLogger(__name__)

_decode_load = msgpack_decoder(KvMetrics).decode


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """Occupied blocks of the ranks that have reported them."""

    kv_used_blocks: int
    observed_ranks: int


class RelayPool:
    """One generation of a pool, from `start` to `close`."""

    def __init__(
        self, runtime: DistributedRuntime, config: RelayConfig, dc_id: int, plan: RelayPoolPlan, generation: int
    ) -> None:
        self.plan = plan
        self.generation = generation
        limits = config.limits
        self.publication = PoolPublication(dc_id, config.bucket_count, limits)
        self._view = KvView(
            runtime,
            plan.state_endpoint,
            self.publication,
            query_timeout_s=limits.recovery_attempt_timeout_ms / 1000,
        )
        self._topic = Topic(runtime, plan.endpoint, KV_METRICS_TOPIC, self._on_load)
        self._used: dict[Rank, int] = {}
        self.is_started = False

    @property
    def is_sound(self) -> bool:
        """Whether its subscriptions are intact."""
        return self._view.is_sound and self._topic.is_sound

    async def start(self) -> None:
        """Subscribe to events and loads, and query the workers for their present blocks."""
        await self._view.start()
        await self._topic.start(publishes=False)
        self.is_started = True

    async def close(self) -> None:
        """End every subscription."""
        self.is_started = False
        self.publication.close()
        await self._view.close()
        await self._topic.close()

    def load(self) -> PoolLoad:
        """Return the newest reports of the planned ranks."""
        used = [blocks for rank, blocks in self._used.items() if rank in self.plan.ranks]
        return PoolLoad(sum(used), len(used))

    def _on_load(self, event: Event) -> None:
        try:
            load = _decode_load(event.payload)
        except UNREADABLE as error:
            logger.warning("malformed load of %s: %s", self.plan.endpoint, error)
            return
        if load.kv_used_blocks is not None:
            self._used[load.worker_id, load.dp_rank] = load.kv_used_blocks
