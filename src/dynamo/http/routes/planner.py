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

DECISIONS_MAX = 256  # Number of decisions that a planner keeps.


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
        text = request.query_params.get("decisions", "")
        if text and not (text.isdecimal() and 1 <= int(text) <= DECISIONS_MAX):
            message = f"decisions {text!r}: expected a number from 1 to {DECISIONS_MAX}"
            return refuse(ErrorAnswer(400, message, param="decisions"))
        found = await statuses.read(int(text) if text else None)
        if not found:
            return refuse(ErrorAnswer(404, NO_PLANNER))
        return as_json({"planners": found})

    operation = Operation(
        "Show the planners and their last decisions",
        answer=PlannersAnswer,
        refusals=(400, 403, 404),
        query={"decisions": {"type": "integer", "minimum": 1, "maximum": DECISIONS_MAX}},
    )
    routes.plain("GET", "/v1/planner", planners, operation, access=Access.ADMIN)
