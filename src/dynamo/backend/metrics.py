"""WorkerMetrics: metrics of a worker at `/metrics` of the system port, in addition to its endpoint's."""

from dynamo.backend.admission import Admission
from dynamo.backend.engine import EngineConfig
from dynamo.core.metrics import MetricsRegistry
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.load import WorkerLoad
from dynamo.runtime.metric_labels import WORKER_LABELS, worker_labels

MODEL_LABELS = (*WORKER_LABELS, "model")
RANK_LABELS = (*MODEL_LABELS, "dp_rank")


class WorkerMetrics:
    """The metrics of one worker."""

    def __init__(self, registry: MetricsRegistry, endpoint: EndpointId, instance_id: int) -> None:
        self._registry = registry
        self._labels = worker_labels(endpoint, instance_id)
        self._model = ""
        self._early: dict[int, WorkerLoad] = {}
        self.loads: dict[int, WorkerLoad] = {}
        """Last load of each rank."""
        self._blocks_total = registry.gauge("dynamo_component_total_blocks", "KV blocks of the rank", RANK_LABELS)
        self._cache_usage = registry.gauge(
            "dynamo_component_gpu_cache_usage_percent", "KV blocks in use, 0-1", RANK_LABELS
        )
        self._hit_rate = registry.gauge(
            "dynamo_component_kv_cache_hit_rate", "Prompt tokens found in the prefix cache, 0-1", RANK_LABELS
        )
        self._rejected = registry.counter(
            "dynamo_work_handler_enqueue_rejected_total",
            "Requests rejected because slots and queue were full",
            WORKER_LABELS,
        ).labels(**self._labels)
        self._wait = registry.histogram(
            "dynamo_work_handler_permit_wait_seconds", "Time from a request's arrival to its slot", WORKER_LABELS
        ).labels(**self._labels)
        self._first_response = registry.histogram(
            "dynamo_work_handler_time_to_first_response_seconds",
            "Time from a request's arrival to the first piece of its response",
            WORKER_LABELS,
        ).labels(**self._labels)
        self._load_time = registry.gauge(
            "dynamo_component_model_load_time_seconds", "Start-up time of the engine", MODEL_LABELS
        )

    def loaded(self, config: EngineConfig, seconds: float) -> None:
        """Record the start of the engine."""
        self._model = config.served_model_name
        self._load_time.labels(**self._labels, model=self._model).set(seconds)
        for rank in range(config.data_parallel_size):
            labels = {**self._labels, "model": self._model, "dp_rank": str(rank)}
            self._blocks_total.labels(**labels).set(config.total_kv_blocks)
            self._cache_usage.labels(**labels).set(0)
        early, self._early = self._early, {}
        for load in early.values():
            self.observe_load(load)

    def observe_load(self, load: WorkerLoad) -> None:
        """Record the cache usage of a rank after a step; that of an engine that still starts when it has started."""
        self.loads[load.dp_rank] = load
        if not self._model:
            self._early[load.dp_rank] = load
            return
        labels = {**self._labels, "model": self._model, "dp_rank": str(load.dp_rank)}
        if load.kv_total_blocks:
            self._cache_usage.labels(**labels).set(load.kv_used_blocks / load.kv_total_blocks)
        if load.cache_hit_rate is not None:
            self._hit_rate.labels(**labels).set(load.cache_hit_rate)

    def follow(self, admission: Admission) -> None:
        """Register gauges of slots and queue, evaluated when the metrics are read."""
        for name, help_text, read in (
            ("pool_active_tasks", "Requests in the engine", lambda: len(admission.running)),
            ("pool_capacity", "Maximum requests in the engine", lambda: admission.slots),
            ("queue_depth", "Requests waiting for a slot", lambda: len(admission.queue)),
            ("queue_capacity", "Maximum requests waiting for a slot", lambda: admission.queue_max),
        ):
            gauge = self._registry.gauge(f"dynamo_work_handler_{name}", help_text, WORKER_LABELS)
            gauge.labels(**self._labels).follow(read)

    # Watcher: called by the admission.

    def rejected(self) -> None:
        self._rejected.inc()

    def began(self, waited_s: float) -> None:
        self._wait.observe(waited_s)

    def answered(self, after_s: float) -> None:
        self._first_response.observe(after_s)
