"""Routes of chats, completions and models, the core of OpenAI's API."""

import time
from typing import Any

from msgspec import Struct, field
from starlette.requests import Request
from starlette.responses import Response

from dynamo.api.anthropic.errors import error_body
from dynamo.core.config import setting
from dynamo.http.routes.table import ENGINE_REFUSALS, Operation, RouteContext, RouteTable, account_of, as_json, refuse
from dynamo.protocols.anthropic import ModelInfo, ModelPage
from dynamo.protocols.openai import ChatCompletionRequest, CompletionRequest
from dynamo.protocols.openai_answers import ChatCompletion, ModelList, ModelObject, TextCompletion
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.models import Models
from dynamo.serving.response_stream import RequestHandler, ResponseStream
from dynamo.serving.served_model import ServedModel
from dynamo.text.request_template import RequestTemplate


def no_model(name: str) -> ErrorAnswer:
    """Return the error for a model that no worker serves."""
    return ErrorAnswer(404, f"Model not found: {name!r}", param="model", code="model_not_found")


CHAT_REFUSALS = (*ENGINE_REFUSALS, 501)
"""501 is the error for fields that OpenAI has deprecated."""


def add(routes: RouteTable, context: RouteContext) -> None:
    """Add the routes."""
    pages = ModelPages(context.models, context.apis.enable_anthropic)
    routes.hot(
        "POST",
        "/v1/chat/completions",
        templated(context.pipeline.handle_chat, context.template, "max_completion_tokens"),
        Operation(
            "Create a chat completion", ChatCompletionRequest, ChatCompletion, streams=True, refusals=CHAT_REFUSALS
        ),
        variable="DYN_HTTP_SVC_CHAT_PATH",
    )
    routes.hot(
        "POST",
        "/v1/completions",
        templated(context.pipeline.handle_completion, context.template, "max_tokens"),
        Operation(
            "Create a text completion", CompletionRequest, TextCompletion, streams=True, refusals=ENGINE_REFUSALS
        ),
        variable="DYN_HTTP_SVC_CMP_PATH",
    )
    routes.plain(
        "GET",
        "/v1/models",
        pages.all_models,
        Operation("List the served models", answer=ModelList),
        variable="DYN_HTTP_SVC_MODELS_PATH",
    )
    routes.plain(
        "GET",
        "/v1/models/{model:path}/ready",
        pages.ready,
        Operation("Check whether a model is ready", refusals=(404,)),
    )
    routes.plain(
        "GET",
        "/v1/models/{model:path}",
        pages.one_model,
        Operation("Get a model", answer=ModelObject, refusals=(404,)),
    )


def templated(handler: RequestHandler, template: RequestTemplate | None, limit: str) -> RequestHandler:
    """Return the handler with the request template applied, if there is one."""
    if template is None:
        return handler

    def handle(exchange: ResponseStream) -> None:
        exchange.body = bytearray(template.fill(bytes(exchange.body), limit))
        handler(exchange)

    return handle


class ModelPages(Struct, frozen=True):
    """Handlers of the models' routes."""

    models: Models
    speaks_anthropic: bool
    """Whether a client that sends `anthropic-version` gets Anthropic's form."""
    context_window: int = field(default_factory=lambda: setting("DYN_CONTEXT_WINDOW", 0, int))
    max_output_tokens: int = field(default_factory=lambda: setting("DYN_MAX_OUTPUT_TOKENS", 0, int))

    async def all_models(self, request: Request) -> Response:
        """GET /v1/models."""
        shown = sorted(self._listed(request).items())
        if self._is_anthropic(request):
            page = ModelPage([self._model_info(name, sets[0]) for name, sets in shown])
            if page.data:
                page.first_id, page.last_id = page.data[0].id, page.data[-1].id
            return as_json(page)
        return as_json(ModelList(data=[self._model_object(name, sets[0]) for name, sets in shown]))

    async def one_model(self, request: Request) -> Response:
        """GET /v1/models/{model}."""
        name = request.path_params["model"]
        sets = self._listed(request).get(name)
        if self._is_anthropic(request):
            if sets is None:
                return Response(error_body(no_model(name)), 404, media_type="application/json")
            return as_json(self._model_info(name, sets[0]))
        return refuse(no_model(name)) if sets is None else as_json(self._model_object(name, sets[0]))

    async def ready(self, request: Request) -> Response:
        """GET /v1/models/{model}/ready."""
        name = request.path_params["model"]
        account = account_of(request)
        sets = [
            one
            for one in self.models.every_set()
            if name in (one.name, *(one.card.model_aliases or ())) and (account is None or account.may_use(one.name))
        ]
        if not sets:
            return refuse(no_model(name))
        namespaces: dict[str, Any] = {}
        for one in sets:
            shown = namespaces.setdefault(one.endpoint.namespace, {"ready": False, "worker_types": {}})
            kind = shown["worker_types"].setdefault(one.card.worker_type, {"workers": 0, "needs": one.card.needs})
            kind["workers"] += len(one.worker_ids())
            shown["ready"] |= one.answers_clients and one.is_ready
        for shown in namespaces.values():
            kinds = shown["worker_types"]
            present = {kind for kind, found in kinds.items() if found["workers"]}
            needed = {need for found in kinds.values() for group in found["needs"] for need in group}
            shown["present"] = sorted(present)
            shown["missing_worker_types"] = sorted((needed | kinds.keys()) - present)
        ready = any(one["ready"] for one in namespaces.values())
        return as_json({"model": name, "ready": ready, "namespaces": namespaces})

    def _listed(self, request: Request) -> dict[str, list[ServedModel]]:
        """Return the models that the caller may use, with their sets."""
        account = account_of(request)
        listed = self.models.listed()
        return {name: sets for name, sets in listed.items() if account is None or account.may_use(sets[0].name)}

    def _is_anthropic(self, request: Request) -> bool:
        return self.speaks_anthropic and "anthropic-version" in request.headers

    def _model_info(self, name: str, served: ServedModel) -> ModelInfo:
        window = self.context_window or served.card.context_length
        return ModelInfo(name, name, window or None, self.max_output_tokens or None)

    def _model_object(self, name: str, served: ServedModel) -> ModelObject:
        window = self.context_window or served.card.context_length or 0
        model = ModelObject(id=name, created=int(time.time()), context_window=window)
        if self.max_output_tokens:
            model.max_output_tokens = self.max_output_tokens
        return model
