"""Selection service over HTTP: statuses and errors."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.asgi import request_json

from dynamo.core.config import load
from dynamo.core.errors import ConfigError
from dynamo.routing.services.selection import SelectionService
from dynamo.select_service.main import SelectOptions, SelectRoutes

JSON = {"content-type": "application/json"}
WORKER = {"worker_id": 1, "block_size": 4, "endpoint": "http://w", "kv_events_endpoint": "tcp://localhost:40001"}
PROMPT = {"token_ids": [1, 2, 3, 4, 5]}


class SelectServiceHarness:
    """The routes of one service."""

    def __init__(self) -> None:
        self.service = SelectionService()
        self.routes = SelectRoutes(self.service).routes

    async def send_request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        text = b"" if body is None else json.dumps(body).encode()
        headers = JSON if body is not None else {}
        return await request_json(self.routes.application(), method, path, text, headers)


@pytest.fixture
async def harness() -> AsyncIterator[SelectServiceHarness]:
    made = SelectServiceHarness()
    yield made
    await made.service.close()


async def test_http_api_tracks_a_request_from_worker_registration_to_its_end(harness: SelectServiceHarness) -> None:
    assert (await harness.send_request("GET", "/ready"))[0] == 503
    assert (await harness.send_request("POST", "/workers", WORKER))[0] == 201
    assert (await harness.send_request("GET", "/ready"))[0] == 200
    assert (await harness.send_request("POST", "/select", {**PROMPT, "selection_id": "s"}))[0] == 200
    assert (await harness.send_request("POST", "/reservations", {"selection_id": "s"}))[0] == 201
    for method, path, body in (
        ("POST", "/reservations/s/prefill_complete", None),
        ("POST", "/reservations/s/output_block", {"decay_fraction": 0.5}),
        ("DELETE", "/reservations/s", None),
    ):
        assert await harness.send_request(method, path, body) == (200, {"status": "ok"})
    assert (await harness.send_request("PATCH", "/workers/1", {"taints": ["x"]}))[1]["taints"] == ["x"]
    assert set((await harness.send_request("GET", "/dump"))[1]) == {"default:default"}
    assert (await harness.send_request("DELETE", "/workers/1"))[1]["lifecycle"] == "unschedulable"
    assert (await harness.send_request("GET", "/workers"))[1] == []
    assert [one["loads"] for one in (await harness.send_request("GET", "/loads"))[1]] == [[]]


async def test_invalid_http_requests_are_refused(harness: SelectServiceHarness) -> None:
    for status, method, path, body in (
        (422, "POST", "/workers", {}),
        (503, "POST", "/select", PROMPT),
        (404, "POST", "/reservations", {"selection_id": "s"}),
        (422, "POST", "/reservations", {}),
        (404, "DELETE", "/reservations/s", None),
        (415, "POST", "/reservations/s/output_block", None),
        (400, "POST", "/reservations/s/output_block", {"decay_fraction": 2}),
        (404, "DELETE", "/workers/1", None),
        (400, "DELETE", "/workers/x", None),
        (409, "POST", "/replica_sync/register_peer", {"endpoint": "tcp://a:1"}),
        (404, "GET", "/nothing", None),
        (405, "PUT", "/workers", None),
    ):
        found, value = await harness.send_request(method, path, body)
        assert (found, set(value)) == (status, {"error"}), path


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--session-affinity-ttl-secs", "0"], "--session-affinity-ttl-secs"),
        (["--selection-cache-max-entries", "0"], "--selection-cache-max-entries"),
        (["--indexer-peers", "bogus"], "--indexer-peers bogus"),
        (["--replica-sync-peers", "tcp://a:1"], "--replica-sync-port"),
        (["--router-tracking-hash", "keyed-xxh3-v1"], "--router-tracking-key-file"),
    ],
)
def test_invalid_select_option_is_refused_by_name(argv: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(SelectOptions, argv, {})


def test_selection_service_is_created_outside_a_running_loop() -> None:
    service = SelectionService()

    async def use() -> Any:
        await service.start()
        ready = service.ready()
        await service.close()
        return ready

    assert asyncio.run(use())["ready"] is False
