"""Worker directory: the workers of one deployment by role, as discovery lists them."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dynamo.core.codec import UNREADABLE, json_decoder
from dynamo.planner.config.planner_config import PlannerConfig
from dynamo.planner.core.scaling import PREFILL, WorkerCapabilities
from dynamo.protocols.discovery import INSTANCES, MODEL_CARDS, EndpointId
from dynamo.protocols.model_card import ModelDeploymentCard, ModelRecord
from dynamo.protocols.planner import EngineCapabilities
from dynamo.runtime.discovery.base import Discovery

logger = logging.getLogger(__name__)

NAMED_PREFILL, NAMED_ENCODE = "prefill", "encode"
"""Worker types that are no decode or aggregated workers; encode workers are not planned."""
GPUS_PER_WORKER = 1
"""GPUs of a worker whose number neither the settings nor the environment contain."""
_read_record = json_decoder(ModelRecord).decode


@dataclass(frozen=True, slots=True)
class LiveWorkers:
    """Model cards of the live workers of each role, by instance id."""

    prefill: Mapping[int, ModelRecord]
    decode: Mapping[int, ModelRecord]
    """Decode or aggregated workers."""

    def of(self, role: str) -> Mapping[int, ModelRecord]:
        """Return the workers of a role."""
        return self.prefill if role == PREFILL else self.decode

    def endpoints(self, role: str) -> set[EndpointId]:
        """Return the endpoints of a role's workers."""
        return {EndpointId(one.namespace, one.component, one.endpoint) for one in self.of(role).values()}

    @property
    def model_name(self) -> str | None:
        """Model of most workers; None without workers."""
        names = Counter(one.card_json.display_name for one in (*self.prefill.values(), *self.decode.values()))
        return min(names, key=lambda name: (-names[name], name)) if names else None


class WorkerDirectory:
    """Reader of the workers of a namespace, or of all, and of one model if the settings name it."""

    def __init__(
        self,
        discovery: Discovery,
        namespace: str | Callable[[], str] | None = None,
        model_name: str | None = None,
    ) -> None:
        """Read `namespace`, which may be a function because a rolling update changes it, or all namespaces."""
        self._discovery = discovery
        self._namespace = namespace
        self._model_name = model_name.lower() if model_name else None

    async def live(self) -> LiveWorkers:
        """Return the workers of the namespace that are registered now, as instances and with a model card."""
        return (await self.by_namespace()).get(self._present_namespace() or "", LiveWorkers({}, {}))

    async def by_namespace(self) -> dict[str, LiveWorkers]:
        """Return the registered workers of each namespace that has any."""
        cards = await self._discovery.snapshot(MODEL_CARDS)
        instances = await self._discovery.snapshot(INSTANCES)
        namespace = self._present_namespace()
        prefix = "" if namespace is None else f"{namespace}/"
        found: dict[str, tuple[dict[int, ModelRecord], dict[int, ModelRecord]]] = {}
        for key, value in cards.items():
            if not key.startswith(prefix) or key.count("/") != 3 or key not in instances:
                continue  # A longer key is the card of an adapter; a card without an instance is one of a draining worker.
            record = self._record(key, value)
            if record is not None and record.card_json.worker_type != NAMED_ENCODE:
                prefill, decode = found.setdefault(record.namespace, ({}, {}))
                workers = prefill if record.card_json.worker_type == NAMED_PREFILL else decode
                workers[record.instance_id] = record
        return {namespace: LiveWorkers(*workers) for namespace, workers in found.items()}

    def _present_namespace(self) -> str | None:
        return self._namespace() if callable(self._namespace) else self._namespace

    def _record(self, key: str, value: bytes) -> ModelRecord | None:
        try:
            record = _read_record(value)
        except UNREADABLE as error:
            logger.warning("malformed model card %s: %s", key, error)
            return None
        names = {record.card_json.display_name.lower(), record.card_json.slug.lower()}
        return record if self._model_name is None or self._model_name in names else None


def capabilities_of(workers: LiveWorkers, config: PlannerConfig) -> WorkerCapabilities:
    """Return the capacity of one worker of each scaled role: GPUs of the settings, limits of the model cards."""
    return WorkerCapabilities(
        prefill=_engine(workers.prefill, config.prefill_engine_num_gpu, config) if config.mode.scales_prefill else None,
        decode=_engine(workers.decode, config.decode_engine_num_gpu, config) if config.mode.scales_decode else None,
    )


def _engine(workers: Mapping[int, ModelRecord], gpus: int | None, config: PlannerConfig) -> EngineCapabilities:
    card = workers[min(workers)].card_json if workers else ModelDeploymentCard(display_name="", slug="")
    reported = card.runtime_config
    block = card.kv_cache_block_size or None
    blocks = reported.total_kv_blocks or None
    nextn = reported.runtime_data.get("speculative_nextn")
    return EngineCapabilities(
        num_gpu=GPUS_PER_WORKER if gpus is None else gpus,
        max_num_batched_tokens=reported.max_num_batched_tokens or None,
        max_num_seqs=reported.max_num_seqs or None,
        context_length=reported.context_length or card.context_length or None,
        max_kv_tokens=blocks * block if blocks and block else None,
        kv_cache_block_size=block,
        speculative_nextn=nextn if isinstance(nextn, int) and nextn > 0 else config.speculative_nextn,
    )
