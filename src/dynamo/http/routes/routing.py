"""Routes that explain the KV router: why this worker, and who is doing what (docs/routing.md). Ours, not upstream's."""

import itertools
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from dynamo.core.config import read_bool, setting
from dynamo.http.routes.table import Access, Operation, RouteContext, RouteTable, as_json, refuse
from dynamo.kv_router.router import Explanation
from dynamo.kv_router.runs import WIDTH
from dynamo.routing.kv_push_router import KvPushRouter
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.models import Models
from dynamo.serving.served_model import ServedModel

DECISIONS_SHOWN = 20
UUID_CHARS = 36
DECISIONS_MAX = 256  # As many as a router keeps.


class ExplainedDecisions(Struct):
    """The last decisions of one of a model's routers, newest first."""

    model: str
    decisions: list[Explanation]
    worker_type: str = "aggregated"
    """Whom it chooses: a request of two legs is decided about by two routers."""


class DecisionsAnswer(Struct):
    """The answer of `GET /routing/decisions`."""

    models: list[ExplainedDecisions]


class RankLoad(Struct):
    """What one rank was given and has not finished, as the router counts it."""

    worker_id: int
    dp_rank: int
    active_prefill_tokens: float
    active_blocks: float
    active_requests: int
    held_blocks: int
    """Blocks that it told of, in all tiers."""


class RouterState(Struct):
    """One model's router."""

    model: str
    policy: str
    waiting_requests: int
    index_blocks: int
    is_guessing: bool
    """Whether caches are guessed because workers tell nothing of them."""
    ranks: list[RankLoad]
    worker_type: str = "aggregated"
    """Who they are."""


class StateAnswer(Struct):
    """The answer of `GET /routing/state`."""

    routers: list[RouterState]


class RankHolds(Struct):
    """What one rank holds of a prompt, in blocks; a slower tier's are those beyond the faster ones."""

    worker_id: int
    dp_rank: int
    device: int
    host: int
    disk: int


class SessionPrompt(Struct):
    """The longest prompt of a session, or of a branch of it."""

    blocks: int
    held: list[RankHolds]


class SessionShown(Struct):
    """What a session was told so far."""

    session_id: str
    prompts: list[SessionPrompt]
    """The last used first."""


class ModelSessions(Struct):
    """One model's sessions, the last used first."""

    model: str
    sessions: int
    """All that are known."""
    blocks: int
    """Of all their prompts."""
    shown: list[SessionShown]


class SessionsAnswer(Struct):
    """The answer of `GET /routing/sessions`."""

    models: list[ModelSessions]


def add(routes: RouteTable, context: RouteContext) -> None:
    """Adds them."""
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
        Operation("Why the KV router chose", answer=DecisionsAnswer, refusals=(400, 403, 404), query=query),
        access=Access.ADMIN,
    )
    state = Operation("Load and cache of every worker, as the KV router sees them", answer=StateAnswer, refusals=(403,))
    routes.plain("GET", "/routing/state", pages.state, state, access=Access.ADMIN)
    routes.plain(
        "GET",
        "/routing/sessions",
        pages.sessions,
        Operation(
            "What sessions were told, and who still holds it",
            answer=SessionsAnswer,
            refusals=(400, 403, 404),
            query={"session_id": {"type": "string"}, **{name: query[name] for name in ("model", "limit")}},
        ),
        access=Access.ADMIN,
    )


class RoutingPages:
    """What the KV routers know."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def _routed(self) -> list[ServedModel]:
        """The prefill's before the decode's."""
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
            request_id = request_id[-UUID_CHARS:]  # A response's id, `chatcmpl-…`, is the request's and more.
        found = []
        for one in self._routed():
            if model in (None, one.name) and one.kv is not None:
                explained = one.kv.explain(request_id)
                found.append(ExplainedDecisions(one.name, list(itertools.islice(explained, limit)), one.worker_type))
        if model is not None and not found:
            return refuse(ErrorAnswer(404, f"model {model!r} is not routed by --router-mode kv", param="model"))
        if request_id is not None and not any(one.decisions for one in found):
            return refuse(ErrorAnswer(404, f"no decision about request {request_id!r} is kept", param="request_id"))
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
                ErrorAnswer(404, "no sessions are kept: start the frontend with --enable-session-prefix-index")
            )
        if session is not None and not any(one.shown for one in found):
            return refuse(ErrorAnswer(404, f"no session {session!r} is known", param="session_id"))
        return as_json(SessionsAnswer(found))


def _limit(request: Request) -> int | Response:
    """How many are shown at most, or the refusal of what was asked."""
    text = request.query_params.get("limit", str(DECISIONS_SHOWN))
    if text.isdecimal() and 1 <= int(text) <= DECISIONS_MAX:
        return int(text)
    return refuse(ErrorAnswer(400, f"limit {text!r}: expected a number from 1 to {DECISIONS_MAX}", param="limit"))


def sessions_of(model: str, router: KvPushRouter, session: str | None, limit: int) -> ModelSessions:
    """A model's sessions, or one of them."""
    known = router.machine.sessions
    assert known is not None, "only routers that keep sessions are asked"
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
    """What a model's router knows."""
    assert served.kv is not None, "only routed models are asked"
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
