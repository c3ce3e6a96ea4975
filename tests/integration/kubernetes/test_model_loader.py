"""Loading of adapters over HTTP: requests, refusals, pods that cannot be reached."""

import json
import socket

import pytest
from benchmarks.ports import free_port
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dynamo.core.http_server import HttpServer, ServerLimits
from dynamo.operator.model_loader import AdapterLoader
from dynamo.operator.reconcile.models import ServingPod
from dynamo.protocols.kubernetes.common import ObjectMeta
from dynamo.protocols.kubernetes.models import DynamoModel, ModelSource, ModelSpec

pytestmark = pytest.mark.integration

MODEL = DynamoModel(
    metadata=ObjectMeta(name="m"),
    spec=ModelSpec("org/tuned", "base", "lora", ModelSource("s3://bucket/key")),
)


async def test_adapters_are_loaded_and_unloaded_and_failures_are_named_per_pod() -> None:
    seen: list[tuple[str, str, object]] = []

    async def loras(request: Request) -> Response:
        body = await request.body()
        seen.append((request.method, request.url.path, json.loads(body) if body else None))
        if request.headers["host"].startswith("localhost"):
            return JSONResponse({"message": "no such bucket"}, status_code=500)
        return JSONResponse({"status": "success"})

    routes = [Route("/v1/loras", loras, methods=["POST"]), Route("/v1/loras/{name:path}", loras, methods=["DELETE"])]
    server = HttpServer(Starlette(routes=routes), ServerLimits())
    await server.start(socket.create_server(("127.0.0.1", 0)))
    pods = [
        ServingPod(f"http://127.0.0.1:{server.port}", "good", "1"),
        ServingPod(f"http://localhost:{server.port}", "bad", "2"),
        ServingPod(f"http://127.0.0.1:{free_port()}", "gone", "3"),
    ]
    try:
        found = await AdapterLoader().load(MODEL, pods)
        assert await AdapterLoader().unload(MODEL, pods[:1]) == {"1": None}
    finally:
        await server.close()
    assert found["1"] is None
    assert found["2"] is not None and found["2"].startswith('500: {"message":"no such bucket"}')
    assert found["3"] is not None and "127.0.0.1" in found["3"]
    body = {"lora_name": "org/tuned", "source": {"uri": "s3://bucket/key"}}
    assert ("POST", "/v1/loras", body) in seen
    assert ("DELETE", "/v1/loras/org/tuned", None) in seen
