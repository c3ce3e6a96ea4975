"""The indexer over HTTP: statuses, bodies, metrics and the access log."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.asgi import request_json
from tests.scrapes import SERIES, fill, turns_during
from tests.settle import until
from tests.unit.kv_events.test_engine_subscriber import TOKENS, message, stored

from dynamo.core.config import load
from dynamo.core.errors import ConfigError
from dynamo.core.metrics import MetricsRegistry
from dynamo.indexer.main import AccessLog, IndexerOptions, IndexerRoutes, InitialWorker
from dynamo.kv_events.engine_subscriber import Status
from dynamo.routing.services.indexed_models import IndexedModels
from dynamo.routing.services.indexer_peers import Peers
from dynamo.text.multimodal.routing_hashes import hashes_of

WORKER = {"instance_id": 7, "endpoint": "tcp://localhost:40001", "model_name": "m", "block_size": 4}
PROMPT = {"token_ids": [*TOKENS, 13], "model_name": "m"}


class IndexerHarness:
    """The routes of one indexer."""

    def __init__(self, log: AccessLog | None = None) -> None:
        self.models = IndexedModels()
        self.registry = MetricsRegistry()
        self.routes = IndexerRoutes(self.models, Peers(), self.registry, log).routes

    async def send_request(
        self, method: str, path: str, body: Any = None, query: str = "", **headers: str
    ) -> tuple[int, Any]:
        text = b"" if body is None else json.dumps(body).encode()
        more = {"content-type": "application/json"} if body is not None else {}
        return await request_json(self.routes.application(), method, f"{path}?{query}", text, {**more, **headers})

    async def hold(self) -> None:
        await self.send_request("POST", "/register", WORKER)
        engine = self.models.listeners()[0].events
        engine.process(message(0, stored([1, 2], None, TOKENS[:8])))


@pytest.fixture
async def harness() -> AsyncIterator[IndexerHarness]:
    made = IndexerHarness()
    yield made
    await made.models.close()


async def test_query_accepts_tokens_and_block_hashes(harness: IndexerHarness) -> None:
    await harness.hold()
    status, found = await harness.send_request("POST", "/query", PROMPT)
    assert (status, found.scores) == (200, {"7": {"0": 8}})
    signed = [one - (1 << 64) if one >> 63 else one for one in hashes_of(TOKENS, 4)]
    assert (await harness.send_request("POST", "/query_by_hash", {"block_hashes": signed, "model_name": "m"}))[
        1
    ] == found
    assert (await harness.send_request("POST", "/query", {**PROMPT, "lora_name": "l"}))[1].scores == {}
    assert (await harness.send_request("GET", "/dump"))[1]["m:default"].block_size == 4
    assert (await harness.send_request("POST", "/unregister", {"instance_id": 7, "model_name": "m"}))[0] == 200
    assert (await harness.send_request("GET", "/workers"))[1] == []


async def test_invalid_http_requests_are_refused(harness: IndexerHarness) -> None:
    await harness.hold()
    for status, method, path, body in (
        (409, "POST", "/register", WORKER),
        (422, "POST", "/register", {"instance_id": 1}),
        (400, "POST", "/register", {**WORKER, "instance_id": 8, "endpoint": "bogus"}),
        (404, "POST", "/query", {**PROMPT, "model_name": "n"}),
        (400, "POST", "/query", {**PROMPT, "token_ids": [1 << 40]}),
        (400, "POST", "/query_by_hash", {"block_hashes": [1], "model_name": "m", "cache_salt": "s"}),
        (404, "POST", "/unregister", {"instance_id": 9, "model_name": "m"}),
        (404, "POST", "/deregister_peer", {"url": "http://a"}),
        (400, "POST", "/register_peer", {"url": "a"}),
    ):
        found, value = await harness.send_request(method, path, body)
        assert found == status, path
        assert isinstance(value, str) if status == 422 else set(value) == {"error"}


async def test_listener_is_paused_and_resumed_only_when_test_endpoints_are_enabled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = IndexerHarness()
    assert (await plain.send_request("POST", "/test/pause_listener", {"instance_id": 7}))[0] == 404
    monkeypatch.setenv("DYN_KV_INDEXER_TEST_ENDPOINTS", "1")
    enabled = IndexerHarness()
    assert (await enabled.send_request("POST", "/test/pause_listener", {"instance_id": 7}))[0] == 404
    await enabled.hold()
    [listener] = enabled.models.listeners()
    for _ in range(2):
        assert (await enabled.send_request("POST", "/test/pause_listener", {"instance_id": 7, "dp_rank": 0}))[0] == 200
        await until(lambda: listener.status is Status.PAUSED)
        assert (await enabled.send_request("POST", "/test/resume_listener", {"instance_id": 7}))[0] == 200
        await until(lambda: listener.status is Status.PENDING)
        assert enabled.models.listeners() == [listener]
    assert (await enabled.send_request("POST", "/query", PROMPT))[1]["scores"], "its blocks are kept"
    await enabled.models.close()


async def test_peers_are_listed(harness: IndexerHarness) -> None:
    for url in ("http://b", "http://a", "http://b"):
        assert (await harness.send_request("POST", "/register_peer", {"url": url}))[0] == 201
    assert (await harness.send_request("GET", "/peers"))[1] == ["http://a", "http://b"]
    assert (await harness.send_request("POST", "/deregister_peer", {"url": "http://a"}))[0] == 200
    assert (await harness.send_request("GET", "/peers"))[1] == ["http://b"]


async def test_metrics_are_rendered_in_turns(harness: IndexerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(harness.registry)
    assert await turns_during(harness.send_request("GET", "/metrics"), monkeypatch) > SERIES / 2


async def test_metrics_count_requests_models_and_listeners(harness: IndexerHarness) -> None:
    await harness.hold()
    await harness.send_request("POST", "/query", {**PROMPT, "model_name": "n"})
    await harness.send_request("GET", "/nothing")
    text = (await harness.send_request("GET", "/metrics"))[1]
    for line in (
        "dynamo_kvindexer_models 1",
        'dynamo_kvindexer_listeners{status="pending"} 1',
        'dynamo_kvindexer_requests_total{endpoint="/query",method="POST"} 1',
        'dynamo_kvindexer_errors_total{endpoint="/query",status_class="4xx"} 1',
        "dynamo_kvindexer_blocks 2",
    ):
        assert line in text, line
    assert "/nothing" not in text


async def test_every_request_is_logged_and_the_log_file_may_be_rotated(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = AccessLog(str(path), "X-Trace-Id")
    harness = IndexerHarness(log)
    await harness.send_request("GET", "/workers", **{"x-trace-id": "t1"})
    path.rename(tmp_path / "old.log")
    assert (await harness.send_request("POST", "/reopen_logs"))[0] == 200
    await harness.send_request("GET", "/health")
    log.close()
    await harness.models.close()
    noted = [json.loads(line) for line in (tmp_path / "old.log").read_text().splitlines()]
    assert noted[0]["path"] == "/workers" and noted[0]["status"] == 200 and noted[0]["trace_id"] == "t1"
    assert noted[0]["time"].endswith("+00:00")
    assert "/health" in path.read_text()


def test_unwritable_access_log_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--access-log"):
        AccessLog(str(tmp_path / "none" / "access.log"), "x-trace-id")


def test_workers_are_read_from_the_command_line() -> None:
    options = load(IndexerOptions, ["--block-size", "16", "--workers", "1=tcp://h:5557, 1:1=tcp://h:5558"], {})
    assert options.initial_workers() == [InitialWorker(1, 0, "tcp://h:5557"), InitialWorker(1, 1, "tcp://h:5558")]
    assert load(IndexerOptions, [], {}).initial_workers() == []


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--workers", "1=tcp://h:1"], "--block-size"),
        (["--block-size", "4", "--workers", "1"], "--workers 1"),
        (["--block-size", "4", "--workers", "x=tcp://h:1"], "--workers x"),
        (["--block-size", "4", "--workers", "1=bogus"], "missing scheme"),
        (["--threads", "0"], "--threads"),
        (["--router-index-max-blocks", "0"], "--router-index-max-blocks"),
    ],
)
def test_invalid_indexer_option_is_refused_by_name(argv: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(IndexerOptions, argv, {})
