"""WorkerMetricsPublisher: upstream's API for engines to publish their load to the routers."""

from dynamo.core.codec import msgpack_encode
from dynamo.core.errors import InvalidArgument
from dynamo.core.loops import LoopCaller
from dynamo.kv_events.publisher import LatePublisher
from dynamo.kv_events.worker_publishers import KV_METRICS_TOPIC
from dynamo.protocols.load import KvMetrics
from dynamo.runtime.component import Endpoint


class WorkerMetricsPublisher:
    """Publish the load of each rank. May be called from any thread once the endpoint exists."""

    def __init__(self) -> None:
        self._late: LatePublisher | None = None
        self._thread: LoopCaller | None = None
        self._worker_id = 0
        self._sent: dict[int, KvMetrics] = {}

    async def create_endpoint(self, endpoint: Endpoint) -> None:
        """Start publishing for this endpoint; routers can find the publisher when this returns."""
        self._worker_id = endpoint.connection_id()
        self._thread = LoopCaller()
        self._late = LatePublisher(endpoint, KV_METRICS_TOPIC)
        await self._late.opened()

    def publish(
        self, dp_rank: int | None = None, active_decode_blocks: int | None = None, kv_used_blocks: int | None = None
    ) -> None:
        """Publish a rank's load; an unchanged one is not sent. Raise `InvalidArgument` before `create_endpoint`."""
        if self._late is None or self._thread is None:
            raise InvalidArgument("WorkerMetricsPublisher.publish: call create_endpoint first")
        load = KvMetrics(
            worker_id=self._worker_id,
            dp_rank=dp_rank or 0,
            active_decode_blocks=active_decode_blocks,
            active_prefill_tokens=None,
            kv_used_blocks=kv_used_blocks,
        )
        late = self._late

        def send() -> None:
            if self._sent.get(load.dp_rank) != load:
                self._sent[load.dp_rank] = load
                late.publish(msgpack_encode(load))

        self._thread.run(send)
