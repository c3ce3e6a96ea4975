"""What is answered over HTTP where requests come another way."""

from tests.scripted_engine.house import open_house

from dynamo.core.metrics import MetricsRegistry
from dynamo.http.routes.groups import all_routes
from dynamo.http.routes.metrics_group import metrics_group
from dynamo.http.routes.table import RouteContext


async def test_one_may_look_and_not_ask() -> None:
    async with open_house() as house:
        context = RouteContext(house.pipeline, house.models, MetricsRegistry(), lambda: True)
        table = all_routes(context, (metrics_group,))
        assert {one.method for one in table.entries} == {"GET"}
        assert {"/metrics", "/health", "/live", "/v1/models"} <= {one.path for one in table.entries}
        assert table.hot_handlers() == {}
