"""Client: instances of an endpoint, and requests to one of them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.settle import turns, until

from dynamo.core.codec import json_encode, msgpack_decode, msgpack_encode
from dynamo.core.errors import CannotConnect, EngineShutdown, InvalidArgument, WorkerOverloaded, WorkerUnavailable
from dynamo.core.metrics import MetricsRegistry
from dynamo.protocols.discovery import INSTANCES, MODEL_CARDS, EndpointId, Instance, TransportAddress
from dynamo.runtime.client import Client, SendMetrics
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.push_router import RouterMode
from dynamo.runtime.request_plane.base import Item, OnDone, Receiver, Request, Target
from dynamo.runtime.request_plane.request_frames import RequestFrames

ENDPOINT = EndpointId("ns", "comp", "ep")
TIMEOUT_S = 5.0


class FakeCall:
    def __init__(self, instance_id: int) -> None:
        self.instance_id = instance_id

    def stop(self) -> None:
        pass

    def kill(self) -> None:
        pass


class FakePlane:
    """Connections that are up or down on demand."""

    speaks_batched = True

    def __init__(self) -> None:
        self.up: set[str] = set()
        self.down: set[str] = set()
        self.sent: list[tuple[Target, Request, Receiver, OnDone]] = []
        self.error: Exception | None = None

    def send(self, target: Target, request: Request, receiver: Receiver, on_done: OnDone) -> FakeCall | None:
        if self.error is not None:
            raise self.error
        if target.address not in self.up:
            return None
        self.sent.append((target, request, receiver, on_done))
        return FakeCall(target.instance_id)

    async def connect(self, target: Target) -> None:
        if target.address in self.down:
            raise CannotConnect(target.address)
        self.up.add(target.address)


class SilentReceiver:
    def on_token(self, token_id: int) -> None:
        pass

    def on_item(self, item: Item) -> None:
        pass

    def on_end(self) -> None:
        pass

    def on_error(self, error: Exception) -> None:
        pass


class ClientHarness:
    """A client, its registry and its plane."""

    def __init__(self, mode: RouterMode | str) -> None:
        self.store = MemoryStore()
        self.registry = MemoryDiscovery(self.store)
        self.plane = FakePlane()
        self.client = Client(ENDPOINT, self.registry, self.plane, mode)  # type: ignore[arg-type]
        self.changed = asyncio.Event()
        self.client.on_change(self.changed.set)

    async def put(self, number: int, codec: str = "msgpack", endpoint: str = "ep") -> None:
        instance = Instance(
            component="comp", endpoint=endpoint, namespace="ns", instance_id=number,
            transport=TransportAddress(tcp=f"host:{number}/{number:x}/ns/comp/{endpoint}"), request_plane_codec=codec,
        )  # fmt: skip
        await self.registry.put(INSTANCES, instance.key, json_encode(instance))

    async def until(self, ids: list[int]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while self.client.instance_ids() != ids:
                self.changed.clear()
                await self.changed.wait()

    async def send(self, **options: Any) -> int:
        return (await self.client.send(b"\x80", SilentReceiver(), request_id="r", **options)).instance_id

    def end(self, index: int, error: Exception | None) -> None:
        target, _, _, on_done = self.plane.sent[index]
        on_done(target.instance_id, error)


@pytest.fixture
async def harness() -> AsyncIterator[ClientHarness]:
    made = ClientHarness("round-robin")
    await made.client.start()
    yield made
    await made.client.close()


async def with_workers(harness: ClientHarness, *numbers: int) -> None:
    for number in numbers:
        await harness.put(number)
    await harness.until(sorted(numbers))


async def test_client_follows_instances_that_appear_and_disappear(harness: ClientHarness) -> None:
    await with_workers(harness, 1, 2)
    assert [instance.instance_id for instance in harness.client.instances()] == [1, 2]
    await harness.registry.delete(INSTANCES, "ns/comp/ep/1")
    await harness.until([2])


async def test_client_ignores_instances_of_other_endpoints(harness: ClientHarness) -> None:
    await harness.put(1, endpoint="other")
    await harness.put(2, endpoint="ep")
    await harness.put(3, endpoint="ep2")
    await harness.until([2])


async def test_client_ignores_an_unreadable_record(harness: ClientHarness, caplog: pytest.LogCaptureFixture) -> None:
    await harness.registry.put(INSTANCES, "ns/comp/ep/7", b"{nonsense")
    await with_workers(harness, 1)
    assert "ns/comp/ep/7" in caplog.text


@pytest.mark.parametrize("damaged", [b"", b"{nonsense", b"\xff\xfe", b'{"a":' * 100_000])
async def test_client_keeps_an_instance_with_a_damaged_record_until_it_is_removed(
    harness: ClientHarness, damaged: bytes
) -> None:
    await with_workers(harness, 1)
    await harness.registry.put(INSTANCES, "ns/comp/ep/1", damaged)
    await with_workers(harness, 1, 2)
    assert await harness.send(instance_id=1) == 1
    await harness.registry.delete(INSTANCES, "ns/comp/ep/1")
    await harness.until([2])


async def test_client_wait_for_instances_returns_on_the_first_or_raises(harness: ClientHarness) -> None:
    with pytest.raises(WorkerUnavailable, match="no instance"):
        await harness.client.wait_for_instances(0.0)
    waiting = asyncio.ensure_future(harness.client.wait_for_instances(TIMEOUT_S))
    await turns()
    await harness.put(4)
    assert await waiting == [4]


async def test_client_round_robin_cycles_through_instances(harness: ClientHarness) -> None:
    await with_workers(harness, 1, 2)
    assert [await harness.send() for _ in range(4)] == [1, 2, 1, 2]


async def test_client_sends_to_a_named_instance(harness: ClientHarness) -> None:
    await with_workers(harness, 1, 2)
    assert [await harness.send(instance_id=2) for _ in range(3)] == [2, 2, 2]
    with pytest.raises(WorkerUnavailable, match="instance 9"):
        await harness.send(instance_id=9)


async def test_client_skips_a_worker_that_cannot_be_connected(harness: ClientHarness) -> None:
    await with_workers(harness, 1, 2)
    harness.plane.down.add("host:1")
    assert [await harness.send() for _ in range(4)] == [2, 2, 2, 2]
    with pytest.raises(CannotConnect):
        await harness.send(instance_id=1)
    assert (harness.client.inflight(1), harness.client.inflight(2)) == (0, 4)


async def test_client_raises_the_last_error_when_no_worker_can_be_connected(harness: ClientHarness) -> None:
    await with_workers(harness, 1, 2)
    harness.plane.down.update({"host:1", "host:2"})
    with pytest.raises(CannotConnect):
        await harness.send()
    harness.plane.down.clear()
    assert await harness.send() in {1, 2}


async def test_client_without_workers_raises(harness: ClientHarness) -> None:
    with pytest.raises(WorkerUnavailable, match=r"no instance of ns\.comp\.ep"):
        await harness.send()


async def test_client_does_not_send_to_an_excluded_worker(harness: ClientHarness) -> None:
    await with_workers(harness, 1, 2)
    assert [await harness.send(exclude={1}) for _ in range(3)] == [2, 2, 2]
    with pytest.raises(WorkerUnavailable):
        await harness.send(exclude={1, 2})


async def test_client_deprioritizes_a_worker_after_a_failure(harness: ClientHarness) -> None:
    await with_workers(harness, 1, 2)
    assert await harness.send() == 1
    harness.end(0, EngineShutdown("x"))
    assert {await harness.send() for _ in range(4)} == {2}


@pytest.mark.parametrize("error", [None, InvalidArgument("x"), WorkerOverloaded("x")])
async def test_client_does_not_deprioritize_a_worker_for_other_endings(
    harness: ClientHarness, error: Exception | None
) -> None:
    await with_workers(harness, 1, 2)
    assert await harness.send() == 1
    harness.end(0, error)
    assert {await harness.send() for _ in range(4)} == {1, 2}


async def test_client_counts_active_requests(harness: ClientHarness) -> None:
    await with_workers(harness, 1)
    await harness.send()
    await harness.send()
    assert harness.client.inflight(1) == 2
    harness.end(0, None)
    assert harness.client.inflight(1) == 1
    harness.plane.error = InvalidArgument("too large")
    with pytest.raises(InvalidArgument):
        await harness.send()
    assert harness.client.inflight(1) == 1


async def test_client_metrics_have_the_names_of_released_dynamo() -> None:
    harness = ClientHarness("round-robin")
    registry = MetricsRegistry()
    harness.client._metrics = SendMetrics(registry)
    await harness.client.start()
    await with_workers(harness, 1)
    await harness.send()
    await harness.send()
    harness.end(0, None)
    lines = registry.render().splitlines()
    assert "dynamo_request_plane_inflight_requests 1" in lines
    assert "dynamo_request_plane_queue_seconds_count 1" in lines
    assert "dynamo_request_plane_send_seconds_count 2" in lines
    await harness.client.close()


async def test_client_least_loaded_mode_picks_the_least_loaded() -> None:
    harness = ClientHarness(RouterMode.LEAST_LOADED)
    await harness.client.start()
    await with_workers(harness, 1, 2)
    first = await harness.send()
    assert await harness.send() != first
    harness.end(0, None)
    assert await harness.send() == first
    await harness.client.close()


async def test_client_direct_mode_requires_an_instance() -> None:
    harness = ClientHarness("direct")
    await harness.client.start()
    await with_workers(harness, 1)
    with pytest.raises(WorkerUnavailable, match="direct routing"):
        await harness.send()
    assert await harness.send(instance_id=1) == 1
    await harness.client.close()


async def test_client_sends_json_to_a_worker_that_reads_only_json(harness: ClientHarness) -> None:
    await harness.put(1, codec="json")
    await harness.until([1])
    await harness.client.send(msgpack_encode({"n": 1}), SilentReceiver(), request_id="r")
    _, request, _, _ = harness.plane.sent[0]
    assert (request.codec, request.body) == ("json", b'{"n":1}')


async def test_client_iterators_use_their_own_mode(harness: ClientHarness) -> None:
    await with_workers(harness, 1, 2)
    ways = (
        harness.client.generate,
        harness.client.round_robin,
        harness.client.random,
        harness.client.device_aware_weighted,
    )
    for send in ways:
        await send({"n": 1})
    await harness.client.direct({"n": 1}, 2)
    assert harness.plane.sent[-1][0].instance_id == 2
    assert all(msgpack_decode(request.body) == {"n": 1} for _, request, _, _ in harness.plane.sent)
    assert len({request.id for _, request, _, _ in harness.plane.sent}) == 5


async def test_client_restarts_a_crashed_watch_and_removes_departed_instances(
    harness: ClientHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await with_workers(harness, 1, 2)
    apply, deaths = harness.client._apply, iter([ValueError("the watch broke")])

    def break_once(key: str, value: bytes | None) -> None:
        error = next(deaths, None)
        if error is not None:
            raise error
        apply(key, value)

    monkeypatch.setattr(harness.client, "_apply", break_once)
    monkeypatch.setattr("dynamo.core.tasks.PROVEN_S", 0.0)
    assert harness.client.is_sound
    await harness.registry.delete(INSTANCES, "ns/comp/ep/1")
    await until(lambda: not harness.client.is_sound)
    assert harness.client.instance_ids() == [1, 2]
    await harness.until([2])
    await until(lambda: harness.client.is_sound)


async def test_client_refuses_to_send_after_close(harness: ClientHarness) -> None:
    await with_workers(harness, 1)
    await harness.client.close()
    assert harness.client.instances() == []
    with pytest.raises(WorkerUnavailable):
        await harness.send()


async def test_client_finds_an_instance_by_its_card(harness: ClientHarness) -> None:
    async def card(number: int) -> None:
        record = {"instance_id": number, "card_json": {"runtime_config": {"runtime_data": {"role": "draft"}}}}
        await harness.registry.put(MODEL_CARDS, f"ns/comp/ep/{number:x}", json_encode(record))

    await with_workers(harness, 1, 2)
    await card(2)
    assert await harness.client.wait_for_instance_by_runtime_data("role", "draft", TIMEOUT_S) == 2
    await card(1)
    assert await harness.client.wait_for_instances_by_runtime_data("role", "draft", 2, TIMEOUT_S) == [1, 2]
    with pytest.raises(TimeoutError, match=r"exactly 1 .* last_match_count=2"):
        await harness.client.wait_for_instance_by_runtime_data("role", "draft", 0.02)


async def test_client_returns_the_address_of_an_instance(harness: ClientHarness) -> None:
    await with_workers(harness, 10)
    (instance,) = harness.client.instances()
    assert str(instance) == "ns/comp/ep/10"
    assert (instance.transport.kind, instance.transport.address) == ("tcp", "host:10/a/ns/comp/ep")


@pytest.mark.parametrize(
    "mode", ["RoundRobin", "Random", "PowerOfTwoChoices", "LeastLoaded", "DeviceAwareWeighted", "Direct", "KV"]
)
def test_client_accepts_the_mode_names_of_released_dynamo(mode: str) -> None:
    assert RouterMode[mode] in set(RouterMode)
    assert len(RouterMode) == 7


class WatchfulFake(FakePlane):
    """Records which workers are unresponsive, and which the client doubts."""

    def __init__(self) -> None:
        super().__init__()
        self.silent: set[str] = set()
        self.suspected: list[str] = []

    def is_silent(self, target: Target) -> bool:
        return target.address in self.silent

    def suspect(self, target: Target) -> None:
        self.suspected.append(target.address)

    async def listen(self) -> None:
        pass

    async def open(self, path: str) -> None:
        pass

    def address(self, path: str) -> TransportAddress:
        return TransportAddress(tcp="host:0/" + path)

    async def close(self) -> None:
        pass


class FixedTime:
    """Loop whose time is set by the test."""

    now = 5.0

    def time(self) -> float:
        return self.now


@pytest.fixture
async def watchful(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[ClientHarness, WatchfulFake]]:
    monkeypatch.setitem(globals(), "FakePlane", WatchfulFake)
    made = ClientHarness("round-robin")
    await made.client.start()
    assert isinstance(made.plane, WatchfulFake)
    yield made, made.plane
    await made.client.close()


async def test_client_deprioritizes_an_unresponsive_worker(watchful: tuple[ClientHarness, WatchfulFake]) -> None:
    harness, plane = watchful
    await with_workers(harness, 1, 2)
    plane.silent.add("host:1")
    assert [await harness.send() for _ in range(3)] == [2, 2, 2]
    plane.silent.add("host:2")
    assert {await harness.send() for _ in range(4)} == {1, 2}, "only two workers exist"


async def test_client_healthy_instances_exclude_recent_failures_and_unresponsive_workers(
    watchful: tuple[ClientHarness, WatchfulFake],
) -> None:
    harness, plane = watchful
    assert not harness.client.has_sound()
    await with_workers(harness, 1, 2, 3)
    assert harness.client.has_sound({1, 2})
    assert not harness.client.has_sound({1, 2, 3})
    plane.silent.add("host:3")
    assert not harness.client.has_sound({1, 2})
    assert await harness.send() == 1
    harness.end(0, EngineShutdown("x"))
    assert not harness.client.has_sound({2})
    assert harness.client.has_sound()


async def test_client_looks_for_unsound_workers_once_per_loop_turn_and_sees_failures_at_once(
    watchful: tuple[ClientHarness, WatchfulFake], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness, plane = watchful
    await with_workers(harness, 1, 2, 3)
    monkeypatch.setattr(harness.client, "_loop", FixedTime())
    assert harness.client.unsound() == frozenset()
    plane.silent.add("host:3")
    assert harness.client.unsound() == frozenset()
    assert await harness.send() == 1
    harness.end(0, EngineShutdown("x"))
    assert harness.client.unsound() == {1}
    harness.client._loop.now += 0.001  # type: ignore[attr-defined]
    assert harness.client.unsound() == {1, 3}


async def test_client_marks_a_call_doubtful_when_its_worker_departed_during_the_call(
    watchful: tuple[ClientHarness, WatchfulFake],
) -> None:
    harness, plane = watchful
    await with_workers(harness, 1, 2, 3)
    assert await harness.send() == 1
    await harness.registry.delete(INSTANCES, "ns/comp/ep/3")
    await harness.until([1, 2])
    assert plane.suspected == []
    await harness.registry.delete(INSTANCES, "ns/comp/ep/1")
    await harness.until([2])
    assert plane.suspected == ["host:1"]


async def test_client_marks_a_call_doubtful_when_its_worker_departed_during_close(
    watchful: tuple[ClientHarness, WatchfulFake],
) -> None:
    harness, plane = watchful
    await with_workers(harness, 1, 2)
    assert await harness.send() == 1
    await harness.client.close()
    assert plane.suspected == ["host:1"]


async def test_client_start_can_be_cancelled_when_the_view_arrives(harness: ClientHarness) -> None:
    client = Client(ENDPOINT, harness.registry, harness.plane)  # type: ignore[arg-type]
    starting = asyncio.create_task(client.start())
    await until(client._synced.is_set)
    starting.cancel()
    await asyncio.wait({starting})
    assert starting.cancelled()
    await client.close()


class FramedFake(WatchfulFake):
    """Carries requests in frames."""

    carries_frames = True


async def test_client_sends_request_frames_only_where_they_are_supported(harness: ClientHarness) -> None:
    frames = RequestFrames()
    with pytest.raises(InvalidArgument, match="request streams"):
        await harness.send(frames=frames)
    harness.plane = harness.client._plane = FramedFake()  # type: ignore[assignment]
    await harness.put(1, codec="json")
    await harness.until([1])
    assert await harness.send(frames=frames) == 1
    target, request, *_ = harness.plane.sent[0]
    assert (request.frames, request.body, request.codec, target.is_batched) == (frames, b"", "json", False)
    assert (harness.client.codec_of(1), harness.client.codec_of(2)) == ("json", "msgpack")
