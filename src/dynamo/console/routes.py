"""Routes of the console: its pages at `/console`, and their data below `/console/api`."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import cast

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from dynamo import __version__
from dynamo.console.data import HISTORY_SENT, ConsoleData, event
from dynamo.console.history import SAMPLES_MAX
from dynamo.console.live_feed import WATCHERS_MAX, Watcher
from dynamo.console.reports import DIRECTORY_VARIABLE, ReportFolder
from dynamo.console.request_causes import Cause
from dynamo.console.request_views import REQUEST_STATES, RequestSelection
from dynamo.console.static_files import HEADERS, INDEX, REPORT_HEADERS, StaticFile, static_files
from dynamo.core.config import read_bool, setting
from dynamo.http.routes.planner import DECISIONS_MAX as PLANNER_DECISIONS_MAX
from dynamo.http.routes.table import (
    Access,
    Operation,
    PlainHandler,
    RouteContext,
    RouteTable,
    account_of,
    as_json,
    refuse,
)
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.worker_control import DRAIN, RESUME, WORKER_CONTROL
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.planner_status import PlannerStatuses

REQUESTS_SHOWN, REQUESTS_MAX = 100, 500
DURATION_MAX_MS = 86_400_000
DECISIONS_SHOWN, DECISIONS_MAX = 60, 256
KEEP_ALIVE_S = 15.0
"""Interval of comments in an idle stream, so that proxies do not close it."""
ID_CHARS = 36
NO_ACTIONS = ErrorAnswer(
    403,
    "Actions need an admin API key: start the frontend with --admin-api-key or DYN_ADMIN_API_KEYS",
    code="admin_key_required",
    label="forbidden",
)
TOO_MANY = ErrorAnswer(
    503, f"The console has {WATCHERS_MAX} watchers already", code="too_many_watchers", label="overload", retry_after_s=5
)


def add(routes: RouteTable, context: RouteContext) -> None:
    """Add the routes."""
    if setting("DYN_DISABLE_FRONTEND_ADMIN_API", False, read_bool):
        return
    data = ConsoleData(context.pipeline, context.models, context.siblings)
    planners = PlannerStatuses(context.models.runtime)
    handlers = ConsoleHandlers(data, planners, asks_keys=context.keys is not None)
    routes.on_stop.append(data.close)
    pages = static_files()

    def get(path: str, handler: PlainHandler, summary: str, access: Access = Access.ADMIN) -> None:
        routes.plain("GET", path, handler, Operation(summary, is_listed=False), access=access)

    get("/", handlers.root, "Redirect a browser to the console", Access.OPEN)
    for path in ("/console", "/console/"):
        get(path, handlers.page(pages[INDEX], path), "Console: pages about this frontend", Access.OPEN)
    for name, file in sorted(pages.items()):
        if name != INDEX:
            get(f"/console/{name}", handlers.page(file), f"Console: {name}", Access.OPEN)
    get("/console/api/meta", handlers.meta, "Console: version, and whether a key is needed", Access.OPEN)
    get("/console/api/session", handlers.session, "Console: rights of the caller's key", Access.KEY)
    get("/console/api/overview", handlers.overview, "Console: models, workers and last samples")
    get("/console/api/live", handlers.live, "Console: the same as server-sent events, then a sample every second")
    get("/console/api/requests", handlers.requests, "Console: requests in flight and recent ones, with their stages")
    get("/console/api/routing", handlers.routing, "Console: KV routers and their last decisions")
    get("/console/api/planners", handlers.planners, "Console: planners and their last decisions")
    get("/console/api/reports", handlers.reports, f"Console: reports in {DIRECTORY_VARIABLE}")
    get("/console/api/reports/{name}", handlers.report, "Console: one report")
    act = Operation("Console: drain or resume a worker", is_listed=False)
    path = "/console/api/workers/{namespace}/{component}/{instance}/{action}"
    routes.plain("POST", path, handlers.act, act, access=Access.ADMIN)


class ConsoleHandlers:
    """Handlers of the routes."""

    def __init__(self, data: ConsoleData, planners: PlannerStatuses, *, asks_keys: bool) -> None:
        self._data = data
        self._planners = planners
        self._asks_keys = asks_keys
        self._reports = ReportFolder(setting(DIRECTORY_VARIABLE, "", str))

    async def root(self, request: Request) -> Response:
        """GET /: browsers get the console, every other client the error of an unknown path."""
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("/console/", 307, {"vary": "accept"})
        return refuse(ErrorAnswer(404, "Route not found: GET /", code="route_not_found"))

    def page(self, file: StaticFile, path: str = "") -> PlainHandler:
        """Return the handler of a static file."""
        headers = {**HEADERS, "etag": file.etag}

        async def answer(request: Request) -> Response:
            if path == "/console":
                return RedirectResponse("/console/", 307)  # Relative addresses of the page need the slash.
            if request.headers.get("if-none-match") == file.etag:
                return Response(status_code=304, headers=headers)
            return Response(file.content, headers=headers, media_type=file.media_type)

        return answer

    async def meta(self, request: Request) -> Response:
        """GET /console/api/meta."""
        return as_json({"version": __version__, "needs_key": self._asks_keys})

    async def session(self, request: Request) -> Response:
        """GET /console/api/session."""
        account = account_of(request)
        is_admin = account is not None and account.is_admin
        return as_json({"may_read": is_admin or not self._asks_keys, "may_act": is_admin})

    async def overview(self, request: Request) -> Response:
        """GET /console/api/overview: sampling continues while this is polled."""
        count = number(request, "samples", HISTORY_SENT, SAMPLES_MAX)
        if isinstance(count, Response):
            return count
        self._data.feed.poll()
        await self._data.wait_fresh()
        return as_json(self._data.overview(count))

    async def live(self, request: Request) -> Response:
        """GET /console/api/live."""
        await self._data.wait_fresh()
        watcher = self._data.feed.join()
        if watcher is None:
            return refuse(TOO_MANY)
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(self._events(watcher), headers=headers, media_type="text/event-stream")

    async def _events(self, watcher: Watcher) -> AsyncIterator[bytes]:
        try:
            yield event("overview", self._data.overview())
            while True:
                try:
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        following = await watcher.get()
                except TimeoutError:
                    following = b":\n\n"
                if following is None:
                    return
                yield following
        finally:
            self._data.feed.leave(watcher)

    async def requests(self, request: Request) -> Response:
        """GET /console/api/requests."""
        selection = selection_of(request)
        if isinstance(selection, Response):
            return selection
        return as_json({"requests": await self._data.requests(selection)})

    async def routing(self, request: Request) -> Response:
        """GET /console/api/routing."""
        limit = number(request, "limit", DECISIONS_SHOWN, DECISIONS_MAX)
        if isinstance(limit, Response):
            return limit
        return as_json(await self._data.routing(limit, request.query_params.get("id", "")[-ID_CHARS:]))

    async def planners(self, request: Request) -> Response:
        """GET /console/api/planners."""
        limit = number(request, "limit", PLANNER_DECISIONS_MAX, PLANNER_DECISIONS_MAX)
        if isinstance(limit, Response):
            return limit
        return as_json({"planners": await self._planners.read(limit)})

    async def reports(self, request: Request) -> Response:
        """GET /console/api/reports."""
        found = await asyncio.to_thread(self._reports.entries)
        return as_json({"is_set": self._reports.is_set, "variable": DIRECTORY_VARIABLE, "reports": found})

    async def report(self, request: Request) -> Response:
        """GET /console/api/reports/{name}."""
        name = request.path_params["name"]
        found = await asyncio.to_thread(self._reports.read, name)
        if found is None:
            return refuse(ErrorAnswer(404, f"no such report: {name}"))
        content, media_type = found
        return Response(content, headers=dict(REPORT_HEADERS), media_type=media_type)

    async def act(self, request: Request) -> Response:
        """POST /console/api/workers/{namespace}/{component}/{instance}/{action}."""
        if not self._asks_keys:  # Otherwise the route table has checked the key.
            return refuse(NO_ACTIONS)
        given = request.path_params
        if given["action"] not in (DRAIN, RESUME):
            return refuse(ErrorAnswer(404, f"action {given['action']!r}: expected {DRAIN} or {RESUME}"))
        try:
            instance_id = int(given["instance"], 16)
        except ValueError:
            return refuse(ErrorAnswer(400, f"instance {given['instance']!r}: expected a hexadecimal number"))
        endpoint = EndpointId(given["namespace"], given["component"], WORKER_CONTROL)
        reply = await self._data.workers.call(endpoint, instance_id, given["action"])
        if "error" in reply:
            return refuse(ErrorAnswer(502, f"worker {given['instance']}: {reply['error']}"))
        await self._data.refresh_workers()
        return as_json(reply)


def selection_of(request: Request) -> RequestSelection | Response:
    """Return the requests that a query selects, or the refusal of one of its parameters."""
    limit = number(request, "limit", REQUESTS_SHOWN, REQUESTS_MAX)
    least_ms = number(request, "slower_than_ms", 0, DURATION_MAX_MS, least=0)
    state, cause = choice(request, "state", ("", *REQUEST_STATES)), choice(request, "cause", ("", *Cause))
    for found in (limit, least_ms, state, cause):
        if isinstance(found, Response):
            return found
    wanted = request.query_params
    return RequestSelection(
        state=str(state),
        model=wanted.get("model", ""),
        request_id=wanted.get("id", "")[-ID_CHARS:],  # A response's id, `chatcmpl-…`, ends in the request's.
        cause=str(cause),
        slower_than_ms=cast(int, least_ms),
        limit=cast(int, limit),
    )


def number(request: Request, name: str, default: int, maximum: int, least: int = 1) -> int | Response:
    """Return a query parameter that is a number from `least` to `maximum`, or the refusal of another value."""
    text = request.query_params.get(name, str(default))
    if text.isdecimal() and least <= int(text) <= maximum:
        return int(text)
    return refuse(ErrorAnswer(400, f"{name} {text!r}: expected a number from {least} to {maximum}", param=name))


def choice(request: Request, name: str, values: Sequence[str]) -> str | Response:
    """Return a query parameter that is one of `values`, or the refusal of another value."""
    text = request.query_params.get(name, "")
    if text in values:
        return text
    allowed = ", ".join(value for value in values if value)
    return refuse(ErrorAnswer(400, f"{name} {text!r}: expected one of {allowed}", param=name))
