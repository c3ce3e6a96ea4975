"""Modes of disaggregated serving, and keys of runtime data."""

from enum import Enum

from dynamo.backend.disagg import DisaggregationMode

__all__ = [
    "KV_HINT_TRANSFER_CAPABILITY_KEY",
    "KV_HINT_TRANSFER_SOURCE_CONTROL_ENDPOINTS_RUNTIME_KEY",
    "KV_HINT_TRANSFER_WORKER_TYPE_RUNTIME_KEY",
    "DisaggregationMode",
    "EmbeddingTransferMode",
]

KV_HINT_TRANSFER_CAPABILITY_KEY = "router_hint"
KV_HINT_TRANSFER_WORKER_TYPE_RUNTIME_KEY = "router_hint_worker_type"
KV_HINT_TRANSFER_SOURCE_CONTROL_ENDPOINTS_RUNTIME_KEY = "router_hint_source_control_endpoints"


class EmbeddingTransferMode(Enum):
    """Transfer of embeddings from encode workers."""

    LOCAL = "local"
    NIXL_WRITE = "nixl-write"
    NIXL_READ = "nixl-read"
