"""Upstream's Python API under `dynamo.llm`: model registration, KV routing and events, entry points, engines in
process.

Contains thin classes and functions with upstream's names and arguments; the implementation is in the packages below.
Must not depend on engines.

Names are imported lazily, on first access.
"""

from dynamo.core.lazy import lazy_names

_PUBLIC = {
    "AisPerfConfig": "dynamo.llm.perf_config",
    "ApproxKvIndexer": "dynamo.llm.kv_router_api",
    "EngineType": "dynamo.llm.entrypoint",
    "EntrypointArgs": "dynamo.llm.entrypoint",
    "FrontendExtensionContext": "dynamo.http.extensions",
    "FrontendResponse": "dynamo.http.extensions",
    "FrontendRoute": "dynamo.http.extensions",
    "FpmDirectPublisher": "dynamo.llm.forward_pass_api",
    "FpmEventRelay": "dynamo.llm.forward_pass_api",
    "FpmEventSubscriber": "dynamo.llm.forward_pass_api",
    "HttpAsyncEngine": "dynamo.llm.http_service",
    "HttpError": "dynamo.core.errors",
    "HttpService": "dynamo.llm.http_service",
    "KserveGrpcService": "dynamo.llm.kserve_service",
    "KvDcRelay": "dynamo.llm.kv_dc_relay_api",
    "KvEventPublisher": "dynamo.kv_events.publisher",
    "KvIndexer": "dynamo.llm.kv_router_api",
    "KvRouter": "dynamo.llm.kv_router_api",
    "KvRouterConfig": "dynamo.routing.python_config",
    "KvStateAgentHost": "dynamo.llm.kv_state_api",
    "KvStateAttachmentOwner": "dynamo.llm.kv_state_api",
    "LLMUnaryClient": "dynamo.llm.unary",
    "LoRADownloader": "dynamo.backend.lora_downloader",
    "LoadThresholdConfig": "dynamo.llm.kv_router_api",
    "MediaDecoder": "dynamo.llm.media_options",
    "MediaFetcher": "dynamo.llm.media_options",
    "ModelCardInstanceId": "dynamo.llm.deployment_card",
    "ModelInput": "dynamo.model_card.types",
    "ModelRuntimeConfig": "dynamo.model_card.runtime_config",
    "ModelType": "dynamo.model_card.types",
    "MultimodalEmbeddingCachePublisher": "dynamo.llm.embedding_cache_publisher",
    "OverlapScores": "dynamo.llm.radix_tree",
    "PythonAsyncEngine": "dynamo.llm.local_engines",
    "RadixTree": "dynamo.llm.radix_tree",
    "RoutedEngine": "dynamo.llm.protocols",
    "RouterConfig": "dynamo.routing.python_config",
    "RouterMode": "dynamo.runtime.push_router",
    "RouterQueueLimitExceeded": "dynamo.core.errors",
    "RoutingConstraints": "dynamo.llm.kv_router_api",
    "SelectionCacheConfig": "dynamo.routing.services.pending_selections",
    "SelectionService": "dynamo.routing.services.selection",
    "SelectionServiceError": "dynamo.core.errors",
    "UnaryChatModel": "dynamo.llm.unary",
    "WorkerMetricsPublisher": "dynamo.llm.worker_metrics_publisher",
    "WorkerType": "dynamo.model_card.types",
    "compute_block_hash_for_seq": "dynamo.kv_events.publisher",
    "fetch_model": "dynamo.llm.register",
    "lora_name_to_id": "dynamo.model_card.card",
    "make_engine": "dynamo.llm.entrypoint",
    "register_model": "dynamo.llm.register",
    "run_input": "dynamo.llm.entrypoint",
    "run_kv_indexer": "dynamo._core",
    "run_select_service": "dynamo._core",
    "run_slot_tracker": "dynamo._core",
    "unregister_model": "dynamo.llm.register",
    "update_model_taints": "dynamo.llm.register",
    "with_engine_data": "dynamo.llm.unary",
}
_OLDER = {"fetch_llm": "fetch_model", "register_llm": "register_model", "unregister_llm": "unregister_model"}
"""Upstream's former names."""

__all__, __getattr__, __dir__ = lazy_names(__name__, _PUBLIC, _OLDER)
