"""vLLM's connector: KV tiers below vLLM's own cache, in its process. Imported by vLLM only.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "DynamoConnector", "kv_role": "kv_both",
                                            "kv_connector_module_path": "dynamo.kvbm.vllm_connector"}'

vLLM creates two instances, one in its scheduler and one in its worker. The block manager is in the worker; if that is a
separate process, as on CPU, the scheduler uses it over a local socket. Engines with several workers (tensor or pipeline
parallel) are refused. Sizes are set by the block manager's environment variables.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

from dynamo.core.errors import ConfigError
from dynamo.core.metrics import MetricsRegistry
from dynamo.kvbm.config import KvbmConfig
from dynamo.kvbm.connector import Step, Tracker
from dynamo.kvbm.manager import BlockManager
from dynamo.kvbm.metrics import MetricsServer, show
from dynamo.kvbm.orders import Array, Outgoing
from dynamo.kvbm.physical.layout import BlockLayout
from dynamo.kvbm.remote import ManagerServer, RemoteManager

logger = logging.getLogger(__name__)


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Data that the scheduler's connector passes to the worker's."""

    step: Step = field(default_factory=Step)


@dataclass(slots=True)
class _Shared:
    """State common to both connectors of an engine."""

    manager: BlockManager | None = None
    server: MetricsServer | None = None
    remote: ManagerServer | None = None


_engines: dict[str, _Shared] = {}
_guard = threading.Lock()


class DynamoConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """`KVConnectorBase_V1` backed by a block manager."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        parallel = vllm_config.parallel_config
        if parallel.world_size != 1:
            raise ConfigError(f"{parallel.world_size} workers in one engine: DynamoConnector supports one")
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ConfigError("a model with several kinds of KV cache: DynamoConnector supports one kind")
        self._config = KvbmConfig.read()
        if not self._config.is_enabled:
            raise ConfigError("no KV tier is configured: set DYN_KVBM_CPU_CACHE_GB or another tier's size")
        self._block_tokens = int(vllm_config.cache_config.block_size)
        self._blocks = int(kv_cache_config.num_blocks)
        model = vllm_config.model_config
        self._model = f"{model.model}@{model.revision or ''}:{model.dtype}:{vllm_config.cache_config.cache_dtype}"
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        with _guard:
            self._shared = _engines.setdefault(self._engine_id, _Shared())
        self._away: RemoteManager | None = None
        """Client of the block manager of a worker in another process."""
        self._tracker = Tracker(self._block_tokens)
        self._caches: list[tuple[torch.Tensor, int]] = []
        """Each layer's cache, and its block dimension."""
        self._sizes: list[int] = []

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        manager = self._keeper()
        if manager is None or request.mm_features:  # Block hashes do not cover images.
            return 0, False
        lora = request.lora_request.lora_name if request.lora_request is not None else None
        found = self._tracker.match(
            manager, request, num_computed_tokens, lora_name=lora, cache_salt=getattr(request, "cache_salt", None)
        )
        return found, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        manager = self._keeper()
        if manager is not None and not request.mm_features:
            ids: Sequence[int] = blocks.get_block_ids()[0]
            self._tracker.allocated(manager, request, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        cached = scheduler_output.scheduled_cached_reqs
        computed = {one.req_id: one.num_computed_tokens for one in scheduler_output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        drafts = scheduler_output.scheduled_spec_decode_tokens
        scheduled = {
            name: count - len(drafts.get(name, ())) for name, count in scheduler_output.num_scheduled_tokens.items()
        }
        more = {name: ids[0] for name, ids in zip(cached.req_ids, cached.new_block_ids, strict=True) if ids}
        return StepMetadata(self._tracker.plan(scheduled, computed, more, frozenset(cached.resumed_req_ids)))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._tracker.finished(self._keeper(), request.request_id)
        return False, None

    def reset_cache(self) -> bool | None:
        manager = self._keeper()
        if manager is None:
            return None
        manager.clear()
        return True

    def _keeper(self) -> BlockManager | RemoteManager | None:
        """Return the block manager, local or remote; None before the worker has registered its caches."""
        if self._shared.manager is not None or self._away is not None:
            return self._shared.manager or self._away
        try:
            self._away = RemoteManager(self._engine_id)
        except OSError:
            logger.debug("the worker has no block manager yet")
        return self._away

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        for name, cache in sorted(kv_caches.items()):
            dimension = next((at for at, size in enumerate(cache.shape[:2]) if size == self._blocks), None)
            if dimension is None:
                raise ConfigError(
                    f"{name}: no dimension of the cache's shape {tuple(cache.shape)} has {self._blocks} blocks"
                )
            self._caches.append((cache, dimension))
            self._sizes.append(cache.select(dimension, 0).nbytes)
        shapes = [(tuple(cache.select(at, 0).shape), str(cache.dtype)) for cache, at in self._caches]
        layout = BlockLayout((sum(self._sizes),), "uint8", f"{self._model}:{shapes}")
        manager = BlockManager(self._config, layout, worker_id=self._engine_id)
        manager.start()
        if self._config.has_metrics_port:
            registry = MetricsRegistry()
            show(registry, manager, self._block_tokens)
            self._shared.server = MetricsServer(registry, self._config.metrics_port)
        self._shared.manager = manager
        self._shared.remote = ManagerServer(manager, self._engine_id)
        logger.info("KV tiers: %s", manager.status()["tiers"])

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        manager, step = self._shared.manager, self._step()
        if manager is None or not step.loads:
            return
        for slot, block in step.loads:
            self._copy_in(manager.array(slot), block)
        manager.release([slot for slot, _ in step.loads])

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        manager = self._shared.manager
        if manager is None:
            return
        for saves in self._step().saves:
            manager.offload([Outgoing(save.identity, partial(self._copy_out, save.block)) for save in saves])

    def shutdown(self) -> None:
        with _guard:
            shared = _engines.pop(self._engine_id, None)
        if self._away is not None:
            self._away.close()
        if shared is not None and shared.remote is not None:
            shared.remote.close()
        if shared is not None and shared.server is not None:
            shared.server.close()
        if shared is not None and shared.manager is not None:
            shared.manager.close()

    def _step(self) -> Step:
        metadata = self._get_connector_metadata()
        return metadata.step if isinstance(metadata, StepMetadata) else Step()

    def _copy_in(self, source: Array, block: int) -> None:
        at = 0
        for (cache, dimension), size in zip(self._caches, self._sizes, strict=True):
            target = cache.select(dimension, block)
            part = torch.from_numpy(source[at : at + size]).view(cache.dtype).view(target.shape)
            target.copy_(part)
            at += size

    def _copy_out(self, block: int, into: Array) -> None:
        at = 0
        for (cache, dimension), size in zip(self._caches, self._sizes, strict=True):
            source = cache.select(dimension, block).contiguous().view(torch.uint8).reshape(-1)
            torch.from_numpy(into[at : at + size]).copy_(source)
            at += size
