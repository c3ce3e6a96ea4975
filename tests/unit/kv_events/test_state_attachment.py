"""Attachment of a worker's ranks to a KV state agent, and the router's view of attached ranks."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from tests.cluster.memory import MemoryCluster
from tests.settle import turns, until

from dynamo.core.errors import InvalidArgument
from dynamo.kv_events.source import KvEventSource
from dynamo.kv_events.subscriber import KvView
from dynamo.llm import KvStateAttachmentOwner
from dynamo.protocols.discovery import EVENT_SOURCES, EndpointId
from dynamo.protocols.kv_events import Stored, StoredBlock, WorkerKvEvent
from dynamo.protocols.kv_state import (
    ATTACHMENTS_TOPIC,
    HOSTS_TOPIC,
    INTENTS_TOPIC,
    AttachmentIntent,
    ComponentScope,
    EndpointScope,
    StateAttachment,
    StateHost,
    StateRecord,
)
from dynamo.runtime.distributed import DistributedRuntime

WORKER = "dynamo.backend.generate"
DOMAIN = f"{1:032x}:{2:032x}"
DESCRIPTOR = {
    "cache_owner_id": f"{DOMAIN}/{3:016x}/{4:032x}",
    "indexer_domain_id": DOMAIN,
    "global_dp_rank": 1,
    "kv_state_endpoint": WORKER,
    "kv_block_size": 4,
    "raw_zmq_endpoint": "tcp://127.0.0.1:5999",
}
AGENT = ComponentScope("dynamo", "kv_state_agent")


class Agent:
    """Records of an agent, written and read by the test."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        self.runtime = runtime
        self.worker = runtime.endpoint("dynamo.kv_state_agent.control")

    async def put_host(self, number: int) -> str:
        instance = self.worker._instance().callee()
        record = StateRecord(
            AGENT, HOSTS_TOPIC, number, StateHost(host_instance=instance, control_target=instance, max_slots=8)
        )
        await self.runtime.discovery.put(EVENT_SOURCES, record.key, msgspec.json.encode(record))
        return record.key

    async def attach(self, intent: AttachmentIntent, number: int = 9) -> str:
        attachment = StateAttachment(
            cache_owner_id=intent.cache_owner_id, publisher_id=7, recovery_control_target=intent.target_host,
            attachment_generation=1, producer_instance=intent.producer_instance,
            intent_incarnation=intent.intent_incarnation, worker=intent.worker, ingress_protocol=intent.ingress_protocol,
            raw_zmq_endpoint=intent.raw_zmq_endpoint, raw_topic=intent.raw_topic, ready_at_outbound_cursor=1,
        )  # fmt: skip
        record = StateRecord(EndpointScope(intent.kv_state_endpoint), ATTACHMENTS_TOPIC, number, attachment)
        await self.runtime.discovery.put(EVENT_SOURCES, record.key, msgspec.json.encode(record))
        return record.key

    async def intents(self) -> list[AttachmentIntent]:
        found = await self.runtime.discovery.snapshot(EVENT_SOURCES)
        decode = msgspec.json.Decoder(StateRecord[AttachmentIntent]).decode
        return [decode(value).metadata for key, value in found.items() if f"/topic/{INTENTS_TOPIC}/" in key]


@pytest.fixture
async def cluster() -> AsyncIterator[tuple[Agent, DistributedRuntime]]:
    made = MemoryCluster()
    agent, worker = made.runtime(), made.runtime()
    for runtime in (agent, worker):
        await runtime.request_plane.listen()
    yield Agent(agent), worker
    await worker.shutdown()
    await agent.shutdown()


async def test_owner_names_a_host_that_appears_later_and_withdraws_its_intents(
    cluster: tuple[Agent, DistributedRuntime],
) -> None:
    agent, worker = cluster
    owner = KvStateAttachmentOwner(worker.endpoint(WORKER), worker.instance_id, [DESCRIPTOR])
    starting = asyncio.ensure_future(owner.start())
    await turns(20)
    assert not starting.done()
    assert await agent.intents() == []
    await agent.put_host(5)
    await turns(20)
    (intent,) = await agent.intents()
    assert intent.worker.dp_rank == 1
    assert intent.kv_block_size == 4
    assert intent.target_host.instance_id == agent.runtime.instance_id
    assert not starting.done()  # The host has not attached the rank yet.
    await agent.attach(intent)
    await starting
    await owner.close()
    assert await agent.intents() == []


async def test_owner_selects_another_host_when_its_host_is_removed(cluster: tuple[Agent, DistributedRuntime]) -> None:
    agent, worker = cluster
    owner = KvStateAttachmentOwner(worker.endpoint(WORKER), worker.instance_id, [DESCRIPTOR])
    starting = asyncio.ensure_future(owner.start())
    first = await agent.put_host(5)
    await turns(20)
    (before,) = await agent.intents()
    await agent.put_host(6)
    await agent.runtime.discovery.delete(EVENT_SOURCES, first)
    await turns(20)
    (after,) = await agent.intents()
    assert after.intent_incarnation != before.intent_incarnation
    await owner.close()
    with pytest.raises(asyncio.CancelledError):
        await starting


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"cache_owner_id": "x"}, "cache_owner_id"),
        ({"indexer_domain_id": ""}, "indexer_domain_id"),
        ({"kv_block_size": 0}, "kv_block_size"),
        ({"global_dp_rank": -1}, "global_dp_rank"),
        ({"image_token_id": 5}, "image_token_id"),
    ],
)
async def test_owner_rejects_a_malformed_descriptor(
    cluster: tuple[Agent, DistributedRuntime], change: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InvalidArgument, match=expected):
        KvStateAttachmentOwner(cluster[1].endpoint(WORKER), 1, [{**DESCRIPTOR, **change}])


async def test_owner_is_closed_only_after_start(cluster: tuple[Agent, DistributedRuntime]) -> None:
    with pytest.raises(RuntimeError, match="start"):
        await KvStateAttachmentOwner(cluster[1].endpoint(WORKER), 1, []).close()


async def test_router_follows_a_rank_that_is_attached_to_an_agent(cluster: tuple[Agent, DistributedRuntime]) -> None:
    agent, worker = cluster
    applied: list[int] = []

    class Listener:
        def apply(self, kv_event: WorkerKvEvent) -> bool:
            applied.append(kv_event.worker_id)
            return True

        def forget(self, worker_id: int, dp_rank: int) -> None:
            applied.clear()

    source = KvEventSource(agent.runtime.endpoint("dynamo.kv_state_agent.control"), worker.instance_id, 1)
    await source.open()  # Its recovery endpoint serves the attached worker's blocks.
    source.put(Stored(None, None, [StoredBlock(1, 10)]))
    records = await agent.runtime.discovery.snapshot(EVENT_SOURCES)
    (record,) = [json.loads(value) for key, value in records.items() if "/topic/kv-events/" in key]
    await agent.put_host(5)
    owner = KvStateAttachmentOwner(worker.endpoint(WORKER), worker.instance_id, [DESCRIPTOR])
    starting = asyncio.ensure_future(owner.start())
    await turns(20)
    (intent,) = await agent.intents()
    target = msgspec.convert(record["metadata"]["recovery_target"], type(intent.target_host))
    key = await agent.attach(msgspec.structs.replace(intent, target_host=target))
    await starting
    view = KvView(worker, EndpointId.parse(WORKER), Listener())
    await view.start()
    await until(lambda: applied == [worker.instance_id])
    await agent.runtime.discovery.delete(EVENT_SOURCES, key)
    await until(lambda: applied == [])
    assert not view.has_sources
    await view.close()
    await owner.close()
    await source.close()
