"""Upstream's compiled module `dynamo._core.backend`: the worker of the unified backend SDK and its records."""

from dynamo.common.backend.bindings import (
    DisaggregationMode,
    EngineConfig,
    LlmRegistration,
    RuntimeConfig,
    WorkerConfig,
)
from dynamo.common.backend.bound_worker import Worker
from dynamo.common.backend.bound_worker import run_sglang_sidecar as _run_sglang_sidecar
from dynamo.common.backend.bound_worker import run_trtllm_sidecar as _run_trtllm_sidecar
from dynamo.common.backend.bound_worker import run_vllm_sidecar as _run_vllm_sidecar
from dynamo.common.backend.worker_metrics import EngineMetrics, SnapshotPublisher
from dynamo.health_check import HEALTH_CHECK_KEY

__all__ = [
    "HEALTH_CHECK_KEY",
    "DisaggregationMode",
    "EngineConfig",
    "EngineMetrics",
    "LlmRegistration",
    "RuntimeConfig",
    "SnapshotPublisher",
    "Worker",
    "WorkerConfig",
    "_run_sglang_sidecar",
    "_run_trtllm_sidecar",
    "_run_vllm_sidecar",
]
