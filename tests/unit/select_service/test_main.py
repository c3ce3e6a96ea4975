"""The selection service over HTTP: its statuses, and how it refuses."""

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


class House:
    """The routes of one service."""

    def __init__(self) -> None:
        self.service = SelectionService()
        self.routes = SelectRoutes(self.service).routes

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        text = b"" if body is None else json.dumps(body).encode()
        headers = JSON if body is not None else {}
        return await request_json(self.routes.application(), method, path, text, headers)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    made = House()
    yield made
    await made.service.close()


async def test_a_request_from_worker_to_its_end(house: House) -> None:
    assert (await house.ask("GET", "/ready"))[0] == 503
    assert (await house.ask("POST", "/workers", WORKER))[0] == 201
    assert (await house.ask("GET", "/ready"))[0] == 200
    assert (await house.ask("POST", "/select", {**PROMPT, "selection_id": "s"}))[0] == 200
    assert (await house.ask("POST", "/reservations", {"selection_id": "s"}))[0] == 201
    for method, path, body in (
        ("POST", "/reservations/s/prefill_complete", None),
        ("POST", "/reservations/s/output_block", {"decay_fraction": 0.5}),
        ("DELETE", "/reservations/s", None),
    ):
        assert await house.ask(method, path, body) == (200, {"status": "ok"})
    assert (await house.ask("PATCH", "/workers/1", {"taints": ["x"]}))[1]["taints"] == ["x"]
    assert set((await house.ask("GET", "/dump"))[1]) == {"default:default"}
    assert (await house.ask("DELETE", "/workers/1"))[1]["lifecycle"] == "unschedulable"
    assert (await house.ask("GET", "/workers"))[1] == []
    assert [one["loads"] for one in (await house.ask("GET", "/loads"))[1]] == [[]]


async def test_refusals(house: House) -> None:
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
        found, value = await house.ask(method, path, body)
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
def test_what_cannot_be_meant_is_named(argv: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(SelectOptions, argv, {})
