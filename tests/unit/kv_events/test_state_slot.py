"""A KV state agent: slots of cache owners, intents, and answers to routers."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from tests.cluster.memory import MemoryCluster
from tests.settle import turns

from dynamo.core.errors import InvalidArgument
from dynamo.kv_events.publisher import KvEventPublisher
from dynamo.kv_events.state_host import intent_problem
from dynamo.kv_events.state_slot import attachment_record_id, record_id
from dynamo.llm import KvStateAgentHost, KvStateAttachmentOwner
from dynamo.protocols.discovery import EVENT_SOURCES
from dynamo.protocols.kv_events import Stored, StoredBlock
from dynamo.protocols.kv_state import AttachmentIntent, StateAttachment, StateRecord, StateSource
from dynamo.runtime.distributed import DistributedRuntime

WORKER = "dynamo.backend.generate"
DOMAIN = f"{1:032x}:{2:032x}"


def descriptor(slot: int = 4, rank: int = 1) -> dict[str, Any]:
    return {
        "cache_owner_id": f"{DOMAIN}/{3:016x}/{slot:032x}",
        "indexer_domain_id": DOMAIN,
        "global_dp_rank": rank,
        "kv_state_endpoint": WORKER,
        "kv_block_size": 4,
        "raw_zmq_endpoint": "tcp://127.0.0.1:5999",
    }


class Bench:
    """An agent with two slots, and a worker."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster()
        self.agent, self.worker = self.cluster.runtime(), self.cluster.runtime()
        self.host = KvStateAgentHost(self.agent.endpoint("dynamo.kv_state_agent.control"), max_slots=2)

    def owner(self, *descriptors: dict[str, Any], runtime: DistributedRuntime | None = None) -> KvStateAttachmentOwner:
        runtime = runtime or self.worker
        return KvStateAttachmentOwner(runtime.endpoint(WORKER), runtime.instance_id, descriptors)

    async def records(self, topic: str, kind: Any) -> list[StateRecord[Any]]:
        found = await self.agent.discovery.snapshot(EVENT_SOURCES)
        return [msgspec.json.decode(value, type=kind) for key, value in found.items() if f"/{topic}/" in key]

    async def attachment(self) -> StateRecord[StateAttachment]:
        (found,) = await self.records("kv-state-attachments-v2", StateRecord[StateAttachment])
        return found

    async def send_request(self, **query: Any) -> dict[str, Any]:
        (source, *_) = await self.records("kv-state-sources-v2", StateRecord[StateSource])
        target = source.metadata.recovery_control_target
        client = await self.worker.endpoint(f"dynamo.kv_state_agent.{target.endpoint}").client()
        await client.wait_for_instances(5)
        query = {"worker_id": 0, "dp_rank": 1, **query}
        (answer,) = [one async for one in await client.direct(query, target.instance_id, annotated=False)]
        assert isinstance(answer, dict)
        return answer

    async def identity(self) -> dict[str, Any]:
        (source, *_) = await self.records("kv-state-sources-v2", StateRecord[StateSource])
        one = source.metadata
        return {
            "cache_owner_id": msgspec.to_builtins(one.cache_owner_id),
            "publisher_id": one.publisher_id,
            "protocol_version": "v2",
        }

    def put(self, *hashes: int) -> None:
        """Store blocks in the cache of the attached worker, as the relay of its engine does."""
        (slot,) = self.host._host._slots.values()
        slot.put(Stored(None, None, [StoredBlock(one, one * 10) for one in hashes]), 0, "device")


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(KvEventPublisher, "relay", lambda *_: None)
    made = Bench()
    await made.host.start()
    yield made
    await made.host.shutdown()
    await made.worker.shutdown()
    await made.agent.shutdown()


def test_record_ids_equal_those_of_a_released_agent() -> None:
    assert attachment_record_id(0x1AD1C7C253C3AF, 1) == 0x19AD655A944ECC
    assert record_id("dynamo/kv-state-host/v2", 897902525885245577) == 7772252994531902


async def test_attached_worker_has_a_source_record_and_an_attachment_after_an_initial_clear(bench: Bench) -> None:
    await bench.owner(descriptor()).start()
    (source,) = await bench.records("kv-state-sources-v2", StateRecord[StateSource])
    attachment = await bench.attachment()
    assert source.metadata.event_topic == "kv-state-events-v2"
    assert attachment.publisher_id == attachment_record_id(source.publisher_id, 1)
    assert attachment.metadata.worker.worker_id == bench.worker.instance_id
    assert attachment.metadata.ready_at_outbound_cursor == 1
    assert (await bench.host.status())["active_slots"] == 1


async def test_slot_is_reused_by_the_next_worker_of_its_cache_owner(bench: Bench) -> None:
    first = bench.owner(descriptor())
    await first.start()
    await first.close()
    await turns(50)
    assert (await bench.host.status())["detached_slots"] == 1
    assert await bench.records("kv-state-attachments-v2", StateRecord[StateAttachment]) == []
    other = bench.cluster.runtime()
    await bench.owner(descriptor(), runtime=other).start()
    attachment = (await bench.attachment()).metadata
    assert attachment.attachment_generation == 2
    assert attachment.worker.worker_id == other.instance_id
    assert attachment.ready_at_outbound_cursor == 3
    await other.shutdown()


async def test_recovery_returns_the_blocks_of_the_attached_worker(bench: Bench) -> None:
    await bench.owner(descriptor()).start()
    bench.put(7, 8)
    found = await bench.send_request(worker_id=bench.worker.instance_id, kind="recovery")
    (event,) = found["TreeDump"]["events"]
    assert [one["block_hash"] for one in event["event"]["data"]["stored"]["blocks"]] == [7, 8]
    found = await bench.send_request(worker_id=bench.worker.instance_id, kind="recovery", start_event_id=2)
    assert found["Events"]["events"][0]["state_source"]["pool"]["dc_id"] == 3
    assert "Error" in await bench.send_request(worker_id=1, kind="recovery")


async def test_query_about_the_cache_owner_returns_its_attachment_and_an_empty_dump(bench: Bench) -> None:
    await bench.owner(descriptor()).start()
    expected = {"expected": await bench.identity(), "expected_attachment_generation": None}
    status = (await bench.send_request(kind={"status": expected}))["Status"]
    assert status["attachment"]["generation"] == 1
    assert status["outbound_cursor"] == 1
    recovery = (await bench.send_request(kind={"state_agent_recovery": expected}))["StateAgentRecovery"]
    assert recovery["response"]["TreeDump"]["reset_scope"] == {"domain": "cache_owner"}
    assert recovery["receipt"]["recovered_through_cursor"] == 1
    assert "TooNew" in await bench.send_request(kind={"state_agent_recovery": expected}, start_event_id=9)
    assert "Error" in await bench.send_request(kind={"state_agent_recovery": expected}, start_event_id=1)
    other = {"expected": {**expected["expected"], "publisher_id": 1}}  # type: ignore[dict-item]
    assert "Error" in await bench.send_request(kind={"status": other})
    later = {**expected, "expected_attachment_generation": 2}
    assert "Error" in await bench.send_request(kind={"status": later})


async def test_recovery_that_names_the_attachment_returns_the_blocks_of_its_worker(bench: Bench) -> None:
    await bench.owner(descriptor()).start()
    bench.put(7, 8)
    kind = {"state_agent_recovery": {"expected": await bench.identity(), "expected_attachment_generation": 1}}
    mine = {"worker_id": bench.worker.instance_id, "kind": kind}
    found = (await bench.send_request(**mine))["StateAgentRecovery"]
    (event,) = found["response"]["TreeDump"]["events"]
    assert [one["block_hash"] for one in event["event"]["data"]["stored"]["blocks"]] == [7, 8]
    assert (found["receipt"]["attachment_generation"], found["receipt"]["recovered_through_cursor"]) == (1, 2)
    later = (await bench.send_request(**mine, start_event_id=2))["StateAgentRecovery"]
    assert [one["event"]["event_id"] for one in later["response"]["Events"]["events"]] == [2]
    assert "TooNew" in await bench.send_request(**mine, start_event_id=9)
    assert "Error" in await bench.send_request(worker_id=1, kind=kind)


async def test_host_rejects_cache_owners_beyond_its_slots(bench: Bench) -> None:
    await bench.owner(descriptor(4), descriptor(5)).start()
    third = bench.cluster.runtime()
    owner = bench.owner(descriptor(6), runtime=third)
    starting = asyncio.ensure_future(owner.start())
    await turns(50)
    assert not starting.done()
    assert (await bench.host.status())["capacity_rejected_total"] == 1
    await owner.close()
    starting.cancel()
    await third.shutdown()


async def test_closed_host_has_no_records_and_is_not_healthy(bench: Bench) -> None:
    await bench.owner(descriptor()).start()
    await bench.host.shutdown()
    assert await bench.records("kv-state-sources-v2", StateRecord[StateSource]) == []
    await bench.host.wait_terminated()
    assert (await bench.host.status())["healthy"] is False


async def test_intent_error_names_the_invalid_field(bench: Bench) -> None:
    await bench.owner(descriptor()).start()
    (record,) = await bench.records("kv-state-attachment-intents-v2", StateRecord[AttachmentIntent])
    assert intent_problem(record) is None
    replace = msgspec.structs.replace
    for change, field in (
        ({"kv_block_size": 0}, "kv_block_size"),
        ({"raw_zmq_endpoint": "ipc://x"}, "raw_zmq_endpoint"),
        ({"ingress_protocol": "other"}, "ingress_protocol"),
        ({"intent_incarnation": 1}, "intent_incarnation"),
    ):
        problem = intent_problem(replace(record, metadata=replace(record.metadata, **change)))
        assert problem is not None
        assert problem.startswith(field)


def test_host_without_slots_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="max_slots 0"):
        KvStateAgentHost(None, 0)
