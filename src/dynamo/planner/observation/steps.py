"""Forward-pass observer: the latest step of each rank of the workers, from the event plane."""

import logging
from collections.abc import Mapping

from dynamo.core.clock import Clock
from dynamo.core.codec import UNREADABLE
from dynamo.llm.forward_pass_api import FpmEventSubscriber, read_metrics
from dynamo.planner.connectors.workers import LiveWorkers
from dynamo.planner.core.scaling import DECODE, PREFILL
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.load import FORWARD_PASS_VERSION, ForwardPassMetrics
from dynamo.protocols.planner import FpmObservations, RankKey
from dynamo.runtime.distributed import DistributedRuntime

logger = logging.getLogger(__name__)

STALE_S = 10.0  # Workers send a message each second; ten are missing.


class StepFreshness:
    """Time at which the counter of each rank last changed. Pure."""

    def __init__(self) -> None:
        self._changed: dict[RankKey, tuple[int, float]] = {}

    def fresh(self, steps: Mapping[RankKey, ForwardPassMetrics], now_s: float) -> dict[RankKey, ForwardPassMetrics]:
        """Return the steps without those of ranks that sent nothing for `STALE_S`, or whose version is unknown."""
        self._changed = {key: seen for key, seen in self._changed.items() if key in steps}
        for key, step in steps.items():
            if self._changed.get(key, (None,))[0] != step.counter_id:
                self._changed[key] = (step.counter_id, now_s)
        return {
            key: step
            for key, step in steps.items()
            if now_s - self._changed[key][1] <= STALE_S and step.version == FORWARD_PASS_VERSION
        }


class StepObserver:
    """Subscriptions to the workers' endpoints, which follow the directory."""

    def __init__(self, runtime: DistributedRuntime, clock: Clock) -> None:
        self._runtime = runtime
        self._clock = clock
        self._subscribers: dict[EndpointId, FpmEventSubscriber] = {}
        self._freshness = {PREFILL: StepFreshness(), DECODE: StepFreshness()}

    def observe(self, workers: LiveWorkers) -> FpmObservations:
        """Return the latest steps of the live workers of each role; follow their endpoints from now on."""
        self._follow(workers.endpoints(PREFILL) | workers.endpoints(DECODE))
        return FpmObservations(self._steps(PREFILL, workers), self._steps(DECODE, workers))

    def close(self) -> None:
        """End the subscriptions."""
        for subscriber in self._subscribers.values():
            subscriber.shutdown()
        self._subscribers.clear()

    def _follow(self, endpoints: set[EndpointId]) -> None:
        for endpoint in endpoints - self._subscribers.keys():
            subscriber = FpmEventSubscriber(self._runtime.endpoint(str(endpoint)))
            subscriber.start_tracking()
            self._subscribers[endpoint] = subscriber

    def _steps(self, role: str, workers: LiveWorkers) -> Mapping[RankKey, ForwardPassMetrics]:
        live = {str(worker_id) for worker_id in workers.of(role)}
        found: dict[RankKey, ForwardPassMetrics] = {}
        for endpoint in workers.endpoints(role):
            for key, payload in self._subscribers[endpoint].get_recent_stats().items():
                if key[0] not in live:
                    continue
                try:
                    found[key] = read_metrics(payload)
                except UNREADABLE as error:
                    logger.warning("malformed forward-pass metrics of worker %s: %s", key[0], error)
        return self._freshness[role].fresh(found, self._clock.now())
