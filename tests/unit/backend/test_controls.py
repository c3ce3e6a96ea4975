"""Worker endpoints besides generation: controls, engine routes, adapters as models."""

import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.asgi import request
from tests.cluster.memory import MemoryCluster

from dynamo.backend.config import WorkerOptions
from dynamo.backend.engine import EngineConfig, EngineHost
from dynamo.backend.sample import EchoEngine
from dynamo.backend.worker import EngineWorker
from dynamo.core.config import load
from dynamo.core.errors import DynamoException, NotFound
from dynamo.protocols.discovery import MODEL_CARDS
from dynamo.runtime.system import SystemServer


class Adapters:
    slots: int | None = None

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    async def load(self, name: str, path: str) -> int:
        self.ids[name] = 3
        return 3

    async def unload(self, name: str) -> int:
        if name not in self.ids:
            raise NotFound(f"{name} is not loaded")
        return self.ids.pop(name)


class Offering(EchoEngine):
    async def start(self, host: EngineHost) -> EngineConfig:
        async def twice(body: dict[str, Any]) -> dict[str, Any]:
            return {"twice": 2 * body["n"]}

        return dataclasses.replace(
            await super().start(host), endpoints={"twice": twice}, routes={"control/twice": twice}, adapters=Adapters()
        )


class Bench:
    def __init__(self) -> None:
        cluster = MemoryCluster()
        self.runtime, self.caller = cluster.runtime(), cluster.runtime()
        self.routes: dict[str, Any] = {}
        self.runtime.register_engine_route = self.routes.__setitem__  # type: ignore[method-assign]
        self.system = SystemServer(self.runtime.health, self.runtime.metrics, self.routes)

    async def send_request(self, name: str, body: Any) -> Any:
        """Over the request plane."""
        client = await self.caller.endpoint(f"dynamo.backend.{name}").client()
        await client.wait_for_instances()
        (only,) = [one async for one in await client.round_robin(body, annotated=False)]
        return only

    async def http(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """At the system port."""
        content = b"" if body is None else json.dumps(body).encode()
        response = await request(self.system.application, method, path, content)
        return response.status_code, response.json() if response.text.startswith("{") else response.text

    async def models(self) -> list[str]:
        cards = await self.caller.discovery.snapshot(MODEL_CARDS)
        return sorted(json.loads(one)["card_json"]["display_name"] for one in cards.values())


@pytest.fixture
async def bench(model_dir: str) -> AsyncIterator[Bench]:
    made = Bench()
    worker = EngineWorker(load(WorkerOptions, [], {}), Offering(model_dir), made.runtime)
    await worker.start()
    yield made
    await worker.stop()
    assert await made.models() == []
    await made.caller.shutdown_and_wait()


async def test_control_endpoints_and_engine_routes_respond(bench: Bench) -> None:
    assert await bench.send_request("twice", {"n": 4}) == {"twice": 8}
    assert await bench.http("POST", "/engine/control/twice", {"n": 2}) == (200, {"twice": 4})


async def test_endpoint_error_for_an_invalid_request_reaches_the_caller(bench: Bench) -> None:
    with pytest.raises(DynamoException, match="twice"):
        await bench.send_request("twice", {"odd": 1})


async def test_adapters_are_loaded_and_unloaded_over_http(bench: Bench, tmp_path: Path) -> None:
    body = {"lora_name": "a/b", "source": {"uri": f"file://{tmp_path}"}}
    status, found = await bench.http("POST", "/v1/loras", body)
    assert (status, found["lora_id"]) == (200, 3)
    assert await bench.models() == ["a/b", "echo"]
    assert (await bench.http("GET", "/v1/loras"))[1]["loras"] == {"a/b": 3}
    assert (await bench.http("DELETE", "/v1/loras/a%2Fb"))[0] == 200
    assert await bench.models() == ["echo"]
    assert (await bench.http("DELETE", "/v1/loras/a%2Fb"))[0] == 400
    assert (await bench.http("PATCH", "/v1/loras"))[0] == 405


async def test_adapters_are_loaded_and_unloaded_over_the_request_plane(bench: Bench, tmp_path: Path) -> None:
    body = {"lora_name": "a", "source": {"uri": str(tmp_path)}}
    assert (await bench.send_request("load_lora", body))["status"] == "success"
    assert (await bench.send_request("list_loras", None))["count"] == 1
    assert (await bench.send_request("unload_lora", {"lora_name": "a"}))["status"] == "success"
