"""EventCheck: workers whose KV events are expected and missing. They are reported, and their caches predicted.

A card may state that its worker publishes no events. Otherwise no event source is registered some time after the workers: then cache
contents are predicted from routed requests until a source appears.
"""

import logging
from collections.abc import Mapping

from dynamo.core.clock import Clock
from dynamo.core.metrics import Gauge
from dynamo.kv_events.subscriber import KvView
from dynamo.kv_router.predicted import Predicted
from dynamo.kv_router.router import Router
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.model_card import ModelDeploymentCard

logger = logging.getLogger(__name__)

SILENT_S = 10.0
"""Time without an event source after which caches are predicted. A worker with KV events registers one well before."""


class EventCheck:
    """The check of one worker set."""

    def __init__(
        self, endpoint: EndpointId, machine: Router, view: KvView | None, silent_workers: Gauge, clock: Clock
    ) -> None:
        """`view`: the events' subscription, None without one; `silent_workers`: number of workers without events."""
        self._endpoint = endpoint
        self._machine = machine
        self._view = view
        self._silent_workers = silent_workers
        self._clock = clock
        self._configured = machine.predicted
        self._silent_since: float | None = None
        self._reported: set[int] = set()
        """Present workers that were reported because of their cards."""

    @property
    def is_predicting(self) -> bool:
        """Return whether cache contents are predicted because no worker publishes events."""
        return self._machine.predicted is not self._configured

    def report(self, cards: Mapping[int, ModelDeploymentCard]) -> None:
        """Log a warning once for each worker that computes prompts and states that it publishes no KV events."""
        self._reported &= cards.keys()
        for worker_id, card in cards.items():
            is_silent = card.runtime_config.kv_event_publishing_enabled is False and card.worker_type != "decode"
            if is_silent and worker_id not in self._reported:
                self._reported.add(worker_id)
                self._warn(worker_id, card)

    def _warn(self, worker_id: int, card: ModelDeploymentCard) -> None:
        runtime = card.runtime_config
        start, size = runtime.data_parallel_start_rank, max(1, runtime.data_parallel_size)
        fields = {
            "diagnostic_code": "kv_event_publisher_disabled",
            "model": card.display_name,
            "worker_id": worker_id,
            "worker_role": card.worker_type,
            "requirement": "cache_aware_routing",
            "serving_endpoint": self._endpoint.path,
            "kv_event_publishing_enabled": False,
            "waited_ms": 0,
            "rank_count": size,
            "dp_ranks": ",".join(str(rank) for rank in range(start, start + size)),
            "suggested_action": "enable KV events on the worker, or choose a routing mode without them",
        }
        logger.warning("a worker publishes no KV events, which KV routing needs to know its cache", extra=fields)

    def check(self) -> None:
        """Begin or end the prediction of cache contents. Called with every decision."""
        if self._view is None:
            return
        if self._view.has_sources or not self._machine.workers:
            if self._silent_since is not None:
                self._end()
            return
        now = self._clock.now()
        if self._silent_since is None:
            self._silent_since = now
        elif now - self._silent_since > SILENT_S and not self.is_predicting:
            self._begin()

    def _begin(self) -> None:
        count = len(self._machine.workers)
        logger.warning(
            "no KV events from %d worker(s) of %s; predicting their cache contents from routed requests. "
            "Enable KV events on the workers, or start the router with --no-router-kv-events",
            count,
            self._endpoint,
        )
        self._machine.predicted = Predicted(ttl_s=self._machine.config.approximate_ttl_s)
        self._silent_workers.set(count)

    def _end(self) -> None:
        if self.is_predicting:
            logger.warning("workers publish KV events now; no longer predicting their cache contents")
            self._machine.predicted = self._configured
        self._silent_since = None
        self._silent_workers.set(0)
