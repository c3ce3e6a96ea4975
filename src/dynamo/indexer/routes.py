"""IndexerRoutes: the HTTP API of the indexer."""

from typing import Annotated, Any

import msgspec

from dynamo.core.errors import HttpError, InvalidArgument
from dynamo.core.metrics import MetricsRegistry
from dynamo.core.openmetrics import OPENMETRICS_TYPE, openmetrics, prefers_openmetrics
from dynamo.indexer.access_log import AccessLog
from dynamo.indexer.metrics import IndexerMetrics
from dynamo.kv_router.runs import pack
from dynamo.routing.services.indexed_models import IndexedModels
from dynamo.routing.services.indexer_peers import Peers
from dynamo.runtime.json_service import HttpCall, JsonRoutes, Text
from dynamo.text.multimodal.routing_hashes import hashes_of
from dynamo.tokens.hashing import U64

OK = {"status": "ok"}
DEFAULT_GROUP = "default"
METRICS_TYPE = "text/plain; version=0.0.4"

Id = Annotated[int, msgspec.Meta(ge=0)]


class RegisterBody(msgspec.Struct):
    """A rank to follow."""

    instance_id: Id
    endpoint: str
    model_name: str
    block_size: Id
    routing_group: str = DEFAULT_GROUP
    dp_rank: Id | None = None
    replay_endpoint: str | None = None
    additional_salt: str | None = None


class UnregisterBody(msgspec.Struct):
    """An instance, or one of its ranks, to stop following."""

    instance_id: Id
    model_name: str
    routing_group: str = DEFAULT_GROUP
    dp_rank: Id | None = None


class QueryBody(msgspec.Struct):
    """A prompt as tokens."""

    token_ids: list[int]
    model_name: str
    routing_group: str = DEFAULT_GROUP
    lora_name: str | None = None
    cache_salt: str | None = None
    block_mm_infos: list[Any] | None = None


class QueryByHashBody(msgspec.Struct):
    """A prompt as block hashes."""

    block_hashes: list[int]
    model_name: str
    routing_group: str = DEFAULT_GROUP
    cache_salt: str | None = None


class PeerBody(msgspec.Struct):
    """Another indexer."""

    url: str


class IndexerRoutes:
    """Handlers of the followed models."""

    def __init__(self, models: IndexedModels, peers: Peers, registry: MetricsRegistry, log: AccessLog | None) -> None:
        self._models = models
        self._peers = peers
        self._registry = registry
        self._log = log
        self._metrics = IndexerMetrics(registry, models)
        self.routes = JsonRoutes(errors_as_text=True, names_missing_routes=False)
        self.routes.observer = self._served
        add = self.routes.add
        add("GET", "/health", self.health)
        add("GET", "/metrics", self.metrics)
        add("GET", "/workers", self.workers)
        add("GET", "/dump", self.dump)
        add("GET", "/peers", self.peers)
        add("POST", "/register", self.register, RegisterBody)
        add("POST", "/unregister", self.unregister, UnregisterBody)
        add("POST", "/query", self.query, QueryBody)
        add("POST", "/query_by_hash", self.query_by_hash, QueryByHashBody)
        add("POST", "/register_peer", self.register_peer, PeerBody)
        add("POST", "/deregister_peer", self.deregister_peer, PeerBody)
        add("POST", "/reopen_logs", self.reopen_logs)

    def _served(self, served: Any) -> None:
        self._metrics.served(served)
        if self._log is not None:
            self._log.note(served)

    async def health(self, call: HttpCall[None]) -> tuple[int, Any]:
        return 200, None

    async def metrics(self, call: HttpCall[None]) -> tuple[int, Any]:
        text = self._registry.render()
        if prefers_openmetrics(call.headers.get("accept", "")):
            return 200, Text(openmetrics(text), OPENMETRICS_TYPE)
        return 200, Text(text, METRICS_TYPE)

    async def workers(self, call: HttpCall[None]) -> tuple[int, Any]:
        return 200, self._models.workers(call.query.get("model_name"), call.query.get("routing_group"))

    async def dump(self, call: HttpCall[None]) -> tuple[int, Any]:
        return 200, self._models.dump()

    async def register(self, call: HttpCall[RegisterBody]) -> tuple[int, Any]:
        body = call.body
        self._models.follow(
            body.instance_id,
            body.dp_rank or 0,
            body.endpoint,
            (body.model_name, body.routing_group),
            body.block_size,
            replay_endpoint=body.replay_endpoint,
            salt=body.additional_salt,
        )
        return 201, OK

    async def unregister(self, call: HttpCall[UnregisterBody]) -> tuple[int, Any]:
        body = call.body
        self._models.leave(body.instance_id, (body.model_name, body.routing_group), body.dp_rank)
        return 200, OK

    async def query(self, call: HttpCall[QueryBody]) -> tuple[int, Any]:
        body = call.body
        place = (body.model_name, body.routing_group)
        model = self._models.models.get(place)
        size = 1 if model is None else model.block_size
        try:
            hashes = hashes_of(
                body.token_ids,
                size,
                block_mm_infos=body.block_mm_infos,
                lora_name=body.lora_name,
                cache_salt=body.cache_salt,
            )
        except InvalidArgument as error:
            raise HttpError(400, str(error)) from None
        return 200, self._models.find(place, pack(hashes))

    async def query_by_hash(self, call: HttpCall[QueryByHashBody]) -> tuple[int, Any]:
        body = call.body
        if body.cache_salt is not None:
            raise HttpError(400, "cache_salt: not allowed with block_hashes, which already contain it")
        blocks = pack([one & U64 for one in body.block_hashes])
        return 200, self._models.find((body.model_name, body.routing_group), blocks)

    async def peers(self, call: HttpCall[None]) -> tuple[int, Any]:
        return 200, self._peers.urls

    async def register_peer(self, call: HttpCall[PeerBody]) -> tuple[int, Any]:
        self._peers.add(call.body.url)
        return 201, OK

    async def deregister_peer(self, call: HttpCall[PeerBody]) -> tuple[int, Any]:
        if not self._peers.remove(call.body.url):
            raise HttpError(404, "peer not found")
        return 200, OK

    async def reopen_logs(self, call: HttpCall[None]) -> tuple[int, Any]:
        if self._log is not None:
            self._log.reopen()
        return 200, OK
