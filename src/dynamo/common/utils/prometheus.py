"""Metrics of engines on an endpoint's `/metrics`: filters, further labels, and metrics that all engines share."""

import enum
import logging
import re
import threading
from collections import Counter as Tally
from collections.abc import Callable, Mapping
from typing import Any

from dynamo.core.boundaries import ErrorBoundary, logged
from dynamo.prometheus_names import kvstats, labels, model_info, name_prefix
from dynamo.runtime import Endpoint

logger = logging.getLogger(__name__)

EMBEDDING_CACHE_METRIC_PREFIX = f"{name_prefix.COMPONENT}_embedding_cache"
IMAGE_LOADER_METRIC_PREFIX = f"{name_prefix.COMPONENT}_image"
DURATION_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)  # Seconds.


class EmbeddingCacheMetrics(str, enum.Enum):  # noqa: UP042 -- the base class is part of the interface
    """Names of the metrics of the embedding cache."""

    HITS_TOTAL = f"{EMBEDDING_CACHE_METRIC_PREFIX}_hits_total"
    MISSES_TOTAL = f"{EMBEDDING_CACHE_METRIC_PREFIX}_misses_total"
    EVICTIONS_TOTAL = f"{EMBEDDING_CACHE_METRIC_PREFIX}_evictions_total"
    UTILIZATION = f"{EMBEDDING_CACHE_METRIC_PREFIX}_utilization"
    CURRENT_BYTES = f"{EMBEDDING_CACHE_METRIC_PREFIX}_current_bytes"
    ENTRIES = f"{EMBEDDING_CACHE_METRIC_PREFIX}_entries"


class ImageLoaderMetrics(str, enum.Enum):  # noqa: UP042 -- the base class is part of the interface
    """Names of the metrics of the image loader."""

    CACHE_ENTRIES = f"{IMAGE_LOADER_METRIC_PREFIX}_cache_entries"
    SHARED_CACHE_GET_DURATION_SECONDS = f"{IMAGE_LOADER_METRIC_PREFIX}_shared_cache_get_duration_seconds"
    SHARED_CACHE_SET_DURATION_SECONDS = f"{IMAGE_LOADER_METRIC_PREFIX}_shared_cache_set_duration_seconds"


def register_engine_metrics_callback(
    endpoint: Endpoint,
    registry: Any,
    metric_prefix_filters: list[str] | None = None,
    exclude_prefixes: list[str] | None = None,
    inject_custom_labels: dict[str, str] | None = None,
    namespace_name: str | None = None,
    component_name: str | None = None,
    endpoint_name: str | None = None,
    model_name: str | None = None,
) -> None:
    """Add an engine's registry to the endpoint's metrics, with the labels of the endpoint and the model."""
    injected = dict(inject_custom_labels or {})
    if namespace_name and component_name:
        own = _own_labels(endpoint, namespace_name, component_name, endpoint_name, model_name)
        for name in sorted(own.keys() & injected.keys()):
            logger.warning("label %s=%r ignored: it is set to %r", name, injected[name], own[name])
        injected |= own
    selection = (registry, metric_prefix_filters, exclude_prefixes, injected)
    _register(endpoint, lambda: get_prometheus_expfmt(*selection), lambda: get_prometheus_typed(*selection))


def _own_labels(
    endpoint: Endpoint, namespace: str, component: str, name: str | None, model: str | None
) -> dict[str, str]:
    """Return the labels that identify an endpoint's worker and its model."""
    found = {labels.NAMESPACE: namespace, labels.COMPONENT: component, labels.ENDPOINT: name or "generate"}
    if model:
        found |= {labels.MODEL: model, labels.MODEL_NAME: model}
    with ErrorBoundary(lambda error: logger.debug("no worker_id label: %s", error)):
        found[labels.WORKER_ID] = format(endpoint.connection_id(), "x")
    return found


def get_prometheus_expfmt(
    registry: Any,
    metric_prefix_filters: list[str] | None = None,
    exclude_prefixes: list[str] | None = None,
    inject_custom_labels: dict[str, str] | None = None,
) -> str:
    """Return the metrics of a registry as text; empty if they cannot be collected."""
    from prometheus_client import generate_latest

    text = ""
    with logged(logger, "cannot collect metrics"):  # Collectors of engines raise errors of any type.
        text = generate_latest(_labelled(registry, inject_custom_labels)).decode()
    if not metric_prefix_filters and not exclude_prefixes:
        return text
    included = _name_filter(metric_prefix_filters, exclude_prefixes)
    lines = [line for line in text.splitlines() if line.strip() and included(re.sub("^# (HELP|TYPE) ", "", line))]
    return "".join(f"{line}\n" for line in lines)


def get_prometheus_typed(
    registry: Any,
    metric_prefix_filters: list[str] | None = None,
    exclude_prefixes: list[str] | None = None,
    inject_custom_labels: dict[str, str] | None = None,
) -> list[Any]:
    """Return the metrics as tuples of name, help, type, unit, and samples of name, labels, value and timestamp."""
    included = _name_filter(metric_prefix_filters, exclude_prefixes)
    return [
        (family.name, family.documentation, family.type, family.unit, [_sample(one) for one in family.samples])
        for family in _labelled(registry, inject_custom_labels).collect()
        if included(family.name)
    ]


def gather_with_labels(
    registry: Any,
    auto_labels: Mapping[str, str],
    *,
    prefix_filters: list[str] | None = None,
    exclude_prefixes: list[str] | None = None,
) -> str:
    """Return the metrics of a registry as text, with further labels."""
    return get_prometheus_expfmt(registry, prefix_filters, exclude_prefixes, dict(auto_labels))


class LLMBackendMetrics:
    """Gauges that all engines have: KV blocks, their use, the hit rate of the prefix cache, the model's load time."""

    def __init__(self, registry: Any = None, model_name: str = "", component_name: str = "") -> None:
        self.model_name = model_name
        self.component_name = component_name

        def gauge(name: str, text: str, *more: str) -> Any:
            from prometheus_client import Gauge

            names = [labels.MODEL, labels.COMPONENT, *more]
            full = f"{name_prefix.COMPONENT}_{name}"
            return Gauge(full, text, labelnames=names, registry=registry, multiprocess_mode="max")

        self.total_blocks = gauge(kvstats.TOTAL_BLOCKS, "KV cache blocks of the worker", labels.DP_RANK)
        self.gpu_cache_usage_percent = gauge(
            kvstats.GPU_CACHE_USAGE_PERCENT, "Fraction of KV cache blocks in use, 0 to 1", labels.DP_RANK
        )
        self.kv_cache_hit_rate = gauge(
            kvstats.KV_CACHE_HIT_RATE, "Hit rate of the prefix cache, 0 to 1", labels.DP_RANK
        )
        self.model_load_time = gauge(model_info.LOAD_TIME_SECONDS, "Seconds to load the model")

    def set_total_blocks(self, dp_rank: str, value: int) -> None:
        """Set the number of KV blocks of a rank."""
        self._of(self.total_blocks, dp_rank).set(value)

    def set_gpu_cache_usage(self, dp_rank: str, value: float) -> None:
        """Set the fraction of KV blocks in use of a rank."""
        self._of(self.gpu_cache_usage_percent, dp_rank).set(value)

    def set_kv_cache_hit_rate(self, dp_rank: str, value: float) -> None:
        """Set the hit rate of the prefix cache of a rank."""
        self._of(self.kv_cache_hit_rate, dp_rank).set(value)

    def set_model_load_time(self, value: float) -> None:
        """Set the seconds that loading the model took."""
        self._of(self.model_load_time).set(value)

    def _of(self, gauge: Any, *dp_rank: str) -> Any:
        return gauge.labels(self.model_name, self.component_name, *dp_rank)


def register_embedding_cache_metrics(
    endpoint: Endpoint, cache: Any, model_name: str = "", component_name: str = ""
) -> None:
    """Add the statistics of an embedding cache to the endpoint's metrics."""
    from prometheus_client import CollectorRegistry, Counter, Gauge

    registry = CollectorRegistry()
    names, values = [labels.MODEL, labels.COMPONENT], (model_name, component_name)

    def metric(kind: Any, name: EmbeddingCacheMetrics, text: str) -> Any:
        return kind(name.value, text, labelnames=names, registry=registry).labels(*values)

    metrics = EmbeddingCacheMetrics
    counters = {
        "hits": metric(Counter, metrics.HITS_TOTAL, "Embeddings found in the cache"),
        "misses": metric(Counter, metrics.MISSES_TOTAL, "Embeddings not found in the cache"),
        "evictions": metric(Counter, metrics.EVICTIONS_TOTAL, "Embeddings removed to make room"),
    }
    gauges = {
        "utilization": metric(Gauge, metrics.UTILIZATION, "Fraction of the cache in use, 0 to 1"),
        "current_bytes": metric(Gauge, metrics.CURRENT_BYTES, "Bytes in use"),
        "entries": metric(Gauge, metrics.ENTRIES, "Embeddings in the cache"),
    }
    counted: Tally[str] = Tally()

    def refresh() -> None:
        stats = cache.stats
        for name, counter in counters.items():
            counter.inc(max(0, stats[name] - counted[name]))
            counted[name] = stats[name]
        for name, gauge in gauges.items():
            gauge.set(stats[name])

    _register_refreshed(endpoint, registry, refresh)


def register_image_loader_metrics(
    endpoint: Endpoint, loader: Any, model_name: str = "", component_name: str = ""
) -> None:
    """Add the statistics of an image loader to the endpoint's metrics."""
    from prometheus_client import CollectorRegistry, Gauge, Histogram

    registry = CollectorRegistry()
    names, values = [labels.MODEL, labels.COMPONENT], (model_name, component_name)

    def durations(name: ImageLoaderMetrics, what: str) -> Any:
        by = [*names, "outcome", "size_bucket"]
        text = f"Seconds to {what} an encoded image"
        return Histogram(name.value, text, labelnames=by, registry=registry, buckets=DURATION_BUCKETS)

    metrics = ImageLoaderMetrics
    histograms = {
        "get": durations(metrics.SHARED_CACHE_GET_DURATION_SECONDS, "read"),
        "set": durations(metrics.SHARED_CACHE_SET_DURATION_SECONDS, "write"),
    }
    entries = Gauge(metrics.CACHE_ENTRIES.value, "Images in the cache", labelnames=names, registry=registry)

    def refresh() -> None:
        stats = loader.shared_image_cache_stats
        taken = stats.snapshot_and_drain() if stats is not None else {}
        for (operation, outcome, size_bucket), samples in taken.items():
            for seconds in samples:
                histograms[operation].labels(*values, outcome, size_bucket).observe(seconds)
        entries.labels(*values).set(loader.cache_entries)

    _register_refreshed(endpoint, registry, refresh)


def _register_refreshed(endpoint: Endpoint, registry: Any, refresh: Callable[[], None]) -> None:
    """Register callbacks that refresh the metrics first, one at a time."""
    lock = threading.Lock()

    def collect(render: Callable[[Any], Any]) -> Any:
        with lock:
            refresh()
            return render(registry)

    _register(endpoint, lambda: collect(get_prometheus_expfmt), lambda: collect(get_prometheus_typed))


def _register(endpoint: Any, text: Callable[[], str], typed: Callable[[], list[Any]]) -> None:
    endpoint.metrics.register_prometheus_expfmt_callback(text)
    endpoint.metrics.register_prometheus_typed_callback(typed)


def _labelled(registry: Any, injected: dict[str, str] | None) -> Any:
    """Return a registry whose metrics have the labels."""
    if not injected:
        return registry
    from prometheus_client import CollectorRegistry

    from dynamo.common.utils.label_injecting_collector import LabelInjectingCollector

    labelled = CollectorRegistry()
    labelled.register(LabelInjectingCollector(registry, injected))
    return labelled


def _name_filter(include: list[str] | None, exclude: list[str] | None) -> Callable[[str], bool]:
    wanted, unwanted = tuple(include or ("",)), tuple(exclude or ())
    return lambda name: name.startswith(wanted) and not name.startswith(unwanted)


def _sample(sample: Any) -> tuple[str, list[tuple[str, str]], float, float | None]:
    timestamp = None if sample.timestamp is None else float(sample.timestamp)
    return sample.name, list(sample.labels.items()), float(sample.value), timestamp
