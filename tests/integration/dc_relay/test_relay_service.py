"""KvDcRelay over gRPC: catalog, readiness, filter and loads of a worker, and the statuses of refused calls."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import msgspec
import pytest
from tests.cluster.memory import MemoryCluster

from dynamo.core.codec import msgpack_encode
from dynamo.dc_relay.grpc_probes import REFLECTION_SERVICE
from dynamo.dc_relay.messages import CLASSES, CONTRACT_MARKER, METHODS, SERVICE
from dynamo.dc_relay.service import REASON_KEY
from dynamo.grpc.health import HEALTH_SERVICE
from dynamo.kv_events.source import KvEventSource
from dynamo.llm import KvDcRelay
from dynamo.protocols.discovery import MODEL_CARDS
from dynamo.protocols.kv_events import Removed, Stored, StoredBlock
from dynamo.protocols.load import KvMetrics
from dynamo.runtime.component import Endpoint

PATIENCE_S = 60.0


class Relayed:
    """A worker, a relay that follows it, and a client of the relay."""

    def __init__(self, worker: Endpoint, source: KvEventSource, relay: KvDcRelay, channel: Any) -> None:
        self.worker, self.source, self.relay, self.channel = worker, source, relay, channel

    def stream(self, name: str, **fields: Any) -> Any:
        request = CLASSES[f"{name}Request"](**{"subscriber_id": "test", "contract_marker": CONTRACT_MARKER, **fields})
        call = self.channel.unary_stream(
            f"/{SERVICE}/{name}",
            request_serializer=lambda one: one.SerializeToString(),
            response_deserializer=CLASSES[METHODS[name]].FromString,
        )
        return call(request, timeout=PATIENCE_S)

    async def first(self, name: str, **fields: Any) -> Any:
        return await anext(aiter(self.stream(name, **fields)))

    async def producer(self) -> Any:
        """Return the producer of the worker's pool, once the catalog has it."""
        async for update in self.stream("WatchKvPoolCatalog"):
            if update.snapshot.pools:
                return update.snapshot.pools[0].producer
        raise AssertionError("the catalog ended")

    async def refusal(self, name: str, **fields: Any) -> tuple[str, str]:
        """Return the status and the reason of a refused call."""
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self.first(name, **fields)
        reasons = dict(raised.value.trailing_metadata() or ())
        return raised.value.code().name, str(reasons.get(REASON_KEY)).removeprefix("RELAY_ERROR_REASON_")


@asynccontextmanager
async def relayed(**options: Any) -> AsyncIterator[Relayed]:
    cluster = MemoryCluster()
    worker = cluster.runtime().endpoint("ns.backend.generate")
    await worker.register_endpoint_instance()
    record = {
        "type": "Model",
        "namespace": "ns",
        "component": "backend",
        "endpoint": "generate",
        "instance_id": worker.connection_id(),
        "card_json": {
            "display_name": "m",
            "slug": "m",
            "kv_cache_block_size": 16,
            "worker_type": "aggregated",
            "runtime_config": {"total_kv_blocks": 100},
        },
    }
    await worker.discovery.put(MODEL_CARDS, worker.record_key, msgspec.json.encode(record))
    source = KvEventSource(worker, worker.connection_id())
    await source.open()
    relay = KvDcRelay(
        cluster.runtime().endpoint("ns.relay.health"), "dc", bind="127.0.0.1:0", expected_unique_blocks=64, **options
    )
    await relay.start()
    address = (await relay.health())["wan_bound_address"]
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            yield Relayed(worker, source, relay, channel)
        finally:
            await relay.shutdown()
            await source.close()
            await cluster.shutdown()


async def test_catalog_and_readiness_describe_the_workers_model() -> None:
    async with relayed() as one:
        producer = await one.producer()
        assert producer.ckf_format.bucket_count == 32
        readiness = await one.first("SubscribeServingReadiness")
        (entry,) = readiness.entries
        assert (entry.namespace, entry.canonical_model_id, entry.state) == ("ns", "m", 2)
        assert entry.members[0].pool_id == producer.pool_id


async def test_filter_has_the_blocks_at_the_start_and_follows_their_changes() -> None:
    async with relayed() as one:
        one.source.put(Stored(None, None, [StoredBlock(1, 10)]))
        updates = aiter(one.stream("SubscribeKvPool", expected_producer=await one.producer()))
        snapshot = await anext(updates)
        words = struct.unpack("<32Q", snapshot.payload[64:])
        one.source.put(Stored(None, None, [StoredBlock(2, 20)]))
        stored = await anext(updates)
        one.source.put(Removed([2]))
        removed = await anext(updates)
        assert [update.kind for update in (snapshot, stored, removed)] == [1, 2, 2]
        assert stored.base_sequence == snapshot.sequence
        bucket, word = struct.unpack("<IQ", stored.payload[60:72])
        assert word != words[bucket]
        assert struct.unpack("<IQ", removed.payload[60:72]) == (bucket, words[bucket])


async def test_loads_are_sent_in_windows() -> None:
    async with relayed(tuning={"load_window_ms": 20}) as one:
        await one.producer()
        publisher = await one.worker.runtime.event_plane.publisher(one.worker.id, "kv_metrics")
        publisher.publish(msgpack_encode(KvMetrics(one.worker.connection_id(), 0, 1, 0, 7)))
        async for window in one.stream("SubscribeKvPoolLoad"):
            if window.pools and window.pools[0].kv_observed_ranks:
                break
        load = window.pools[0]
        assert (load.kv_used_blocks, load.total_kv_blocks, load.kv_expected_ranks) == (7, 100, 1)


async def test_idle_pool_sends_heartbeats_that_do_not_advance_its_sequence() -> None:
    async with relayed(tuning={"pool_heartbeat_interval_ms": 20}) as one:
        updates = aiter(one.stream("SubscribeKvPool", expected_producer=await one.producer()))
        snapshot, heartbeat = await anext(updates), await anext(updates)
        assert (heartbeat.kind, heartbeat.sequence, heartbeat.payload) == (3, snapshot.sequence, b"")


async def test_pool_of_a_worker_without_event_source_is_withdrawn_and_its_stream_ends() -> None:
    async with relayed() as one:
        updates = aiter(one.stream("SubscribeKvPool", expected_producer=await one.producer()))
        await anext(updates)
        await one.source.leave()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            _ = [update async for update in updates]
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        await one.source.join()
        assert (await one.producer()).layout_generation == 2


async def test_refused_calls_have_a_status_and_a_reason() -> None:
    async with relayed(tuning={"max_catalog_subscribers": 1}) as one:
        invalid = ("INVALID_ARGUMENT", "INVALID_REQUEST")
        for name in ("", "x" * 129, "a\nb"):
            assert await one.refusal("SubscribeServingReadiness", subscriber_id=name) == invalid
        mismatch = ("FAILED_PRECONDITION", "CONTRACT_MISMATCH")
        assert await one.refusal("SubscribeServingReadiness", contract_marker=1) == mismatch
        assert await one.refusal("SubscribeKvPool") == invalid
        current = await one.producer()
        changed, unknown, newer = (CLASSES["ProducerIdentity"].FromString(current.SerializeToString()) for _ in "123")
        changed.layout_generation += 1
        unknown.pool_id.dc_id += 1
        newer.ckf_format.format_version = 9
        expected = {"PRODUCER_CHANGED": changed, "POOL_NOT_FOUND": unknown, "UNSUPPORTED_FEATURE": newer}
        for reason, producer in expected.items():
            assert (await one.refusal("SubscribeKvPool", expected_producer=producer))[1] == reason


async def test_stream_beyond_the_limit_is_refused() -> None:
    async with relayed(tuning={"max_catalog_subscribers": 1}) as one:
        first = one.stream("WatchKvPoolCatalog")
        await anext(aiter(first))
        assert await one.refusal("WatchKvPoolCatalog") == ("RESOURCE_EXHAUSTED", "RESOURCE_LIMIT")
        first.cancel()


async def test_health_checks_and_reflection_are_served() -> None:
    async with relayed() as one:
        check = one.channel.unary_unary(f"/{HEALTH_SERVICE}/Check")
        assert await check(b"", timeout=PATIENCE_S) == b"\x08\x01"
        reflect = one.channel.stream_stream(f"/{REFLECTION_SERVICE}/ServerReflectionInfo")
        name = SERVICE.encode()
        answer = reflect(iter([b"\x22" + bytes([len(name)]) + name]), timeout=PATIENCE_S)
        assert b"SubscribeKvPool" in await anext(aiter(answer))


async def test_shutdown_ends_streams_and_waiters_and_is_reported() -> None:
    async with relayed() as one:
        waiter = asyncio.create_task(one.relay.wait_for_shutdown())
        await asyncio.sleep(0)
        updates = aiter(one.stream("WatchKvPoolCatalog"))
        await anext(updates)
        await one.relay.shutdown()
        await asyncio.wait_for(waiter, PATIENCE_S)
        health = await one.relay.health()
        assert (health["healthy"], health["shutting_down"], health["wan_serving"]) == (False, True, False)


async def test_methods_before_start_are_errors() -> None:
    cluster = MemoryCluster()
    relay = KvDcRelay(cluster.runtime().endpoint("ns.relay.health"), "dc")
    for call in (relay.health, relay.flush, relay.shutdown, relay.wait_for_shutdown):
        with pytest.raises(RuntimeError, match="start"):
            await call()
    await cluster.shutdown()
