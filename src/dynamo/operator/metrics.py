"""Metrics of the operator, under upstream's names."""

from collections import Counter
from collections.abc import Iterable

from dynamo.core.metrics import MetricsRegistry
from dynamo.k8s.client import KubeRefused, KubeUnavailable
from dynamo.k8s.controller import ReconcileResult, ReconcileTimeout
from dynamo.k8s.informer import ObjectKey
from dynamo.k8s.kinds import ObjectKind
from dynamo.k8s.workqueue import WorkQueue
from dynamo.operator.applier import Applier
from dynamo.operator.view import ClusterView

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
CATEGORIES = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    409: "conflict",
    422: "validation",
    429: "rate_limited",
    503: "unavailable",
    504: "timeout",
}
"""Categories of failures by the status of the API server."""


class OperatorMetrics:
    """Counts reconciliations; objects, queues and writes are read when they are scraped."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self.registry = registry
        labels = ("resource_type", "namespace", "result")
        self._duration = registry.histogram(
            "dynamo_operator_reconcile_duration_seconds", "Duration of reconciliations", labels, BUCKETS
        )
        self._total = registry.counter("dynamo_operator_reconcile_total", "Reconciliations", labels)
        self._errors = registry.counter(
            "dynamo_operator_reconcile_errors_total",
            "Failed reconciliations",
            ("resource_type", "namespace", "error_type"),
        )
        self._resources = registry.gauge(
            "dynamo_operator_resources_total", "Objects by state", ("resource_type", "namespace", "status")
        )
        self._depth = registry.gauge("dynamo_operator_workqueue_depth", "Keys that wait in a queue", ("name",))
        self._retries = registry.gauge("dynamo_operator_workqueue_retries", "Retries since the start", ("name",))
        self._writes = registry.gauge("dynamo_operator_writes", "Writes since the start", ("operation",))
        self._known = registry.gauge("dynamo_operator_known_writes", "Objects whose last write is known")

    def record(self, kind: ObjectKind, result: ReconcileResult[ObjectKey]) -> None:
        """Count one reconciliation."""
        labels = {"resource_type": kind.kind, "namespace": result.key[0]}
        self._total.labels(**labels, result=result.outcome).inc()
        self._duration.labels(**labels, result=result.outcome).observe(result.duration_s)
        if result.error:
            self._errors.labels(**labels, error_type=category_of(result.error)).inc()

    def read(
        self,
        view: ClusterView,
        applier: Applier,
        queues: Iterable[tuple[ObjectKind, WorkQueue[ObjectKey]]],
    ) -> None:
        """Set the gauges from the state of the operator."""
        for kind, queue in queues:
            self._depth.labels(name=kind.kind).set(queue.depth)
            self._retries.labels(name=kind.kind).set(queue.retries)
            counts = Counter((key[0], state_of(value)) for key, value in view.objects(kind).items())
            self._resources.remove(resource_type=kind.kind)
            for namespace in {namespace for namespace, _ in counts}:
                for state in ("ready", "not_ready"):
                    labels = {"resource_type": kind.kind, "namespace": namespace, "status": state}
                    self._resources.labels(**labels).set(counts[namespace, state])
        counts_written = applier.counts
        for name in ("applied", "patched", "deleted", "statuses"):
            self._writes.labels(operation=name).set(getattr(counts_written, name))
        self._known.labels().set(len(applier))


def category_of(error: Exception) -> str:
    """Return the category of a failure, as upstream names those of the API server's answers."""
    if isinstance(error, KubeUnavailable):
        return "unavailable"
    if isinstance(error, KubeRefused):
        return "already_exists" if error.reason == "AlreadyExists" else CATEGORIES.get(error.code, "internal")
    return "timeout" if isinstance(error, ReconcileTimeout | TimeoutError) else "internal"


def state_of(value: dict[str, object]) -> str:
    """Return `ready` if a condition of the object has that meaning, otherwise `not_ready`."""
    status = value.get("status")
    conditions = status.get("conditions") if isinstance(status, dict) else None
    ready = any(one["type"] in ("Ready", "Available") and one["status"] == "True" for one in conditions or ())
    return "ready" if ready else "not_ready"
