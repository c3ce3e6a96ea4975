"""ViewMetrics: metrics of the KV events that a router receives, and of the recovery of lost ones."""

from collections.abc import Callable

from dynamo.core.metrics import MetricsRegistry
from dynamo.protocols.kv_events import NumberedKvEvent
from dynamo.runtime.metric_labels import WORKER_LABELS

UNKNOWN_BLOCK = {"stored": "parent_block_not_found", "removed": "block_not_found", "cleared": "block_not_found"}
"""`status` label of an event that refers to an unknown block, by `event_type`."""
LIFECYCLE = ("preconnected", "started", "activated")
"""Values of the `action` label, in their order."""


def kind_of(event: NumberedKvEvent) -> str:
    """Return the `event_type` label of an event."""
    data = event.data
    return "cleared" if isinstance(data, str) else "stored" if data.stored is not None else "removed"


class ViewMetrics:
    """Metrics of received events and recovery queries."""

    def __init__(self, registry: MetricsRegistry, worker: dict[str, str]) -> None:
        """`worker`: values of `WORKER_LABELS`."""
        self._worker = worker
        self._events = registry.counter(
            "dynamo_component_kv_cache_events_applied", "KV events applied", (*WORKER_LABELS, "event_type", "status")
        )
        self._applied = {
            (kind, is_known): self._events.labels(**worker, event_type=kind, status="ok" if is_known else unknown)
            for kind, unknown in UNKNOWN_BLOCK.items()
            for is_known in (True, False)
        }
        """Series by kind of event, and whether it refers to known blocks."""
        self._stored, self._removed = self._applied["stored", True], self._applied["removed", True]
        ingress = "dynamo_component_router_kv_zmq_ingress_"
        self.batches = registry.counter(
            ingress + "batches_total", "Messages with KV events received", WORKER_LABELS
        ).labels(**worker)
        lifecycle = registry.counter(
            ingress + "lifecycle_total", "Event sources that were registered and queried", (*WORKER_LABELS, "action")
        )
        self._lifecycle = {action: lifecycle.labels(**worker, action=action) for action in LIFECYCLE}
        self._sources = registry.gauge(
            ingress + "sources",
            "Event sources: active, or preconnected while their blocks are queried",
            (*WORKER_LABELS, "state"),
        )
        prefix = "dynamo_router_kv_"
        self.gaps = registry.counter(prefix + "event_gaps_total", "Gaps in the event numbers of a rank").labels()
        self.recoveries = registry.counter(
            prefix + "recoveries_total", "Completed recoveries of a rank's blocks from its source"
        ).labels()
        self.unanswered = registry.counter(prefix + "recovery_failures_total", "Recovery queries that failed").labels()
        self.unreadable = registry.counter(prefix + "unreadable_events_total", "Malformed messages").labels()

    def follow_sources(self, active: Callable[[], int], count: Callable[[], int]) -> None:
        """Read the number of active sources, and of all sources, whenever the metrics are rendered."""
        self._sources.labels(**self._worker, state="active").follow(active)
        self._sources.labels(**self._worker, state="preconnected").follow(lambda: count() - active())

    def applied(self, event: NumberedKvEvent, is_known: bool) -> None:
        """Count an event; `is_known` is false where it refers to an unknown block."""
        data = event.data
        if not is_known or isinstance(data, str):
            self._applied[kind_of(event), is_known].value += 1
        elif (
            data.stored is not None
        ):  # A router applies an event for every few tokens: the usual ones without a look-up.
            self._stored.value += 1
        else:
            self._removed.value += 1

    def entered(self) -> None:
        """Count a registered source: its subscription precedes its registration."""
        self._lifecycle["preconnected"].inc()
        self._lifecycle["started"].inc()

    def recovered(self) -> None:
        """Count a source whose blocks are known."""
        self.recoveries.inc()
        self._lifecycle["activated"].inc()
