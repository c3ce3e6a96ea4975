"""Status pages of the service."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dynamo.core.metrics import MetricsRegistry
from dynamo.http.routes.system import SystemPages
from dynamo.http.routes.table import RouteContext, RouteTable
from dynamo.routing.busy import Thresholds


@pytest.mark.parametrize(
    ("is_draining", "is_sound", "status", "message"),
    [
        (False, True, 200, {"status": "healthy", "endpoints": [], "instances": []}),
        (False, False, 503, {"status": "not_ready", "stage": "discovery"}),
        (True, True, 503, {"status": "not_ready", "stage": "draining"}),
    ],
)
async def test_health_reports_why_the_frontend_is_not_serving(
    is_draining: bool, is_sound: bool, status: int, message: dict[str, Any]
) -> None:
    pipeline, models = SimpleNamespace(is_draining=is_draining), SimpleNamespace(all_sets=list, every_set=list)
    context = RouteContext(cast(Any, pipeline), cast(Any, models), MetricsRegistry(), lambda: is_sound)
    pages = SystemPages(RouteTable(), context)
    answer = await pages.health(cast(Any, None))
    assert (answer.status_code, json.loads(bytes(answer.body))) == (status, message)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, (0.5, 100, None)),
        ({"active_prefill_tokens_threshold": 7}, (0.5, 7, None)),
        ({"active_decode_blocks_threshold": None, "active_prefill_tokens_threshold_frac": 2.0}, (0.5, 100, 2.0)),
    ],
)
async def test_busy_threshold_keeps_thresholds_that_are_not_in_the_body(
    monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], expected: tuple[float | None, ...]
) -> None:
    current = Thresholds(active_decode_blocks_threshold=0.5, active_prefill_tokens_threshold=100)

    async def set_thresholds(name: str, update: Thresholds) -> Thresholds:
        return current.merged(update)

    async def body_of(request: Any) -> bytes:
        return json.dumps({"model": "m", **body}).encode()

    monkeypatch.setattr("dynamo.http.routes.system.body_of", body_of)
    models = SimpleNamespace(set_thresholds=set_thresholds)
    context = RouteContext(cast(Any, None), cast(Any, models), MetricsRegistry(), lambda: True)
    answer = await SystemPages(RouteTable(), context).set_thresholds(cast(Any, None))
    assert json.loads(bytes(answer.body)) == {
        "model": "m",
        "active_decode_blocks_threshold": expected[0],
        "active_prefill_tokens_threshold": expected[1],
        "active_prefill_tokens_threshold_frac": expected[2],
    }


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b'{"model": "m", "active_decode_blocks_threshold": 1.5}', 400),
        (b'{"model": "m", "active_prefill_tokens_threshold": -1.0}', 422),
        (b'{"model": "m", "active_prefill_tokens_threshold": "x"}', 422),
    ],
)
async def test_busy_threshold_refuses_wrong_types_as_unprocessable(
    monkeypatch: pytest.MonkeyPatch, body: bytes, status: int
) -> None:
    async def body_of(request: Any) -> bytes:
        return body

    monkeypatch.setattr("dynamo.http.routes.system.body_of", body_of)
    context = RouteContext(
        cast(Any, None), cast(Any, SimpleNamespace(set_thresholds=None)), MetricsRegistry(), lambda: True
    )
    answer = await SystemPages(RouteTable(), context).set_thresholds(cast(Any, None))
    assert answer.status_code == status
