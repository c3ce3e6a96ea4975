"""Metrics of an engine in the worker's `/metrics`: registries of prometheus_client, with the worker's labels."""

import logging
import os
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dynamo.common.utils.prometheus import gather_with_labels, get_prometheus_expfmt, get_prometheus_typed

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from dynamo.common.backend.worker_metrics import EngineMetrics

__all__ = [
    "ensure_prometheus_multiproc_dir",
    "gather_with_labels",
    "register_engine_registry",
    "register_global_registry",
]

logger = logging.getLogger(__name__)

MULTIPROC_DIR = "PROMETHEUS_MULTIPROC_DIR"


def ensure_prometheus_multiproc_dir(prefix: str) -> "tempfile.TemporaryDirectory[str] | None":
    """Set `PROMETHEUS_MULTIPROC_DIR` to a new directory and return it; None if the variable is set already.

    The caller removes the directory when the engine has ended.
    """
    if os.environ.get(MULTIPROC_DIR):
        return None
    directory = tempfile.TemporaryDirectory(prefix=prefix)
    os.environ[MULTIPROC_DIR] = directory.name
    return directory


def register_engine_registry(
    metrics: "EngineMetrics",
    registry: "CollectorRegistry",
    *,
    prefix_filters: list[str] | None = None,
    exclude_prefixes: list[str] | None = None,
) -> None:
    """Add a registry: the metrics with one of `prefix_filters` (None: all) and without one of `exclude_prefixes`."""
    selected = registry, prefix_filters, exclude_prefixes, dict(metrics.auto_labels)
    metrics.register_prometheus_expfmt_callback(partial(get_prometheus_expfmt, *selected))
    metrics.register_prometheus_typed_callback(partial(get_prometheus_typed, *selected))


def register_global_registry(
    metrics: "EngineMetrics",
    *,
    engine_prefix: str,
    multiproc_only_prefixes: list[str] | None = None,
    exclude_prefixes: list[str] | None = None,
) -> None:
    """Add the global registry, and, with `PROMETHEUS_MULTIPROC_DIR`, the metrics of the engine's processes.

    `multiproc_only_prefixes` are those of metrics that only these processes write. If the global registry has some of
    the metrics already, the processes' metrics are collected in a registry of their own.
    """
    from prometheus_client import REGISTRY

    only = list(multiproc_only_prefixes or ())
    prefixes = [engine_prefix, *only]
    registries: Sequence[tuple[Any, list[str]]] = [(REGISTRY, prefixes)]
    if os.environ.get(MULTIPROC_DIR) and not _collects_processes(REGISTRY):
        registries = [(REGISTRY, [engine_prefix])]
        if only:
            registries = [*registries, (_process_registry(), prefixes)]
    for registry, filters in registries:
        register_engine_registry(metrics, registry, prefix_filters=filters, exclude_prefixes=exclude_prefixes)


def _collects_processes(registry: Any) -> bool:
    """Add the collector of the engine's processes to a registry; return False if it has some of the metrics already."""
    from prometheus_client import multiprocess

    try:
        multiprocess.MultiProcessCollector(registry)
    except ValueError as error:
        logger.debug("metrics of the engine's processes are collected separately: %s", error)
        return False
    return True


def _process_registry() -> Any:
    """Return a new registry with the metrics of the engine's processes."""
    from prometheus_client import CollectorRegistry, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return registry
