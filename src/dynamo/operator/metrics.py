"""Metrics of the operator, under upstream's names."""

from collections.abc import Iterable

from dynamo.core.metrics import MetricsRegistry
from dynamo.k8s.controller import ReconcileResult
from dynamo.k8s.informer import ObjectKey
from dynamo.k8s.kinds import ObjectKind
from dynamo.k8s.workqueue import WorkQueue
from dynamo.operator.applier import Applier
from dynamo.operator.view import ClusterView

BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class OperatorMetrics:
    """Counts reconciliations; objects, queues and writes are read when they are scraped."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self.registry = registry
        labels = ("resource_type", "result")
        self._duration = registry.histogram(
            "dynamo_operator_reconcile_duration_seconds", "Duration of reconciliations", labels, BUCKETS
        )
        self._total = registry.counter("dynamo_operator_reconcile_total", "Reconciliations", labels)
        self._errors = registry.counter(
            "dynamo_operator_reconcile_errors_total", "Failed reconciliations", ("resource_type", "error_type")
        )
        self._resources = registry.gauge(
            "dynamo_operator_resources_total", "Objects by state", ("resource_type", "status")
        )
        self._depth = registry.gauge("dynamo_operator_workqueue_depth", "Keys that wait in a queue", ("name",))
        self._retries = registry.gauge("dynamo_operator_workqueue_retries", "Retries since the start", ("name",))
        self._writes = registry.gauge("dynamo_operator_writes", "Writes since the start", ("operation",))
        self._known = registry.gauge("dynamo_operator_known_writes", "Objects whose last write is known")

    def record(self, kind: ObjectKind, result: ReconcileResult[ObjectKey]) -> None:
        """Count one reconciliation."""
        name = "error" if result.error else "success"
        self._total.labels(resource_type=kind.kind, result=name).inc()
        self._duration.labels(resource_type=kind.kind, result=name).observe(result.duration_s)
        if result.error:
            self._errors.labels(resource_type=kind.kind, error_type=type(result.error).__name__).inc()

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
            counts: dict[str, int] = {}
            for value in view.objects(kind).values():
                state = state_of(value)
                counts[state] = counts.get(state, 0) + 1
            for state in ("ready", "not_ready"):
                self._resources.labels(resource_type=kind.kind, status=state).set(counts.get(state, 0))
        counts_written = applier.counts
        for name in ("applied", "patched", "deleted", "statuses"):
            self._writes.labels(operation=name).set(getattr(counts_written, name))
        self._known.labels().set(len(applier))


def state_of(value: dict[str, object]) -> str:
    """Return `ready` if a condition of the object has that meaning, otherwise `not_ready`."""
    status = value.get("status")
    conditions = status.get("conditions") if isinstance(status, dict) else None
    ready = any(one["type"] in ("Ready", "Available") and one["status"] == "True" for one in conditions or ())
    return "ready" if ready else "not_ready"
