"""Our runtime and the released one, over one discovery directory: each calls the other's workers.

The side environment is created by `python -m benchmarks.peer` (in `DYNAMO_PEER_HOME`).
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.peers import require_peer
from tests.zmq_broker import ZmqBroker

from dynamo.core.codec import json_encode, msgpack_decode
from dynamo.core.errors import InvalidArgument, Unknown, WorkerUnavailable
from dynamo.runtime.client import Client
from dynamo.runtime.context import Context
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.base import Event
from dynamo.runtime.streams import GeneratorHandler

pytestmark = pytest.mark.conformance

HERE = Path(__file__).parent
ENDPOINT = "ns-a.back_end.generate"
START_TIMEOUT_S = 120.0
TIMEOUT_S = 60.0
SEVERAL_STEPS_S = 0.5
"""Five steps of the handler in `peer_cancelled_worker.py`."""
MANY = 100


@pytest.fixture(scope="module", autouse=True)
def peer() -> str:
    return require_peer()


@pytest.fixture
def variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """One directory and loopback for both implementations."""
    ours = {
        "DYN_FILE_KV": str(tmp_path / "kv"),
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "DYN_LOG": "error",
    }
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    return {**os.environ, **ours, "HOME": str(tmp_path)}


@pytest.fixture
async def runtime(variables: dict[str, str]) -> AsyncIterator[DistributedRuntime]:
    made = DistributedRuntime()
    yield made
    await made.shutdown()


class Peer:
    """Process of the released system, controlled over its standard streams."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, python: str, variables: dict[str, str], script: str, *arguments: str) -> "Peer":
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            python, str(HERE / script), ENDPOINT, *arguments, stdin=pipe, stdout=pipe, env=variables
        )
        return cls(process)

    async def line(self, start: str) -> str:
        """Return the rest of the next line with that prefix."""
        assert self.process.stdout is not None
        async with asyncio.timeout(START_TIMEOUT_S):
            while line := (await self.process.stdout.readline()).decode():
                if line.startswith(start):
                    return line.removeprefix(start).strip()
        raise AssertionError(f"the peer ended before it said {start!r}")

    async def rest(self) -> list[str]:
        """Return the lines printed until the end."""
        assert self.process.stdout is not None
        return (await self.process.stdout.read()).decode().splitlines()

    async def do(self, **order: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json_encode(order) + b"\n")
        return json.loads(await self.line("answer "))

    async def stop(self) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.process.wait(), TIMEOUT_S)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


def expected(count: int) -> list[dict[str, Any]]:
    elements: list[dict[str, Any]] = []
    for number in range(count):
        elements.append({"token_ids": [number], "index": 0})
        if number % 5 == 4:
            elements.append({"token_ids": [number, number], "index": 0, "text": "ü"})
    return elements


# Our client, their worker ----------------------------------------------------------------------------------------


@pytest.fixture
async def worker(peer: str, variables: dict[str, str]) -> AsyncIterator[Peer]:
    started = await Peer.start(peer, variables, "peer_worker.py")
    try:
        await started.line("serving")
        yield started
    finally:
        await started.stop()


@pytest.fixture
async def client(runtime: DistributedRuntime, worker: Peer) -> Client:
    made = await runtime.endpoint(ENDPOINT).client()
    await made.wait_for_instances(START_TIMEOUT_S)
    await until_served(made)
    return made


async def until_served(client: Client) -> None:
    """Send requests without a response until one is accepted: a released worker registers before it subscribes in NATS."""
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            try:
                await receive_event(client, {"count": 0})
            except WorkerUnavailable:
                await asyncio.sleep(0.05)
            else:
                return


async def receive_event(client: Client, request: dict[str, Any], context: Context | None = None) -> list[Any]:
    async with asyncio.timeout(TIMEOUT_S):
        return [element async for element in await client.generate(request, annotated=False, context=context)]


async def test_our_client_receives_tokens_and_items_of_a_released_worker(client: Client) -> None:
    assert [instance.response_frames for instance in client.instances()] == [0]
    assert await receive_event(client, {"count": 12}) == expected(12)


async def test_our_client_maps_errors_of_a_released_worker(client: Client) -> None:
    with pytest.raises(InvalidArgument, match="bad thing"):
        await receive_event(client, {"mode": "invalid"})
    with pytest.raises(Unknown, match="boom"):
        await receive_event(client, {"mode": "bug"})


async def test_released_worker_obeys_stop_and_kill(client: Client, worker: Peer) -> None:
    for name, end in (("stop", "False"), ("kill", "True")):
        context = Context()
        stream = await client.generate({"count": 1000, "gap_s": 0.01}, annotated=False, context=context)
        async with asyncio.timeout(TIMEOUT_S):
            assert await anext(stream) == {"token_ids": [0], "index": 0}
        context.stop_generating() if name == "stop" else context.kill()
        assert await worker.line("stopped killed=") == end
        if name == "stop":
            async with asyncio.timeout(TIMEOUT_S):
                rest = [element async for element in stream]
            assert rest == expected(1000)[1 : 1 + len(rest)]


@pytest.mark.parametrize("end", ["stop", "kill"])
@pytest.mark.parametrize("side", ["theirs", "ours"])
async def test_both_resume_a_cancelled_handler_once(
    peer: str, runtime: DistributedRuntime, variables: dict[str, str], side: str, end: str
) -> None:
    worker = await Peer.start(peer if side == "theirs" else sys.executable, variables, "peer_cancelled_worker.py")
    try:
        await worker.line("serving")
        client = await runtime.endpoint(ENDPOINT).client()
        await client.wait_for_instances(START_TIMEOUT_S)
        context = Context()
        stream = await client.generate({}, annotated=False, context=context)
        async with asyncio.timeout(TIMEOUT_S):
            assert await anext(stream) == {"number": 0}
            await worker.line("step 0")
            if end == "stop":
                context.stop_generating()
                assert [element async for element in stream] == []
            else:
                context.kill()
            assert await worker.line("step ") == f"1 stopped=True killed={end == 'kill'}"
        if side == "ours":
            assert await worker.line("step ") == "closed"
        else:  # releases the generator when its Rust part does, often not before it ends
            await asyncio.sleep(SEVERAL_STEPS_S)
        await client.close()
    finally:
        await worker.stop()
    assert [line for line in await worker.rest() if line != "step closed"] == []


async def test_released_worker_serves_concurrent_requests(client: Client) -> None:
    answers = await asyncio.gather(*(receive_event(client, {"count": 10}) for _ in range(MANY)))
    assert answers == [expected(10)] * MANY


async def test_streams_of_a_killed_released_worker_end_at_once(client: Client, worker: Peer) -> None:
    stream = await client.generate({"count": 1000, "gap_s": 0.01}, annotated=False)
    async with asyncio.timeout(TIMEOUT_S):
        await anext(stream)
        worker.process.kill()
        with pytest.raises(WorkerUnavailable):
            async for _ in stream:
                pass


# Their client, our worker ----------------------------------------------------------------------------------------


@pytest.fixture
async def their_client(peer: str, runtime: DistributedRuntime, variables: dict[str, str]) -> AsyncIterator[Peer]:
    started = await Peer.start(peer, variables, "peer_client.py")
    yield started
    await started.stop()


class Service:
    """Our worker, equivalent to theirs."""

    def __init__(self) -> None:
        self.ended: asyncio.Queue[str] = asyncio.Queue(maxsize=10)

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncIterator[Any]:
        mode = request.get("mode")
        if mode == "invalid":
            raise InvalidArgument("bad thing", param="mode")
        if mode == "bug":
            yield {"token_ids": [1], "index": 0}
            raise RuntimeError("boom")
        for element in expected(request.get("count", 0)):
            if context.is_stopped():
                self.ended.put_nowait(f"killed={context.is_killed()}")
                return
            yield element
            await asyncio.sleep(request.get("gap_s", 0))


async def until_ids(peer: Peer, ids: list[int]) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while await peer.do(do="ids") != ids:  # noqa: ASYNC110 - another process knows, and is asked
            await asyncio.sleep(0.05)


async def test_released_client_calls_our_worker_and_sees_its_deregistration(
    runtime: DistributedRuntime, their_client: Peer
) -> None:
    service = Service()
    await until_ids(their_client, [])
    handler = GeneratorHandler(service.generate, runtime.tasks)
    serving = await runtime.endpoint(ENDPOINT).serve(handler)
    assert bool(serving.instance.response_frames) == runtime.request_plane.speaks_batched, (
        "the released client must tolerate our own key"
    )
    await until_ids(their_client, [runtime.instance_id])

    answer = await their_client.do(do="ask", request={"count": 12})
    assert answer == {"heard": expected(12), "error": None}

    refused = await their_client.do(do="ask", request={"mode": "invalid"})
    assert (refused["error"], refused["message"]) == ("InvalidArgument", "bad thing")
    failed = await their_client.do(do="ask", request={"mode": "bug"})
    assert failed["heard"] == [{"token_ids": [1], "index": 0}]
    assert "boom" in failed["message"]

    stopped = await their_client.do(do="ask", request={"count": 1000, "gap_s": 0.01}, stop_after=3)
    assert stopped["error"] is None
    assert await asyncio.wait_for(service.ended.get(), TIMEOUT_S) == "killed=False"

    elements, errors = await their_client.do(do="many", request={"count": 10}, times=MANY)
    assert (elements, errors) == (MANY * len(expected(10)), 0)

    await serving.close()
    await until_ids(their_client, [])


# Events ----------------------------------------------------------------------------------------------------------

TOPIC = "forward-pass-metrics"  # The only topic that the released bindings both publish and subscribe to.


@pytest.fixture
def broker(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give both implementations the setting before either opens its event plane."""
    with ZmqBroker() as made:
        variables["DYN_ZMQ_BROKER_URL"] = made.url
        monkeypatch.setenv("DYN_ZMQ_BROKER_URL", made.url)
        yield


@pytest.fixture
async def events(
    request: pytest.FixtureRequest, peer: str, runtime: DistributedRuntime, variables: dict[str, str]
) -> AsyncIterator[Peer]:
    started = await Peer.start(peer, variables, "peer_events.py", request.param)
    try:
        await started.line(f"{request.param}ing")
        yield started
    finally:
        await started.stop()


@pytest.mark.parametrize("events", ["publish"], indirect=True)
async def test_our_subscriber_receives_released_events(runtime: DistributedRuntime, events: Peer) -> None:
    subscriber = await runtime.event_plane.subscriber(runtime.endpoint(ENDPOINT).id, TOPIC)
    received: list[Event] = []
    async with asyncio.timeout(START_TIMEOUT_S):
        async for event in subscriber:
            assert isinstance(event, Event)
            received.append(event)
            if len(received) == 2:
                break
    assert len({event.publisher_id for event in received}) == 1
    assert received[1].sequence == received[0].sequence + 1
    assert received[1].missed == 0
    assert msgpack_decode(received[0].payload)["worker_id"] == "7"


@pytest.mark.parametrize("events", ["listen"], indirect=True)
async def test_released_subscriber_receives_our_events(runtime: DistributedRuntime, events: Peer) -> None:
    publisher = await runtime.event_plane.publisher(runtime.endpoint(ENDPOINT).id, TOPIC)
    hearing = asyncio.ensure_future(events.line("heard "))
    async with asyncio.timeout(START_TIMEOUT_S):
        while not hearing.done():
            publisher.publish(b"payload")
            await asyncio.wait([hearing], timeout=0.05)
    assert bytes.fromhex(hearing.result()) == b"payload"


@pytest.mark.parametrize("events", ["publish", "listen"], indirect=True)
async def test_events_pass_through_a_broker(
    broker: None, runtime: DistributedRuntime, events: Peer, request: pytest.FixtureRequest
) -> None:
    endpoint = runtime.endpoint(ENDPOINT).id
    if request.node.callspec.params["events"] == "publish":
        subscriber = await runtime.event_plane.subscriber(endpoint, TOPIC)
        async with asyncio.timeout(START_TIMEOUT_S):
            event = await anext(aiter(subscriber))
        assert isinstance(event, Event)
        assert msgpack_decode(event.payload)["worker_id"] == "7"
        return
    publisher = await runtime.event_plane.publisher(endpoint, TOPIC)
    hearing = asyncio.ensure_future(events.line("heard "))
    async with asyncio.timeout(START_TIMEOUT_S):
        while not hearing.done():
            publisher.publish(b"payload")
            await asyncio.wait([hearing], timeout=0.05)
    assert bytes.fromhex(hearing.result()) == b"payload"
