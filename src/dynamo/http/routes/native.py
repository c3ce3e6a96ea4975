"""Routes of the engines' own APIs, enabled by settings."""

from typing import Any

from msgspec import Struct

from dynamo.api.native_forms import (
    SglangStreamForm,
    SglangWholeForm,
    VllmForm,
    VllmStreamForm,
    sglang_error,
    vllm_error,
)
from dynamo.core.config import read_bool, setting
from dynamo.core.errors import NotFound, NotReady
from dynamo.http.routes.table import ENGINE_REFUSALS, Operation, RouteContext, RouteTable
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.protocols.native import (
    SGLANG_CAPABILITY,
    VLLM_CAPABILITY,
    SglangRequest,
    VllmRequest,
    VllmResponse,
    VllmStreamOptions,
    decode_sglang,
    decode_vllm,
    sglang_worker_request,
    vllm_worker_request,
)
from dynamo.serving.bodies import decoded
from dynamo.serving.endpoints import relayed
from dynamo.serving.model_lookup import DEPARTED, ModelAccess
from dynamo.serving.models import Models
from dynamo.serving.pipeline import Pipeline
from dynamo.serving.response_stream import ResponseStream
from dynamo.serving.served_model import ServedModel

VLLM = relayed("generate", "", vllm_error)
SGLANG = relayed("generate", "", sglang_error)
SGLANG_RESPONSE: dict[str, Any] = {"type": ["object", "array"], "items": {"type": "object"}}
"""Schema of an object, or of a list of them if several choices were requested."""


def add(routes: RouteTable, context: RouteContext) -> None:
    """Add the routes that the settings enable."""
    pages = NativePages(context.pipeline, context.models)
    if setting("DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE", False, read_bool):
        routes.hot(
            "POST",
            "/inference/v1/generate",
            pages.vllm,
            Operation("vLLM: generate tokens", VllmRequest, VllmResponse, streams=True, refusals=ENGINE_REFUSALS),
            variable="DYN_HTTP_SVC_VLLM_GENERATE_PATH",
            error_body=vllm_error,
        )
    if setting("DYN_SGLANG_ENABLE_GENERATE", False, read_bool):
        for method in ("POST", "PUT"):
            routes.hot(
                method,
                "/generate",
                pages.sglang,
                Operation(
                    "SGLang: generate tokens", SglangRequest, SGLANG_RESPONSE, streams=True, refusals=ENGINE_REFUSALS
                ),
                variable="DYN_HTTP_SVC_SGLANG_GENERATE_PATH",
                error_body=sglang_error,
            )


class NativePages(Struct, frozen=True):
    """Handlers of these routes."""

    pipeline: Pipeline
    models: Models

    def vllm(self, exchange: ResponseStream) -> None:
        """POST /inference/v1/generate."""
        self.pipeline.start(exchange, VLLM, self._vllm(exchange))

    def sglang(self, exchange: ResponseStream) -> None:
        """POST or PUT /generate."""
        self.pipeline.start(exchange, SGLANG, self._sglang(exchange))

    async def _vllm(self, exchange: ResponseStream) -> None:
        request, fields = await decoded(exchange.body, decode_vllm, "vllm")
        model = capable_model(self.models, request.model, VLLM_CAPABILITY, exchange.account)
        wants_logprobs = request.sampling_params.logprobs is not None
        options = request.stream_options or VllmStreamOptions()
        form: VllmForm | VllmStreamForm
        if request.stream:
            form = VllmStreamForm(
                len(request.token_ids),
                request.request_id,
                wants_logprobs=wants_logprobs,
                total=bool(options.include_usage),
                running=bool(options.continuous_usage_stats),
            )
        else:
            form = VllmForm(len(request.token_ids), request.request_id, wants_logprobs=wants_logprobs)

        def make(request_id: str) -> PreprocessedRequest:
            form.request_id = form.request_id or request_id
            work = vllm_worker_request(request, fields, request_id)
            work.model = model.name
            return work

        await self.pipeline.relay(exchange, VLLM.endpoint, model, make, form, stream=request.stream)

    async def _sglang(self, exchange: ResponseStream) -> None:
        request, fields = await decoded(exchange.body, decode_sglang, "sglang")
        model = capable_model(self.models, request.model, SGLANG_CAPABILITY, exchange.account)
        form = (SglangStreamForm if request.stream else SglangWholeForm)(len(request.input_ids), request.rid)

        def make(request_id: str) -> PreprocessedRequest:
            form.request_id = form.request_id or request_id
            work = sglang_worker_request(request, fields, request_id)
            work.model = model.name
            return work

        await self.pipeline.relay(exchange, SGLANG.endpoint, model, make, form, stream=request.stream)


def capable_model(models: Models, name: str | None, capability: str, access: ModelAccess | None) -> ServedModel:
    """Return a set whose card lists the capability: that of the model name, or any that the caller may use.

    Raise `NotFound`, `NotReady` if its workers have just left, and `HttpError` (403) if the caller may not use the model.
    """
    able = [one for one in models.all_sets() if one.card.runtime_config.runtime_data.get(capability) in (True, "true")]
    ready = [one for one in able if one.is_ready and not one.takes_text]
    named = [one for one in ready if name is None or name in (one.name, *(one.card.model_aliases or ()))]
    if access is not None and name is not None:
        access.require(named[0].name if named else name)
    if name and models.has_departed(name):
        raise NotReady(DEPARTED.format(name=name))
    named = [one for one in named if access is None or access.may_use(one.name)]
    if not named:
        raise NotFound("no generate-capable model is registered" if not name else f"Model not found: {name}")
    return named[0]
