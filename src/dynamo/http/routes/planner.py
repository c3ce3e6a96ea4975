"""Route of the planner: state and last decisions of the planners of this frontend's discovery."""

from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from dynamo.core.config import read_bool, setting
from dynamo.http.routes.table import Access, Operation, RouteContext, RouteTable, as_json, refuse
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.planner_status import PlannerStatuses

NO_PLANNER = "no planner is registered; start one with dynamo serve --planner, or with python -m dynamo.planner"


class PlannersAnswer(Struct):
    """Body of `GET /v1/planner`."""

    planners: list[dict[str, Any]]
    """State of each planner: namespace, mode, target, limits, and `decisions`, the newest last."""


def add(routes: RouteTable, context: RouteContext) -> None:
    """Add the route."""
    if setting("DYN_DISABLE_FRONTEND_ADMIN_API", False, read_bool):
        return
    statuses = PlannerStatuses(context.models.runtime)

    async def planners(request: Request) -> Response:
        found = await statuses.read()
        if not found:
            return refuse(ErrorAnswer(404, NO_PLANNER))
        return as_json({"planners": found})

    operation = Operation("Show the planners and their last decisions", answer=PlannersAnswer, refusals=(403, 404))
    routes.plain("GET", "/v1/planner", planners, operation, access=Access.ADMIN)
