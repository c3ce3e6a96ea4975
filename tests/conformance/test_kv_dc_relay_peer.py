"""Our relay of a data center's KV state and the released one, for the same worker."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from benchmarks.corpus import bench_model
from benchmarks.ports import free_port
from benchmarks.stacks import HOST
from tests.cluster.peers import require_peer

from dynamo.dc_relay.messages import CLASSES, CONTRACT_MARKER, METHODS, SERVICE
from dynamo.kv_events.source import KvEventSource
from dynamo.llm import KvDcRelay
from dynamo.model_card.card import build_card
from dynamo.protocols.discovery import MODEL_CARDS
from dynamo.protocols.kv_events import Stored, StoredBlock
from dynamo.protocols.model_card import ModelRecord, RuntimeConfig
from dynamo.runtime.distributed import DistributedRuntime

pytestmark = pytest.mark.conformance

PATIENCE_S = 60.0
BLOCKS = 40  # Several per bucket, so that some are in their second bucket.


@asynccontextmanager
async def worker() -> AsyncIterator[DistributedRuntime]:
    """Start a worker with a card and cached blocks that it publishes; return its runtime."""
    runtime = DistributedRuntime(None, "file", "tcp")
    await runtime.connect()
    endpoint = runtime.endpoint("ns.backend.generate")
    await endpoint.register_endpoint_instance()
    config = RuntimeConfig(total_kv_blocks=512, enable_local_indexer=True, kv_event_publishing_enabled=True)
    card = build_card(bench_model(), "m", context_length=0, kv_cache_block_size=16, runtime_config=config)
    record = ModelRecord(
        namespace="ns", component="backend", endpoint="generate", instance_id=runtime.instance_id, card_json=card
    )
    await runtime.discovery.put(MODEL_CARDS, endpoint.record_key, msgspec.json.encode(record))
    source = KvEventSource(endpoint, runtime.instance_id)
    await source.open()
    for number in range(1, BLOCKS + 1):
        source.put(Stored(None, None, [StoredBlock(number, number * 0x9E3779B97F4A7C15 % 2**64)]))
    try:
        yield runtime
    finally:
        await source.close()
        await runtime.shutdown(drain_timeout_s=0.0)


@asynccontextmanager
async def released_relay(directory: Path) -> AsyncIterator[str]:
    address = f"{HOST}:{free_port()}"
    command = [require_peer(), "-m", "dynamo.kv_dc_relay", "--dc-id", "dc", "--bind", address]
    with (directory / "released.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, "--expected-unique-blocks", "64", stdout=log, stderr=log
        )
        try:
            yield address
        finally:
            process.terminate()
            await asyncio.wait_for(process.wait(), PATIENCE_S)


@asynccontextmanager
async def our_relay(runtime: DistributedRuntime) -> AsyncIterator[str]:
    relay = KvDcRelay(
        runtime.endpoint("ns.relay.health"), "dc", bind=f"{HOST}:0", expected_unique_blocks=64, watch_all=True
    )
    await relay.start()
    try:
        yield (await relay.health())["wan_bound_address"]
    finally:
        await relay.shutdown()


async def first(channel: Any, name: str, **fields: Any) -> Any:
    request = CLASSES[f"{name}Request"](subscriber_id="test", contract_marker=CONTRACT_MARKER, **fields)
    call = channel.unary_stream(
        f"/{SERVICE}/{name}",
        request_serializer=lambda one: one.SerializeToString(),
        response_deserializer=CLASSES[METHODS[name]].FromString,
    )(request, timeout=PATIENCE_S, wait_for_ready=True)
    try:
        return await anext(aiter(call))
    finally:
        call.cancel()


async def seen(address: str) -> tuple[Any, Any, list[int]]:
    """Return the complete state of the worker as a relay sends it: descriptor, readiness entry and fingerprints."""
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(PATIENCE_S):
        while True:
            catalog = await first(channel, "WatchKvPoolCatalog")
            readiness = await first(channel, "SubscribeServingReadiness")
            if catalog.snapshot.pools and any(entry.state == 2 for entry in readiness.entries):
                (pool,) = catalog.snapshot.pools
                update = await first(channel, "SubscribeKvPool", expected_producer=pool.producer)
                words = struct.unpack("<32Q", update.payload[64:])
                found = sorted(word >> shift & 0xFFFF for word in words for shift in (0, 16, 32, 48))
                if sum(map(bool, found)) == BLOCKS:
                    return pool, readiness.entries[0], found
            await asyncio.sleep(0.2)


async def test_both_relays_publish_the_same_worker_and_block_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path / "registry"))
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    monkeypatch.setenv("DYN_EVENT_PLANE", "zmq")
    async with worker() as runtime, released_relay(tmp_path) as theirs, our_relay(runtime) as ours:
        pools, entries, fingerprints = zip(*await asyncio.gather(seen(ours), seen(theirs)), strict=True)
    assert fingerprints[0] == fingerprints[1]
    assert pools[0].producer.ckf_format == pools[1].producer.ckf_format
    for entry in entries:
        for member in entry.members:
            member.ClearField("pool_id")  # Its digests are each relay's own.
    assert entries[0] == entries[1]
    for pool in pools:
        pool.ClearField("producer")
    assert pools[0] == pools[1]
