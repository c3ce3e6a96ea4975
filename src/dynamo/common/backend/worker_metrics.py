"""Metrics of an engine's worker: the engine's own, and the load of its ranks."""

from collections.abc import Callable, Mapping
from typing import Any

from dynamo.backend.engine import EngineHost
from dynamo.core.loops import LoopCaller
from dynamo.protocols.load import WorkerLoad
from dynamo.runtime.component import TypedFamily


class EngineMetrics:
    """Registration of an engine's own metrics in the `/metrics` of the worker."""

    def __init__(self, host: EngineHost, model: str, served_model_name: str) -> None:
        """Created by the worker."""
        endpoint = host.endpoint
        self._exposition = endpoint.metrics
        self._labels = {
            "dynamo_namespace": endpoint.id.namespace,
            "dynamo_component": endpoint.id.component,
            "dynamo_endpoint": endpoint.id.name,
            "worker_id": f"{host.worker_id:x}",
            "model": model,
            "model_name": served_model_name,
        }

    @property
    def auto_labels(self) -> Mapping[str, str]:
        """Labels of the worker and its model for the engine's metrics."""
        return dict(self._labels)

    def register_prometheus_expfmt_callback(self, callback: Callable[[], str]) -> None:
        """Append the exposition text that `callback` returns."""
        self._exposition.register_prometheus_expfmt_callback(callback)

    def register_prometheus_typed_callback(self, callback: Callable[[], list[TypedFamily]]) -> None:
        """Accept typed families; as in Dynamo they are not part of `/metrics`."""
        self._exposition.register_prometheus_typed_callback(callback)


class SnapshotPublisher:
    """Publisher of the load of an engine's ranks, for `/metrics` and for routers. May be used from any thread."""

    def __init__(self, host: EngineHost) -> None:
        """Created by the worker on the thread of its loop."""
        self._host = host
        self._thread = LoopCaller()

    def publish(self, dp_rank: int, snapshot: Any) -> None:
        """Publish a rank's `ComponentSnapshot`. Raise `TypeError`, `OverflowError` or `AttributeError` for another."""
        if not isinstance(dp_rank, int):
            raise TypeError(f"dp_rank: must be int, not {type(dp_rank).__name__}")
        used, total, rate = snapshot.kv_used_blocks, snapshot.kv_total_blocks, snapshot.kv_cache_hit_rate
        if min(dp_rank, used, total) < 0:
            raise OverflowError(f"dp_rank {dp_rank}, blocks {used} of {total}: must be 0 or more")
        load = WorkerLoad(
            dp_rank=dp_rank,
            active_decode_blocks=None,
            active_prefill_tokens=None,
            kv_used_blocks=used,
            kv_total_blocks=total,
            cache_hit_rate=rate,
        )
        self._thread.run(lambda: self._host.publish_load(load))
