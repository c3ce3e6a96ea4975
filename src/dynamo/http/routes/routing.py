"""Routes that explain the KV router: its decisions and its view of the workers (docs/routing.md). Not part of upstream."""

import itertools
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from dynamo.core.config import read_bool, setting
from dynamo.http.routes.table import Access, Operation, RouteContext, RouteTable, as_json, refuse
from dynamo.kv_router.explain import Explanation
from dynamo.kv_router.runs import WIDTH
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.models import Models
from dynamo.serving.served_model import ServedModel

if TYPE_CHECKING:
    from dynamo.routing.kv_push_router import KvPushRouter

DECISIONS_SHOWN = 20
UUID_CHARS = 36
DECISIONS_MAX = 256  # Number of decisions that a router keeps.


class ExplainedDecisions(Struct):
    """Latest decisions of one of a model's routers, newest first."""

    model: str
    decisions: list[Explanation]
    worker_type: str = "aggregated"
    """Type of the workers that it selects: a disaggregated request is routed by two routers."""


class DecisionsAnswer(Struct):
    """Body of `GET /routing/decisions`."""

    models: list[ExplainedDecisions]


class RankLoad(Struct):
    """Unfinished load of one rank, as counted by the router."""

    worker_id: int
    dp_rank: int
    active_prefill_tokens: float
    active_blocks: float
    active_requests: int
    held_blocks: int
    """Blocks that the rank reported as cached, in all tiers."""


class RouterState(Struct):
    """State of one model's router."""

    model: str
    policy: str
    waiting_requests: int
    index_blocks: int
    is_guessing: bool
    """Whether cached blocks are estimated because workers publish no KV events."""
    ranks: list[RankLoad]
    worker_type: str = "aggregated"
    """Type of the workers that it selects."""


class StateAnswer(Struct):
    """Body of `GET /routing/state`."""

    routers: list[RouterState]


class RankHolds(Struct):
    """Blocks of a prompt that one rank caches; a slower tier counts only blocks beyond those of the faster tiers."""

    worker_id: int
    dp_rank: int
    device: int
    host: int
    disk: int


class SessionPrompt(Struct):
    """Longest prompt of a session, or of a branch of it."""

    blocks: int
    held: list[RankHolds]


class SessionShown(Struct):
    """Prompts of one session."""

    session_id: str
    prompts: list[SessionPrompt]
    """Prompts, the last used first."""


class ModelSessions(Struct):
    """Sessions of one model, the last used first."""

    model: str
    sessions: int
    """Number of sessions that the router keeps."""
    blocks: int
    """Number of blocks of all their prompts."""
    shown: list[SessionShown]


class SessionsAnswer(Struct):
    """Body of `GET /routing/sessions`."""

    models: list[ModelSessions]


def add(routes: RouteTable, context: RouteContext) -> None:
    """Add the routes."""
    if setting("DYN_DISABLE_FRONTEND_ADMIN_API", False, read_bool):
        return
    pages = RoutingPages(context.models)
    query: dict[str, dict[str, Any]] = {
        "model": {"type": "string"},
        "request_id": {"type": "string"},
        "limit": {"type": "integer", "minimum": 1, "maximum": DECISIONS_MAX},
    }
    routes.plain(
        "GET",
        "/routing/decisions",
        pages.decisions,
        Operation("Explain the KV router's decisions", answer=DecisionsAnswer, refusals=(400, 403, 404), query=query),
        access=Access.ADMIN,
    )
    state = Operation("Show the KV router's load and cache of every worker", answer=StateAnswer, refusals=(403,))
    routes.plain("GET", "/routing/state", pages.state, state, access=Access.ADMIN)
    routes.plain(
        "GET",
        "/routing/sessions",
        pages.sessions,
        Operation(
            "List sessions, their prompts and the ranks that cache them",
            answer=SessionsAnswer,
            refusals=(400, 403, 404),
            query={"session_id": {"type": "string"}, **{name: query[name] for name in ("model", "limit")}},
        ),
        access=Access.ADMIN,
    )


class RoutingPages:
    """Handlers that report the state of the KV routers."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def _routed(self) -> list[ServedModel]:
        """Return the models with a KV router; a model's prefill set precedes its decode set."""
        routed = [one for one in self._models.every_set() if one.kv is not None]
        return sorted(routed, key=lambda one: (one.name, one.answers_clients))

    async def decisions(self, request: Request) -> Response:
        """GET /routing/decisions."""
        wanted = request.query_params
        limit = _limit(request)
        if isinstance(limit, Response):
            return limit
        model, request_id = wanted.get("model"), wanted.get("request_id")
        if request_id is not None:
            request_id = request_id[-UUID_CHARS:]  # A response's id, `chatcmpl-…`, ends in the request's.
        found = []
        for one in self._routed():
            if model in (None, one.name) and one.kv is not None:
                explained = one.kv.explain(request_id)
                found.append(ExplainedDecisions(one.name, list(itertools.islice(explained, limit)), one.worker_type))
        if model is not None and not found:
            return refuse(ErrorAnswer(404, f"model {model!r} is not routed by --router-mode kv", param="model"))
        if request_id is not None and not any(one.decisions for one in found):
            return refuse(ErrorAnswer(404, f"no decision for request {request_id!r} is kept", param="request_id"))
        return as_json(DecisionsAnswer(found))

    async def state(self, request: Request) -> Response:
        """GET /routing/state."""
        return as_json(StateAnswer([state_of(one) for one in self._routed()]))

    async def sessions(self, request: Request) -> Response:
        """GET /routing/sessions."""
        limit = _limit(request)
        if isinstance(limit, Response):
            return limit
        model, session = request.query_params.get("model"), request.query_params.get("session_id")
        found = [
            sessions_of(one.name, one.kv, session, limit)
            for one in self._routed()
            if model in (None, one.name) and one.kv is not None and one.kv.machine.sessions is not None
        ]
        if not found:
            return refuse(
                ErrorAnswer(404, "sessions are not tracked: start the frontend with --enable-session-prefix-index")
            )
        if session is not None and not any(one.shown for one in found):
            return refuse(ErrorAnswer(404, f"no such session: {session!r}", param="session_id"))
        return as_json(SessionsAnswer(found))


def _limit(request: Request) -> int | Response:
    """Return the maximum number of entries to show, or the refusal of an invalid limit."""
    text = request.query_params.get("limit", str(DECISIONS_SHOWN))
    if text.isdecimal() and 1 <= int(text) <= DECISIONS_MAX:
        return int(text)
    return refuse(ErrorAnswer(400, f"limit {text!r}: expected a number from 1 to {DECISIONS_MAX}", param="limit"))


def sessions_of(model: str, router: "KvPushRouter", session: str | None, limit: int) -> ModelSessions:
    """Return a model's sessions, or one of them."""
    known = router.machine.sessions
    assert known is not None, "the router must track sessions"
    names = known.names()[:limit] if session is None else [session]
    shown = [
        SessionShown(
            name,
            [
                SessionPrompt(
                    len(blocks) // WIDTH,
                    [RankHolds(*rank, *tiers) for rank, tiers in sorted(router.holders(blocks).items())],
                )
                for blocks in known.of(name)
            ],
        )
        for name in names
    ]
    return ModelSessions(model, len(known), known.blocks, [one for one in shown if one.prompts])


def state_of(served: ServedModel) -> RouterState:
    """Return the state of a model's router."""
    assert served.kv is not None, "the model must have a KV router"
    served.kv.refresh()
    machine = served.kv.machine
    ranks = [
        RankLoad(worker_id, dp_rank, tokens, blocks, requests, machine.index.held(worker_id, dp_rank))
        for (worker_id, dp_rank), (tokens, blocks, requests) in sorted(machine.loads().items())
    ]
    return RouterState(
        served.name,
        machine.config.policy,
        len(machine.waiting),
        machine.index.size,
        served.kv.is_guessing,
        ranks,
        served.worker_type,
    )
