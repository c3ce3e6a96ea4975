"""Process of the planner: the page of its metrics."""

import pytest
from tests.asgi import request
from tests.scrapes import SERIES, fill, turns_during

from dynamo.core.metrics import CONTENT_TYPE, MetricsRegistry
from dynamo.planner.process import metrics_routes


async def test_metrics_are_rendered_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = MetricsRegistry()
    fill(registry)
    application = metrics_routes(registry).application()
    response = await request(application, "GET", "/metrics")
    assert (response.headers["content-type"], response.text) == (CONTENT_TYPE, registry.render())
    assert await turns_during(request(application, "GET", "/metrics"), monkeypatch) > SERIES / 2
