"""One router's index, queried by another."""

import random
from collections.abc import AsyncIterator

import msgspec
import pytest
from tests.settle import until
from tests.unit.router.test_main import BLOCK, PROMPT, RouterServiceHarness

from dynamo.core.errors import InvalidArgument
from dynamo.kv_router import events
from dynamo.kv_router.config import RoutingConfig
from dynamo.kv_router.index import KvIndex
from dynamo.kv_router.router import Router
from dynamo.kv_router.runs import pack
from dynamo.routing.endpoint_router import EndpointRouter
from dynamo.routing.kv_push_router import KvPushRouter
from dynamo.routing.remote_indexer import (
    NAME,
    IndexerAnswer,
    IndexerQuery,
    IndexerServer,
    RankName,
    RemoteIndexer,
    RoutedPrompt,
    ServedIndexers,
    answer_of,
    held_of,
)
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.request_plane.base import Request
from dynamo.runtime.request_plane.memory import MemoryHub, MemoryPlane
from dynamo.text.multimodal.routing_hashes import hashes_of

HELD = {(7, 0): (2, 3, 0), (8, 1): (0, 0, 4)}


def test_remote_indexer_returns_the_overlaps_of_the_served_index() -> None:
    wire = msgspec.msgpack.encode(answer_of(HELD))
    answer = msgspec.msgpack.decode(wire, type=IndexerAnswer)
    assert answer.scores is not None
    assert held_of(answer.scores) == HELD
    device = answer_of(HELD, device_only=True)
    assert device.scores is not None and held_of(device.scores) == {(7, 0): (2, 0, 0)}


def test_remote_indexer_messages_equal_those_of_released_dynamo() -> None:
    """Captured from ai-dynamo 1.6.1, which sends and answers queries like this."""

    def index_response(held: dict[tuple[int, int], tuple[int, int, int]]) -> object:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(answer_of(held)))

    rank = {"worker_id": 7, "dp_rank": 0}
    assert index_response({(7, 0): (6, 0, 0)}) == {
        "TieredScores": {"device": {"scores": [[rank, 6]], "frequencies": []}, "lower_tier": []}
    }
    assert index_response({(7, 0): (2, 3, 0)}) == {
        "TieredScores": {
            "device": {"scores": [[rank, 2]], "frequencies": []},
            "lower_tier": [["host_pinned", {"hits": [[rank, 3]]}]],
        }
    }


@pytest.fixture
async def harness() -> AsyncIterator[RouterServiceHarness]:
    made = RouterServiceHarness()
    await made.start()
    yield made
    await made.close()


async def test_remote_indexer_router_without_index_uses_the_remote_one(harness: RouterServiceHarness) -> None:
    harness.publishers[1].publish_stored(PROMPT, [BLOCK] * 5, list(range(100, 105)))
    index = harness.router.kv.machine.index
    await until(lambda: index.held(harness.workers[1]) == 5)
    server = IndexerServer(harness.router.endpoint, harness.router.kv.machine, lambda: {""})
    await server.start()
    config = RoutingConfig(block_size=BLOCK, use_remote_indexer=True)
    asking = EndpointRouter(harness.runtime().endpoint("dynamo.backend.generate"), config)
    await asking.start()
    assert asking.kv.view is None and not asking.kv.is_guessing
    for _ in range(5):
        route_request = asking.to_route_request(PROMPT)
        await asking.kv.know(route_request)
        decision = asking.kv.look(route_request)
        assert (decision.worker_id, decision.device_blocks) == (harness.workers[1], 5)
    stream = await asking.generate({"model": "", "token_ids": PROMPT})
    assert [output["token_ids"] async for output in stream] == [[5], [6]]
    assert harness.seen == [harness.workers[1]]
    await server.close()
    await asking.close()


async def test_remote_indexer_routes_without_overlap_when_unanswered(harness: RouterServiceHarness) -> None:
    endpoint = harness.router.endpoint
    server = IndexerServer(endpoint, harness.router.kv.machine, lambda: {"m"})
    remote = RemoteIndexer(harness.runtime(), endpoint.id)
    await remote.start()
    blocks = pack(hashes_of(PROMPT, BLOCK))
    assert await remote.find("m", blocks) == {}  # No process serves it.
    await server.start()
    assert await remote.find("other", blocks) == {}
    assert server.answer(IndexerQuery("other", []), b"").error == "served indexer model other is not registered"
    assert await remote.find("m", b"") == {}
    await server.close()
    await remote.close()


async def test_routers_without_kv_events_add_their_prompts_to_the_remote_index(harness: RouterServiceHarness) -> None:
    endpoint = harness.runtime().endpoint("dynamo.backend.generate")
    holder = EndpointRouter(endpoint, RoutingConfig(block_size=BLOCK, use_kv_events=False))
    await holder.start()
    server = IndexerServer(endpoint, holder.kv.machine, lambda: {""})
    await server.start()
    config = RoutingConfig(block_size=BLOCK, use_kv_events=False, use_remote_indexer=True)
    asking = EndpointRouter(harness.runtime().endpoint("dynamo.backend.generate"), config)
    await asking.start()
    stream = await asking.generate({"model": "", "token_ids": PROMPT})
    assert [output["token_ids"] async for output in stream] == [[5], [6]]
    blocks = pack(hashes_of(PROMPT, BLOCK))
    held = holder.kv.machine.overlaps
    await until(lambda: held(blocks, 0.0) == {(harness.seen[0], 0): (5, 0, 0)})
    stored = events.dump_predicted(holder.kv.machine.predicted_blocks(0.0))
    assert [(one.worker_id, one.event.dp_rank) for one in stored] == [(harness.seen[0], 0)]
    remade = KvIndex()
    assert all(events.apply(remade, one) for one in stored) and remade.held(harness.seen[0]) == 5
    unknown = RoutedPrompt("", RankName(1), [1])
    assert server.record(unknown, pack([1])) == {"Error": "worker 1 rank 0 is not known"}
    assert "is not registered" in str(server.record(RoutedPrompt("other", RankName(1), [1]), pack([1])))
    with pytest.raises(InvalidArgument):
        server.handle_record(Request("r", b"\xc1", "msgpack", {}, {}), None)  # type: ignore[arg-type]
    for one in (server, asking, holder):
        await one.close()


async def test_remote_indexer_refuses_an_unreadable_request(harness: RouterServiceHarness) -> None:
    server = IndexerServer(harness.router.endpoint, harness.router.kv.machine, lambda: {"m"})
    for body in (b"\xc1", msgspec.msgpack.encode({"x": 1}), msgspec.msgpack.encode(IndexerQuery("m", [-1]))):
        with pytest.raises(InvalidArgument):
            server.handle(Request("r", body, "msgpack", {}, {}), None)  # type: ignore[arg-type]


async def test_remote_indexer_client_follows_no_events(harness: RouterServiceHarness) -> None:
    config = RoutingConfig(block_size=BLOCK, use_remote_indexer=True)
    router = KvPushRouter(harness.runtime(), harness.router.endpoint.id, config)
    assert router.view is None and router.remote is not None
    await router.close()


PATH = "dynamo.backend.generate"


def machine() -> Router:
    return Router(RoutingConfig(), random.Random(1))


async def test_endpoint_has_one_indexer_until_its_last_model_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = MemoryHub()
    runtime = DistributedRuntime(
        None, MemoryDiscovery(MemoryStore()), lambda dispatcher, _: MemoryPlane(dispatcher, hub)
    )
    open_now: list[IndexerServer] = []
    start, close = IndexerServer.start, IndexerServer.close

    async def started(self: IndexerServer) -> None:
        await start(self)
        open_now.append(self)

    async def closed(self: IndexerServer) -> None:
        await close(self)
        open_now.remove(self)

    monkeypatch.setattr(IndexerServer, "start", started)
    monkeypatch.setattr(IndexerServer, "close", closed)
    indexers, base, adapter = ServedIndexers(runtime), machine(), machine()

    def knows(name: str) -> bool:
        answer: IndexerAnswer = open_now[0].answer(IndexerQuery(name, []), b"")
        return answer.error is None

    await indexers.follow(PATH, {"base": base})
    await indexers.follow(PATH, {"base": base, "adapter": adapter})
    assert len(open_now) == 1 and knows("base") and knows("adapter") and not knows("other")
    client = await runtime.endpoint(f"dynamo.backend.{NAME}").client()
    assert len(client.instance_ids()) == 1

    await indexers.follow(PATH, {"adapter": adapter})
    assert len(open_now) == 1 and knows("adapter") and not knows("base")

    await indexers.follow(PATH, {})
    assert open_now == []
    await indexers.follow("dynamo.other.generate", {"m": machine()})
    await indexers.close()
    assert open_now == []
    await client.close()
    await runtime.shutdown()
