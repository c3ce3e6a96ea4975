"""Worker metrics in both framings: requests, bytes in both directions, errors, and requests in flight."""

import asyncio
from typing import Any

import pytest

from dynamo.core.codec import msgpack_encode
from dynamo.core.errors import Unknown
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.request_plane.base import Item, Reply, Request
from dynamo.runtime.request_plane.tcp.common import TcpOptions
from dynamo.runtime.request_plane.tcp.plane import TcpPlane

TIMEOUT_S = 30.0  # For operations that take milliseconds on an idle machine.


class ReceivedOutput:
    """Receiver that counts tokens and waits for the end."""

    def __init__(self) -> None:
        self.tokens = 0
        self.over: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def on_token(self, token_id: int) -> None:
        self.tokens += 1

    def on_item(self, item: Item) -> None:
        pass

    def on_end(self) -> None:
        self.over.set_result(None)

    def on_error(self, error: Exception) -> None:
        self.over.set_result(error)


def value(runtime: DistributedRuntime, name: str, **labels: str) -> float:
    """Return the sum of the series that have these labels."""
    lines = [line for line in runtime.metrics.render().splitlines() if line.startswith(name + "{")]
    wanted = [f'{key}="{text}"' for key, text in labels.items()]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(want in line for want in wanted))


@pytest.mark.parametrize("is_batched", [True, False], ids=["batched", "upstream"])
async def test_worker_metrics_count_its_requests_and_errors(is_batched: bool) -> None:
    store, options = MemoryStore(), TcpOptions(host="127.0.0.1", speaks_batched=is_batched)

    def runtime() -> DistributedRuntime:
        plane: Any = lambda dispatcher, registry: TcpPlane(dispatcher, options, registry)  # noqa: E731
        return DistributedRuntime(None, MemoryDiscovery(store), plane, event_plane="mem")

    worker, caller = runtime(), runtime()

    def generate(request: Request, reply: Reply) -> None:
        if b"bad" in request.body:
            raise Unknown("the engine broke")
        for token in range(100):
            reply.token(token)
        reply.finish()

    def query(request: Request, reply: Reply) -> None:
        reply.item({"blocks": "x" * 1000})
        reply.finish()

    await worker.endpoint("ns.comp.generate").serve(generate)
    await worker.endpoint("ns.comp.query").serve(query)

    async def send_request(endpoint: str, body: bytes) -> Exception | None:
        client = await caller.endpoint(f"ns.comp.{endpoint}").client()
        await client.wait_for_instances(TIMEOUT_S)
        received = ReceivedOutput()
        await client.send(body, received, request_id="r")
        return await asyncio.wait_for(received.over, TIMEOUT_S)

    body = msgpack_encode("good")
    assert await send_request("generate", body) is None
    assert isinstance(await send_request("generate", msgpack_encode("bad")), Unknown)
    assert await send_request("query", body) is None
    prefix = "dynamo_component_"
    assert value(worker, prefix + "requests_total", dynamo_endpoint="generate") == 2
    assert value(worker, prefix + "request_bytes_total", dynamo_endpoint="query") == len(body)
    assert value(worker, prefix + "inflight_requests") == 0
    assert value(worker, prefix + "request_duration_seconds_count", dynamo_endpoint="generate") == 2
    assert value(worker, prefix + "errors_total", dynamo_endpoint="generate", error_type="generate") == 1
    assert value(worker, prefix + "errors_total", dynamo_endpoint="query") == 0
    answered = value(worker, prefix + "response_bytes_total", dynamo_endpoint="generate")
    assert 100 * (8 if is_batched else 1) <= answered < 5000
    assert 1000 < value(worker, prefix + "response_bytes_total", dynamo_endpoint="query") < 2000
    await caller.shutdown()
    await worker.shutdown()


async def test_disconnected_caller_is_counted_as_cancellation_not_as_error() -> None:
    runtime = DistributedRuntime(None, "mem", "mem", event_plane="mem")
    await runtime.endpoint("ns.gone.generate").serve(lambda request, reply: reply.token(1))
    client = await runtime.endpoint("ns.gone.generate").client()
    await client.wait_for_instances(TIMEOUT_S)
    call = await client.send(b"", ReceivedOutput(), request_id="r")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    call.kill()
    assert value(runtime, "dynamo_component_cancellation_total", dynamo_component="gone") == 1
    assert value(runtime, "dynamo_component_errors_total", dynamo_component="gone") == 0
    await runtime.shutdown()
