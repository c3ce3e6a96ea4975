"""IndexerMetrics: the metrics of the indexer."""

from functools import partial

from dynamo.core.metrics import MetricsRegistry
from dynamo.kv_events.engine_subscriber import Status
from dynamo.routing.services.indexed_models import IndexedModels
from dynamo.runtime.json_service import Served

PREFIX = "dynamo_kvindexer_"
BUCKETS = tuple(1e-4 * 2**step for step in range(20))


class IndexerMetrics:
    """Metrics of requests, models and listeners."""

    def __init__(self, registry: MetricsRegistry, models: IndexedModels) -> None:
        self._seconds = registry.histogram(
            PREFIX + "request_duration_seconds", "HTTP request latency", ("endpoint",), BUCKETS
        )
        self._requests = registry.counter(PREFIX + "requests_total", "HTTP requests", ("endpoint", "method"))
        self._errors = registry.counter(
            PREFIX + "errors_total", "HTTP requests that were refused or failed", ("endpoint", "status_class")
        )
        registry.gauge(PREFIX + "models", "Followed models and routing groups").labels().follow(
            lambda: float(len(models.models))
        )
        listeners = registry.gauge(PREFIX + "listeners", "ZMQ listeners by status", ("status",))
        for status in Status:
            listeners.labels(status=status.value).follow(partial(_count, models, status))
        registry.gauge(PREFIX + "blocks", "Blocks in all indexes").labels().follow(
            lambda: float(sum(one.index.size for one in models.models.values()))
        )
        registry.gauge(
            PREFIX + "lost_messages", "KV event messages that were missed and could not be replayed"
        ).labels().follow(lambda: float(sum(one.events.lost for one in models.listeners())))

    def served(self, served: Served) -> None:
        """Record a served request."""
        if served.status in (404, 405) and not served.is_routed:
            return
        self._seconds.labels(endpoint=served.route).observe(served.seconds)
        self._requests.labels(endpoint=served.route, method=served.method).inc()
        if served.status >= 400:
            self._errors.labels(endpoint=served.route, status_class=f"{served.status // 100}xx").inc()


def _count(models: IndexedModels, status: Status) -> float:
    return float(sum(one.status is status for one in models.listeners()))
