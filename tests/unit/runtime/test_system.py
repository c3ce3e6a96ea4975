"""System server: the state of a process over HTTP."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests import asgi
from tests.scrapes import SERIES, fill, turns_during

from dynamo.core.metrics import MetricsRegistry
from dynamo.runtime.health import SystemHealth
from dynamo.runtime.system import SystemServer

ASSET = "/v1/metadata/m/_base/tokenizer.json"


class Process:
    """The state of a process, and its system server."""

    def __init__(self, *admin_keys: str) -> None:
        self.health = SystemHealth(variables={})
        self.metrics = MetricsRegistry()
        self.routes: dict[str, Any] = {}
        self.files: dict[str, str] = {}
        self.server = SystemServer(self.health, self.metrics, self.routes, self.files, admin_keys=admin_keys)

    async def request(
        self, path: str, method: str = "GET", body: bytes = b"", headers: dict[str, str] | None = None
    ) -> httpx.Response:
        return await asgi.request(self.server.application, method, path, body, headers)


@pytest.fixture
def process() -> Process:
    return Process()


async def done(body: dict[str, Any]) -> dict[str, Any]:
    return {"status": "ok"}


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/engine/sleep"), ("GET", "/engine/sleep"), ("POST", "/v1/loras"), ("DELETE", "/v1/loras/a")],
)
async def test_system_server_refuses_control_requests_without_an_admin_key(method: str, path: str) -> None:
    process = Process("admin-secret", "other-key")
    process.routes.update(dict.fromkeys(("sleep", "load_lora", "unload_lora"), done))

    async def status(method: str, path: str, key: str | None = None) -> int:
        headers = {} if key is None else {"x-api-key": key}
        return (await process.request(path, method, b"{}", headers)).status_code

    for key in (None, "", "wrong-key", "admin-secre"):
        assert await status(method, path, key) == 401
    for key in ("admin-secret", "other-key"):
        assert await status(method, path, key) == 200
    for open_path in ("/health", "/live", "/metrics"):
        assert await status("GET", open_path) != 401


@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        ("authorization", "Bearer admin-secret", 200),
        ("Authorization", "bearer  admin-secret", 200),
        ("x-api-key", "admin-secret", 200),
        ("authorization", "Basic admin-secret", 401),
        ("x-other", "admin-secret", 401),
    ],
)
async def test_system_server_reads_the_key_from_either_header(header: str, value: str, status: int) -> None:
    process = Process("admin-secret")
    process.routes["sleep"] = done
    assert (await process.request("/engine/sleep", "POST", headers={header: value})).status_code == status


async def test_health_and_live_report_readiness(process: Process) -> None:
    for path in ("/health", "/live"):
        process.health.set(False)
        response = await process.request(path)
        assert (response.status_code, response.headers["content-type"]) == (503, "text/plain")
        assert response.json()["status"] == "notready"
        process.health.set(True)
        response = await process.request(path + "?verbose=1")
        assert (response.status_code, response.json()["status"]) == (200, "ready")


async def test_system_server_metrics_are_prometheus_text(process: Process) -> None:
    process.metrics.counter("c_total", "c").labels().inc(3)
    response = await process.request("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "c_total 3\n" in response.text


async def test_engine_route_returns_json(process: Process) -> None:
    async def double(value: dict[str, Any]) -> dict[str, Any]:
        return {"twice": 2 * value.get("n", 1)}

    async def fail(value: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("bug")

    process.routes.update(double=double, fail=fail)
    assert (await process.request("/engine/double", "POST", b'{"n": 4}')).json() == {"twice": 8}
    assert (await process.request("/engine/double")).json() == {"twice": 2}
    assert (await process.request("/engine/double", "POST", b"{nonsense")).status_code == 400
    assert (await process.request("/engine/fail")).status_code == 500
    assert (await process.request("/engine/double", "DELETE")).status_code == 405
    response = await process.request("/engine/foo")
    assert response.status_code == 404
    assert json.loads(response.content) == {"error": "Route not found", "message": "Route /engine/foo not found"}


async def test_system_server_unknown_path_is_not_found(process: Process) -> None:
    response = await process.request("/metadata")
    assert (response.status_code, response.text) == (404, "Discovery metadata not available")
    assert (await process.request("/nonsense")).status_code == 404


async def test_metrics_are_rendered_in_turns(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(process.metrics)
    assert await turns_during(process.request("/metrics"), monkeypatch) > SERIES / 2


async def test_failing_metrics_of_an_engine_fail_only_the_scrape(process: Process) -> None:
    def broken() -> str:
        raise KeyError("bug")

    process.metrics.add_text(broken)
    assert (await process.request("/metrics")).status_code == 500
    assert (await process.request("/live")).status_code == 503


async def test_model_asset_is_served_unchanged(process: Process, tmp_path: Path) -> None:
    content = bytes(range(256)) * 2500  # Several pieces.
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    process.files[ASSET] = str(file)
    response = await process.request(ASSET)
    assert (response.status_code, response.headers["content-type"]) == (200, "application/octet-stream")
    assert response.content == content
    response = await process.request(ASSET, "HEAD")
    assert (response.status_code, response.headers["content-length"]) == (200, "640000")


async def test_deleted_asset_is_not_found(process: Process, tmp_path: Path) -> None:
    process.files[ASSET] = str(tmp_path / "tokenizer.json")
    assert (await process.request(ASSET)).status_code == 404
