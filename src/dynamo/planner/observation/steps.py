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
from dynamo.runtime.component import Endpoint
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


class StepSubscriber(FpmEventSubscriber):
    """Subscriber that also keeps the last step of each rank that computed prompts.

    Most steps of an aggregated worker compute none, so that the latest one of a tick seldom shows what prompts cost.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self._prompts: dict[RankKey, ForwardPassMetrics] = {}

    def _observe(self, key: RankKey, metrics: ForwardPassMetrics) -> None:
        if metrics.scheduled_requests.sum_prefill_tokens > 0 and metrics.wall_time > 0:
            self._prompts[key] = metrics

    def take_prompts(self) -> dict[RankKey, ForwardPassMetrics]:
        """Return the last step with prompts of each rank since the call before."""
        taken, self._prompts = self._prompts, {}
        return taken


class StepObserver:
    """Subscriptions to the workers' endpoints, which follow the directory."""

    def __init__(self, runtime: DistributedRuntime, clock: Clock, *, with_prompts: bool = False) -> None:
        """`with_prompts`: return the last steps with prompts too (`FpmObservations.prompts`)."""
        self._runtime = runtime
        self._clock = clock
        self._with_prompts = with_prompts
        self._subscribers: dict[EndpointId, StepSubscriber] = {}
        self._freshness = {PREFILL: StepFreshness(), DECODE: StepFreshness()}

    def observe(self, workers: LiveWorkers) -> FpmObservations:
        """Return the latest steps of the live workers of each role; follow their endpoints from now on."""
        self._follow(workers.endpoints(PREFILL) | workers.endpoints(DECODE))
        prefill, decode = self._steps(PREFILL, workers), self._steps(DECODE, workers)
        return FpmObservations(prefill, decode, self._prompts(workers, decode) if self._with_prompts else ())

    def close(self) -> None:
        """End the subscriptions."""
        for subscriber in self._subscribers.values():
            subscriber.shutdown()
        self._subscribers.clear()

    def _follow(self, endpoints: set[EndpointId]) -> None:
        for endpoint in endpoints - self._subscribers.keys():
            subscriber = StepSubscriber(self._runtime.endpoint(str(endpoint)))
            subscriber.start_tracking()
            self._subscribers[endpoint] = subscriber

    def _prompts(
        self, workers: LiveWorkers, latest: Mapping[RankKey, ForwardPassMetrics]
    ) -> tuple[ForwardPassMetrics, ...]:
        """Return the steps with prompts of the ranks in `latest` that are not those steps."""
        found = {
            key: step
            for endpoint in workers.endpoints(DECODE)
            for key, step in self._subscribers[endpoint].take_prompts().items()
            if key in latest and latest[key].counter_id != step.counter_id and step.version == FORWARD_PASS_VERSION
        }
        return tuple(found[key] for key in sorted(found))

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
