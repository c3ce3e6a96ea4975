"""ServedModelFactory: a new worker set for the first card of a model and endpoint, with its routing.

The routing settings are those of the command line, except where the card has its own (`routing.python_config`).
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from dynamo.model_card.asset_cache import AssetCache
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.model_card import ModelDeploymentCard
from dynamo.routing.busy import Thresholds
from dynamo.routing.policy_file import RouterPolicy, config_of_stage
from dynamo.routing.settings import OWN_FIELDS, DisaggregationOptions, KvRouterOptions, router_config
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.push_router import RouterMode
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.routed_requests import RoutedRequests
from dynamo.serving.served_model import PREFILL, ServedModel
from dynamo.text.preparing import Timings

if TYPE_CHECKING:
    from dynamo.kv_router.config import RoutingConfig
    from dynamo.routing.python_config import WantedRouting

logger = logging.getLogger("dynamo.serving.models")  # `core.logging` gives it upstream's name.

DEFAULT_BLOCK_SIZE = 16  # For a card without a block size, as upstream.


class ServedModelFactory:
    """Settings that every worker set of this frontend starts with."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        metrics: FrontendMetrics,
        assets: AssetCache,
        tokenizers: Sequence[str],
        *,
        router_mode: str,
        kv_options: KvRouterOptions,
        thresholds: Thresholds,
        disaggregation: DisaggregationOptions,
        workers_min: int,
    ) -> None:
        """`tokenizers`: the backends to try for every model (`text.tokenizer`). `workers_min`: see `ServedModel`."""
        self._runtime = runtime
        self._metrics = metrics
        self._assets = assets
        self._tokenizer_backends = tokenizers
        self._timings = Timings(metrics.prepared)
        self._router_mode = router_mode
        self._kv_options = kv_options
        path = kv_options.router_policy_config
        self._policy = None if path is None else RouterPolicy.read(path)
        self._thresholds = thresholds
        self._disaggregation = disaggregation
        self._workers_min = workers_min

    async def create(self, endpoint: EndpointId, card: ModelDeploymentCard) -> ServedModel:
        """Return a set without workers, whose routing is not started."""
        from dynamo.routing.python_config import wanted_routing  # No card, no settings in it.

        wanted = wanted_routing(card)
        mode = RouterMode(wanted.mode or self._router_mode)
        client = await self._runtime.endpoint(str(endpoint)).client(mode)
        served = ServedModel(endpoint, client, self._assets, self._timings, self._tokenizer_backends)
        thresholds = wanted.thresholds or self._thresholds
        served.busy.thresholds = thresholds.of_prefill() if card.worker_type == PREFILL else thresholds
        served.mode, served.workers_min = mode, self._workers_min
        served.routed = RoutedRequests(
            self._metrics.registry, endpoint, self._runtime.instance_id, card.display_name, card.worker_type
        )
        served.conditional = self._disaggregation.conditional(self._kv_options.router_queue_threshold)
        served.never_whole = self._disaggregation.enforce_disagg or wanted.enforce_disagg
        return served

    async def start_routing(self, served: ServedModel, card: ModelDeploymentCard) -> None:
        """Start the KV router of a set, or its session affinity, where its mode and its card require one."""
        from dynamo.routing.python_config import wanted_routing  # No card, no settings in it.

        options = self._routing_of(card, wanted_routing(card))  # Reports invalid settings of any card.
        if card.model_input != "Tokens":
            return
        if served.mode is RouterMode.KV:
            from dynamo.routing.kv_push_router import KvPushRouter  # Not needed in the other modes.

            options = config_of_stage(options, card.worker_type, self._policy, self._disaggregation)
            profile = None if self._policy is None else self._policy.profile(card.display_name)
            served.kv = KvPushRouter(
                self._runtime, served.endpoint, options, profile=profile, worker_type=card.worker_type
            )
            await served.kv.start()
        elif options.affinity_ttl_s is not None:
            from dynamo.routing.session_affinity import SessionAffinity

            served.sessions = SessionAffinity(
                self._runtime, served.endpoint, options.affinity_ttl_s, options.affinity_mode
            )
            await served.sessions.start()

    def _routing_of(self, card: ModelDeploymentCard, wanted: "WantedRouting") -> "RoutingConfig":
        """Return the KV router settings for a card's workers: the card's, except those that only the frontend decides."""
        options = self._kv_settings_of(card, wanted)
        if wanted.affinity_ttl_s is None or wanted.affinity_mode is None:
            return options
        return msgspec.structs.replace(
            options, affinity_ttl_s=wanted.affinity_ttl_s, affinity_mode=wanted.affinity_mode
        )

    def _kv_settings_of(self, card: ModelDeploymentCard, wanted: "WantedRouting") -> "RoutingConfig":
        block_size = card.kv_cache_block_size or DEFAULT_BLOCK_SIZE
        own = router_config(self._kv_options, block_size)
        if wanted.kv is None:
            return own
        try:
            config = wanted.kv.meaning(block_size)
        except ValueError as error:
            logger.warning("model %s: invalid KV router settings: %s", card.display_name, error)
            return own
        mine = {name: getattr(own, name) for name in OWN_FIELDS}
        return msgspec.structs.replace(config, **mine)
