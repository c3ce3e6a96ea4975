"""The indexes of a frontend: one for each endpoint, as long as a model of it is there."""

import random

import pytest

from dynamo.kv_router.config import RouterConfig
from dynamo.kv_router.router import Router
from dynamo.routing.remote_indexer import NAME, IndexerAnswer, IndexerQuery, IndexerServer
from dynamo.routing.served_indexers import ServedIndexers
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.request_plane.memory import MemoryHub, MemoryPlane

PATH = "dynamo.backend.generate"


def machine() -> Router:
    return Router(RouterConfig(), random.Random(1))


async def test_an_endpoint_has_one_index_whichever_of_its_models_stays(monkeypatch: pytest.MonkeyPatch) -> None:
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
