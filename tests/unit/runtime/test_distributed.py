"""DistributedRuntime: one process's place in the cluster, over members that need no sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.settle import turns

from dynamo.core.errors import ConfigError, InvalidArgument, WorkerUnavailable
from dynamo.protocols.discovery import INSTANCES
from dynamo.runtime import Client, Context, DistributedRuntime, Endpoint, dynamo_worker
from dynamo.runtime.config import RuntimeOptions
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.event_plane.memory import MemoryBus, MemoryEventPlane
from dynamo.runtime.request_plane.base import Reply, Request
from dynamo.runtime.request_plane.memory import MemoryHub, MemoryPlane
from dynamo.runtime.server import ServeOptions

TIMEOUT_S = 5.0

Join = Callable[[], DistributedRuntime]


@pytest.fixture
async def join() -> AsyncIterator[Join]:
    """Return a function that creates runtimes of further processes of one cluster."""
    store, hub, bus = MemoryStore(), MemoryHub(), MemoryBus()
    made: list[DistributedRuntime] = []

    def make() -> DistributedRuntime:
        runtime = DistributedRuntime(
            None,
            MemoryDiscovery(store),
            lambda dispatcher, _: MemoryPlane(dispatcher, hub),
            event_plane=lambda _: MemoryEventPlane(bus),
        )
        made.append(runtime)
        return runtime

    yield make
    for runtime in made:
        await runtime.shutdown(drain_timeout_s=0.0)


async def echo(request: Any, context: Context) -> AsyncIterator[Any]:
    for number in range(request["count"]):
        yield {"token_ids": [number], "index": 0}
    yield {"said": request, "tenant": context.metadata.get("tenant")}


async def receive_event(client: Client, request: Any, context: Context | None = None) -> list[Any]:
    async with asyncio.timeout(TIMEOUT_S):
        return [element async for element in await client.generate(request, annotated=False, context=context)]


async def test_client_receives_values_of_a_generator_in_another_process(join: Join) -> None:
    worker, caller = join(), join()
    serving = asyncio.ensure_future(worker.endpoint("n.c.e").serve_endpoint(echo))
    client = await caller.endpoint("dyn://n.c.e").client("round-robin")
    await client.wait_for_instances(TIMEOUT_S)
    assert await receive_event(client, {"count": 2}, Context(metadata={"tenant": "t"})) == [
        {"token_ids": [0], "index": 0},
        {"token_ids": [1], "index": 0},
        {"said": {"count": 2}, "tenant": "t"},
    ]
    await worker.shutdown()
    await serving
    with pytest.raises(WorkerUnavailable):
        await receive_event(client, {"count": 1})


async def test_runtime_shutdown_waits_for_running_requests(join: Join) -> None:
    worker, caller = join(), join()
    replies: list[Reply] = []
    got = asyncio.Event()

    def handle(request: Request, reply: Reply) -> None:
        replies.append(reply)
        got.set()

    endpoint = worker.endpoint("n.c.e")
    await endpoint.serve(handle)
    assert await worker.discovery.snapshot(INSTANCES) != {}
    client = await caller.endpoint("n.c.e").client()
    await client.wait_for_instances(TIMEOUT_S)
    hearing = asyncio.ensure_future(receive_event(client, None))
    await asyncio.wait_for(got.wait(), TIMEOUT_S)
    ending = worker.shutdown()
    async with asyncio.timeout(TIMEOUT_S):
        while await caller.discovery.snapshot(INSTANCES) != {}:
            await turns()
    assert not ending.done()
    replies[0].item("last words")
    replies[0].finish()
    assert await hearing == ["last words"]
    await ending
    assert worker.shutdown() is ending
    await worker.wait_closed()


async def test_runtime_shutdown_ends_requests_after_the_drain_timeout(
    join: Join, caplog: pytest.LogCaptureFixture
) -> None:
    worker, caller = join(), join()
    started = asyncio.Event()
    await worker.endpoint("n.c.e").serve(lambda _, __: started.set())
    client = await caller.endpoint("n.c.e").client()
    await client.wait_for_instances(TIMEOUT_S)
    hearing = asyncio.ensure_future(receive_event(client, None))
    await asyncio.wait_for(started.wait(), TIMEOUT_S)
    await worker.shutdown(drain_timeout_s=0.0)
    with pytest.raises(WorkerUnavailable):
        await hearing
    assert "drain timeout" in caplog.text


async def test_endpoint_instance_can_be_unregistered_and_registered_again(join: Join) -> None:
    worker = join()
    endpoint = worker.endpoint("n.c.e")
    await endpoint.unregister_endpoint_instance()
    await endpoint.serve(lambda _, reply: reply.finish(), ServeOptions(inflight_max=3))
    assert endpoint.record_key == f"n/c/e/{endpoint.connection_id():x}"
    assert worker.health.is_ready()
    await endpoint.unregister_endpoint_instance()
    assert await worker.discovery.snapshot(INSTANCES) == {}
    assert not worker.health.is_ready()
    await endpoint.register_endpoint_instance()
    assert list(await worker.discovery.snapshot(INSTANCES)) == [endpoint.record_key]


async def test_event_plane_is_created_on_first_use(join: Join) -> None:
    speaking, listening = join(), join()
    endpoint = speaking.endpoint("n.c.e")
    subscriber = await listening.event_plane.subscriber(endpoint.id, "topic")
    publisher = await speaking.event_plane.publisher(endpoint.id, "topic")
    publisher.publish(b"hello")
    async with asyncio.timeout(TIMEOUT_S):
        event = await anext(aiter(subscriber))
    assert event.payload == b"hello"  # type: ignore[union-attr]


async def test_runtime_metrics_append_the_text_of_an_engine_callback(join: Join) -> None:
    runtime = join()
    runtime.endpoint("n.c.e").metrics.register_prometheus_expfmt_callback(lambda: "engine_total 3")
    text = runtime.metrics.render()
    assert text.endswith("engine_total 3\n")
    assert "dynamo_component_uptime_seconds" in text


async def test_runtime_planes_are_selected_by_name(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    runtime = DistributedRuntime.from_options(RuntimeOptions())
    assert type(runtime.discovery).__name__ == "FileDiscovery"
    assert type(runtime.request_plane).__name__ == "TcpPlane"
    await runtime.shutdown()
    runtime = DistributedRuntime(None, "mem", "mem", event_plane="mem")
    assert type(runtime.event_plane).__name__ == "MemoryEventPlane"
    await runtime.shutdown()
    for choice in ({"discovery_backend": "consul"}, {"discovery_backend": "mem", "request_plane": "quic"}):
        with pytest.raises(ConfigError, match="must be"):
            DistributedRuntime(None, **choice)  # type: ignore[arg-type]


async def test_discovery_may_set_the_instance_id_and_expose_its_records() -> None:
    class Assigning(MemoryDiscovery):
        instance_id = 7

        def data(self) -> dict[str, Any]:
            return {"endpoints": {}}

    runtime = DistributedRuntime(None, Assigning(), "mem", event_plane="mem")
    assert runtime.instance_id == 7
    await runtime.shutdown()


async def test_an_unknown_event_plane_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"Invalid event_plane value 'kafka' \(--event-plane\)"):
        DistributedRuntime(None, "mem", "mem", event_plane="kafka")


async def test_endpoint_address_requires_three_parts(join: Join) -> None:
    runtime = join()
    with pytest.raises(InvalidArgument):
        runtime.endpoint("n.c")
    assert isinstance(runtime.endpoint("n.c.e"), Endpoint)
    assert str(runtime.endpoint("dyn://n.c.e")) == "n.c.e"


async def test_worker_decorator_keeps_the_docstring_and_closes_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "mem")
    monkeypatch.setenv("DYN_REQUEST_PLANE", "mem")
    seen: list[DistributedRuntime] = []

    @dynamo_worker()
    async def work(runtime: DistributedRuntime, number: int) -> int:
        """Works."""
        seen.append(runtime)
        return number + 1

    assert await work(1) == 2
    assert work.__doc__ == "Works."
    await asyncio.wait_for(seen[0].wait_closed(), TIMEOUT_S)


async def test_nested_request_shares_the_trace_and_ends_with_its_context(join: Join) -> None:
    seen: list[Context] = []
    ended = asyncio.Event()

    async def second(request: Any, context: Context) -> AsyncIterator[Any]:
        seen.append(context)
        yield context.metadata
        await context.async_killed_or_stopped()
        ended.set()

    async def first(request: Any, context: Context) -> AsyncIterator[Any]:
        seen.append(context)
        context.metadata["hop"] = "1"
        client = await middle.endpoint("n.second.e").client()
        await client.wait_for_instances(TIMEOUT_S)
        async for element in await client.round_robin(request, annotated=False, context=context):
            yield element

    last, middle, caller = join(), join(), join()
    serving = [
        asyncio.ensure_future(last.endpoint("n.second.e").serve_endpoint(second)),
        asyncio.ensure_future(middle.endpoint("n.first.e").serve_endpoint(first)),
    ]
    client = await caller.endpoint("n.first.e").client()
    await client.wait_for_instances(TIMEOUT_S)
    trace, span = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    context = Context("r", {"tenant": "t"}, {"traceparent": f"00-{trace}-{span}-01"})
    stream = await client.generate({}, annotated=False, context=context)
    async with asyncio.timeout(TIMEOUT_S):
        assert await anext(stream) == {"tenant": "t", "hop": "1"}
        assert [one.id() for one in seen] == ["r", "r"]
        assert [one.trace_id for one in seen] == [trace, trace]
        assert [one.parent_span_id for one in seen] == [context.span_id, seen[0].span_id]
        context.stop_generating()
        await ended.wait()
        assert [element async for element in stream] == []
    for runtime in (middle, last):
        await runtime.shutdown()
    await asyncio.gather(*serving)


async def test_endpoint_metrics_have_the_labels_given_when_served(join: Join) -> None:
    worker, caller = join(), join()
    serving = asyncio.ensure_future(worker.endpoint("n.c.e").serve_endpoint(echo, metrics_labels=[("model", "m")]))
    other = asyncio.ensure_future(worker.endpoint("n.c.other").serve_endpoint(echo))
    client = await caller.endpoint("n.c.e").client()
    await client.wait_for_instances(TIMEOUT_S)
    await receive_event(client, {"count": 1})
    lines = [
        line for line in worker.metrics.render().splitlines() if line.startswith("dynamo_component_requests_total")
    ]
    assert sorted('model="m"' in line for line in lines) == [False, True]
    await worker.shutdown()
    await asyncio.gather(serving, other)


async def test_runtime_refuses_an_unsupported_response_plane_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DYN_RESPONSE_PLANE", "quic")
    with pytest.raises(ConfigError, match="DYN_RESPONSE_PLANE='quic': must be tcp"):
        DistributedRuntime(None, "mem", "mem", event_plane="mem")


async def test_runtime_refuses_an_unsupported_response_plane() -> None:
    with pytest.raises(ConfigError, match="quic"):
        DistributedRuntime(None, "mem", "mem", event_plane="mem", response_plane="quic")
    with pytest.warns(DeprecationWarning, match="enable_nats"):
        runtime = DistributedRuntime(None, "mem", "mem", True, event_plane="mem", response_plane="tcp")
    await runtime.shutdown()


def test_runtime_package_raises_attribute_error_for_an_unknown_name() -> None:
    import dynamo.runtime

    with pytest.raises(AttributeError, match="nonsense"):
        _ = dynamo.runtime.nonsense


def test_runtime_is_created_and_shut_down_outside_a_running_loop() -> None:
    loop = asyncio.new_event_loop()
    runtime = DistributedRuntime(loop, "mem", "mem", event_plane="mem")

    async def registered() -> list[int]:
        endpoint = runtime.endpoint("ns.outside.ep")
        await endpoint.register_endpoint_instance()
        return await (await endpoint.client()).wait_for_instances(TIMEOUT_S)

    try:
        assert loop.run_until_complete(registered()) == [runtime.instance_id]
        assert runtime.shutdown().done()
    finally:
        loop.close()


def test_runtime_without_any_loop_is_refused() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        DistributedRuntime(None, "mem", "mem")


async def test_runtime_names_its_loop_and_system_server(join: Join) -> None:
    runtime = join()
    assert runtime.event_loop() is asyncio.get_running_loop()
    assert runtime.system_status_server_url() is None
    with pytest.raises(RuntimeError, match="compiled runtime"):
        runtime.to_capsule()


async def test_detached_runtime_uses_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "mem")
    runtime = DistributedRuntime.detached()
    assert isinstance(runtime.discovery, MemoryDiscovery)
    await runtime.shutdown()
