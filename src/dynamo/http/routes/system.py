"""Routes of the service itself: health, metrics, busy thresholds, OpenAPI document."""

from email.utils import formatdate
from typing import Annotated, Any

from msgspec import Meta, Struct, ValidationError, to_builtins
from starlette.requests import Request
from starlette.responses import Response

from dynamo.core.codec import json_decoder, json_encode
from dynamo.core.config import read_bool, setting
from dynamo.core.errors import HttpError, InvalidArgument, NotFound
from dynamo.core.metrics_page import MetricsPage
from dynamo.http.openapi.description import describe
from dynamo.http.openapi.docs_page import HEADERS, PAGE
from dynamo.http.routes.table import Access, Operation, RouteContext, RouteTable, as_json, body_of
from dynamo.routing.busy import Thresholds


def add(routes: RouteTable, context: RouteContext) -> None:
    """Add the routes."""
    pages = SystemPages(routes, context)

    def get(path: str, handler: Any, operation: Operation, word: str) -> None:
        routes.plain("GET", path, handler, operation, variable=f"DYN_HTTP_SVC_{word}_PATH", access=Access.OPEN)

    get("/health", pages.health, Operation("Get health and known instances", refusals=(503,)), "HEALTH")
    get("/live", pages.live, Operation("Get liveness"), "LIVE")
    text = Operation("Get Prometheus metrics", answer={"type": "string"}, answer_media="text/plain")
    get("/metrics", pages.metrics, text, "METRICS")
    if not setting("DYN_DISABLE_FRONTEND_ADMIN_API", False, read_bool):
        shown = Operation("Get the busy thresholds of every model", refusals=(403,))
        routes.plain("GET", "/busy_threshold", pages.thresholds, shown, access=Access.ADMIN)
        change = Operation(
            "Set the given busy thresholds of a model, and return all of them",
            ThresholdsRequest,
            ThresholdsRequest,
            refusals=(400, 403, 404, 422),
            error=THRESHOLDS_ERROR,
        )
        routes.plain("POST", "/busy_threshold", pages.set_thresholds, change, access=Access.ADMIN)
    routes.plain("GET", "/openapi.json", pages.openapi, Operation("Get this document"), access=Access.OPEN)
    page = Operation("Browse and try this API", answer={"type": "string"}, answer_media="text/html")
    routes.plain("GET", "/docs", pages.docs, page, access=Access.OPEN)


THRESHOLDS_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
"""Schema of this route's errors, the same as upstream's."""


class SystemPages:
    """Handlers that report the state of the service."""

    def __init__(self, routes: RouteTable, context: RouteContext) -> None:
        self._routes = routes
        self._pipeline = context.pipeline
        self._models = context.models
        self._is_sound = context.is_sound
        self._siblings = context.siblings
        self._metrics = MetricsPage(context.registry, None if self._siblings is None else self._siblings.metrics)
        self._description = b""
        """The OpenAPI document, once it has been requested."""
        if self._siblings is not None:
            self._siblings.answer("metrics", self._own_metrics)
            self._siblings.answer("thresholds", self._on_thresholds)

    async def health(self, request: Request) -> Response:
        """GET /health. The response has the time of this host, by which `dynamo doctor` compares clocks."""
        response = self._health()
        response.headers["date"] = formatdate(usegmt=True)
        return response

    def _health(self) -> Response:
        if self._pipeline.is_draining:
            return as_json({"status": "not_ready", "stage": "draining"}, 503)
        if not self._is_sound():
            return as_json({"status": "not_ready", "stage": "discovery"}, 503)
        sets = self._models.every_set()
        found = {instance.key: instance for one in sets for instance in one.client.instances()}
        instances = list(found.values())  # Several models may share an endpoint, and one worker serve several.
        endpoints = sorted({f"dyn://{one.endpoint}" for one in sets if one.worker_ids()})
        return as_json({"status": "healthy", "endpoints": endpoints, "instances": instances})

    async def live(self, request: Request) -> Response:
        """GET /live."""
        return as_json({"status": "live", "message": "Service is live"})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        content_type, body = await self._metrics.respond(request.headers.get("accept", ""))
        return Response(body, media_type=None, headers={"content-type": content_type})

    async def _own_metrics(self, question: str) -> str:
        return await self._metrics.own()

    async def thresholds(self, request: Request) -> Response:
        """GET /busy_threshold."""
        known = self._models.thresholds()
        return as_json({"thresholds": [{"model": name, **to_builtins(limits)} for name, limits in known.items()]})

    async def set_thresholds(self, request: Request) -> Response:
        """POST /busy_threshold: set the thresholds in the body, keep the others and return all."""
        try:
            wanted = decode_thresholds(await body_of(request))
            stored = await self._models.set_thresholds(wanted.model, wanted.limits())
        except NotFound as error:
            return as_json({"error": str(error)}, 404)
        except HttpError as error:
            return as_json({"error": str(error)}, error.code)
        except ValidationError as error:  # A field of another type, as opposed to a body that is no JSON.
            return as_json({"error": str(error)}, 422)
        except (InvalidArgument, ValueError) as error:
            return as_json({"error": str(error)}, 400)
        if self._siblings is not None:
            await self._siblings.query(f"thresholds {json_encode(wanted).decode()}")
        return as_json({"model": wanted.model, **to_builtins(stored)})

    async def _on_thresholds(self, text: str) -> str:
        """Apply the thresholds that another process received."""
        wanted = decode_thresholds(text)
        try:
            await self._models.set_thresholds(wanted.model, wanted.limits())
        except (NotFound, InvalidArgument) as error:
            return str(error)
        return ""

    async def docs(self, request: Request) -> Response:
        """GET /docs."""
        return Response(PAGE, headers=HEADERS, media_type="text/html")

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json."""
        if not self._description:  # It takes some 20 ms, and depends on the routes alone.
            self._description = json_encode(describe(self._routes))
        return Response(self._description, media_type="application/json")


class ThresholdsRequest(Struct):
    """The body of POST /busy_threshold; a threshold that is not given keeps its value."""

    model: str
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: Annotated[int, Meta(ge=0)] | None = None
    active_prefill_tokens_threshold_frac: float | None = None

    def limits(self) -> Thresholds:
        """Return the thresholds to set. Raise `InvalidArgument`."""
        return Thresholds(
            active_decode_blocks_threshold=self.active_decode_blocks_threshold,
            active_prefill_tokens_threshold=self.active_prefill_tokens_threshold,
            active_prefill_tokens_threshold_frac=self.active_prefill_tokens_threshold_frac,
        ).check()


decode_thresholds = json_decoder(ThresholdsRequest).decode
