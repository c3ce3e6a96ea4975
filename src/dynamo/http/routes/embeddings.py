"""Routes of embeddings, classification, pooling and reranking."""

import itertools
from functools import partial
from typing import Any

from msgspec import Struct

from dynamo.core.codec import msgpack_encode
from dynamo.core.config import read_bool, setting
from dynamo.core.metrics import Family, Histogram
from dynamo.http.routes.table import ENGINE_REFUSALS, Operation, RouteContext, RouteTable
from dynamo.protocols.embeddings import (
    ClassifyRequest,
    EmbeddingList,
    EmbeddingRequest,
    PoolingRequest,
    Ranked,
    RerankRequest,
    decode_classify,
    decode_embedding,
    decode_pooling,
    decode_rerank,
    inputs_of,
)
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.serving.bodies import decoded
from dynamo.serving.embeddings import EmbeddingForm, ListForm, PoolingForm, RankForm, work_of
from dynamo.serving.endpoints import relayed
from dynamo.serving.metrics import read_buckets
from dynamo.serving.models import Models
from dynamo.serving.pipeline import Pipeline
from dynamo.serving.response_form import Form
from dynamo.serving.response_stream import ResponseStream
from dynamo.serving.text_models import text_model

EMBEDDINGS = relayed("embeddings", "Embedding")
CLASSIFY = relayed("classify", "Classify")
POOLING = relayed("pooling", "Pooling")
RERANK = relayed("rerank", "Rerank")

RANKING: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["score", "index"],
        "properties": {
            "score": {"type": "number"},
            "index": {"type": "integer"},
            "document": {"type": "string"},
            "meta_info": {"type": "object"},
        },
    },
}
assert set(Ranked.__struct_fields__) == set(RANKING["items"]["properties"])


def add(routes: RouteTable, context: RouteContext) -> None:
    """Add the routes."""
    pages = EmbeddingPages(
        context.pipeline,
        context.models,
        setting("DYN_EMBEDDING_TOKENIZATION_ADD_SPECIAL_TOKENS", True, read_bool),
        setting("DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS", False, read_bool),
        context.registry.histogram(
            f"{context.metrics_prefix}_embedding_latency_seconds",
            "Duration of embedding requests in seconds",
            ("model",),
            read_buckets("EMBEDDING_LATENCY"),
        ),
    )
    for path, handler, operation, variable in (
        (
            "/v1/embeddings",
            pages.embed,
            Operation("Create embeddings", EmbeddingRequest, EmbeddingList),
            "DYN_HTTP_SVC_EMB_PATH",
        ),
        ("/v1/classify", pages.classify, Operation("Classify texts", ClassifyRequest), "DYN_HTTP_SVC_CLASSIFY_PATH"),
        (
            "/v1/pooling",
            pages.pool,
            Operation("Get a model's pooled output", PoolingRequest),
            "DYN_HTTP_SVC_POOLING_PATH",
        ),
        (
            "/v1/rerank",
            pages.rerank,
            Operation("Rank documents by relevance to a query", RerankRequest, RANKING),
            "DYN_HTTP_SVC_RERANK_PATH",
        ),
    ):
        described = Operation(operation.summary, operation.body, operation.answer, refusals=ENGINE_REFUSALS)
        routes.hot("POST", path, handler, described, variable=variable)


class EmbeddingPages(Struct, frozen=True):
    """Handlers of these routes."""

    pipeline: Pipeline
    models: Models
    adds_special_tokens: bool
    ignores_unknown: bool
    latency: Family[Histogram]

    def embed(self, exchange: ResponseStream) -> None:
        """POST /v1/embeddings."""
        self.pipeline.start(exchange, EMBEDDINGS, self._embed(exchange))

    def classify(self, exchange: ResponseStream) -> None:
        """POST /v1/classify."""
        self.pipeline.start(exchange, CLASSIFY, self._classify(exchange))

    def pool(self, exchange: ResponseStream) -> None:
        """POST /v1/pooling."""
        self.pipeline.start(exchange, POOLING, self._pool(exchange))

    def rerank(self, exchange: ResponseStream) -> None:
        """POST /v1/rerank."""
        self.pipeline.start(exchange, RERANK, self._rerank(exchange))

    async def _embed(self, exchange: ResponseStream) -> None:
        decode = partial(decode_embedding, ignore_unknown=self.ignores_unknown)
        request = await decoded(exchange.body, decode, "embeddings")
        model = self.models.find(request.model, EMBEDDINGS.model_type, exchange.account)
        payload: object = request
        tokens = None
        if not model.takes_text:
            model.admit()
            payload = work = await work_of(request, model.preprocessor, special=self.adds_special_tokens)
            tokens = PreprocessedRequest(model.name, list(itertools.chain.from_iterable(work.token_ids)))
        form = EmbeddingForm(
            model.name, len(inputs_of(request.input)), request.encoding_format, takes_text=model.takes_text
        )
        observe = self.latency.labels(model=model.name).observe
        body = partial(_packed, payload)
        await self.pipeline.relay(exchange, EMBEDDINGS.endpoint, model, body, form, on_success=observe, tokens=tokens)

    async def _classify(self, exchange: ResponseStream) -> None:
        decode = partial(decode_classify, ignore_unknown=self.ignores_unknown)
        request = await decoded(exchange.body, decode, "classify")
        await self._relay(exchange, request, CLASSIFY.endpoint, CLASSIFY.model_type, ListForm())

    async def _pool(self, exchange: ResponseStream) -> None:
        decode = partial(decode_pooling, ignore_unknown=self.ignores_unknown)
        request = await decoded(exchange.body, decode, "pooling")
        await self._relay(exchange, request, POOLING.endpoint, POOLING.model_type, PoolingForm(request))

    async def _rerank(self, exchange: ResponseStream) -> None:
        decode = partial(decode_rerank, ignore_unknown=self.ignores_unknown)
        request = await decoded(exchange.body, decode, "rerank")
        await self._relay(exchange, request, RERANK.endpoint, RERANK.model_type, RankForm())

    async def _relay(
        self,
        exchange: ResponseStream,
        request: ClassifyRequest | PoolingRequest | RerankRequest,
        endpoint: str,
        model_type: str,
        form: Form,
    ) -> None:
        model = text_model(self.models, request.model, model_type, exchange.account)
        await self.pipeline.relay(exchange, endpoint, model, partial(_packed, request), form)


def _packed(payload: object, _request_id: str) -> bytes:
    return msgpack_encode(payload)
