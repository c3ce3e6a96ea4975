"""The pages that say how the service is."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dynamo.core.metrics import MetricsRegistry
from dynamo.http.routes.system import SystemPages
from dynamo.http.routes.table import RouteContext, RouteTable


@pytest.mark.parametrize(
    ("is_draining", "is_sound", "status", "said"),
    [
        (False, True, 200, {"status": "healthy", "endpoints": [], "instances": []}),
        (False, False, 503, {"status": "not_ready", "stage": "discovery"}),
        (True, True, 503, {"status": "not_ready", "stage": "draining"}),
    ],
)
async def test_health_says_what_keeps_the_frontend_from_serving(
    is_draining: bool, is_sound: bool, status: int, said: dict[str, Any]
) -> None:
    pipeline, models = SimpleNamespace(is_draining=is_draining), SimpleNamespace(all_sets=list, every_set=list)
    context = RouteContext(cast(Any, pipeline), cast(Any, models), MetricsRegistry(), lambda: is_sound)
    pages = SystemPages(RouteTable(), context)
    answer = await pages.health(cast(Any, None))
    assert (answer.status_code, json.loads(bytes(answer.body))) == (status, said)
