"""KV state agents of both systems, our worker attached to one, and routers of both systems.

The agent is upstream's program, which runs with the released package or with ours.
"""

import asyncio
import itertools
import json
import os
import re
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from benchmarks.corpus import bench_model
from benchmarks.ports import free_port
from benchmarks.stacks import HOST
from tests.cluster.peers import require_peer

from dynamo.core.codec import decode, encode
from dynamo.llm import KvStateAttachmentOwner
from dynamo.model_card.card import build_card
from dynamo.protocols.discovery import EVENT_SOURCES, MODEL_CARDS, InstanceAddress
from dynamo.protocols.model_card import ModelRecord, RuntimeConfig
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.request_plane.base import Request, Target
from dynamo.runtime.single_response import OneAnswer

pytestmark = pytest.mark.conformance

PATIENCE_S = 60.0
DOMAIN = f"{1:032x}:{2:032x}"
TOKENS = [1, 2, 3, 4, 5, 6, 7, 8]


@asynccontextmanager
async def process(log: Path, *command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    variables = {
        name: value for name, value in os.environ.items() if command[0] == sys.executable or name != "PYTHONPATH"
    }
    with log.open("wb") as errors:
        made = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=errors, env=variables)
        try:
            yield made
        finally:
            made.kill()
            await made.wait()


@asynccontextmanager
async def worker() -> AsyncIterator[DistributedRuntime]:
    """Our worker with a card; it publishes no KV events of its own."""
    runtime = DistributedRuntime(None, "file", "tcp")
    await runtime.connect()
    endpoint = runtime.endpoint("dynamo.backend.generate")
    await endpoint.register_endpoint_instance()
    config = RuntimeConfig(total_kv_blocks=512, enable_local_indexer=True, kv_event_publishing_enabled=True)
    card = build_card(bench_model(), "m", context_length=0, kv_cache_block_size=4, runtime_config=config)
    record = ModelRecord(
        namespace="dynamo", component="backend", endpoint="generate", instance_id=runtime.instance_id, card_json=card
    )
    await runtime.discovery.put(MODEL_CARDS, endpoint.record_key, msgspec.json.encode(record))
    try:
        yield runtime
    finally:
        await runtime.shutdown(drain_timeout_s=0.0)


async def device_blocks(router: asyncio.subprocess.Process, worker_id: int, tokens: list[int]) -> int:
    """Return how many blocks of a prompt a router counts in the worker's cache."""
    assert router.stdin is not None
    assert router.stdout is not None
    router.stdin.write(json.dumps(tokens).encode() + b"\n")
    while True:
        line = await router.stdout.readline()
        assert line, "the router has ended"
        if line.startswith(b"["):
            found: list[dict[str, Any]] = json.loads(line)
            return sum(one["device_blocks"] for one in found if one["worker_id"] == worker_id)


async def until_blocks(router: asyncio.subprocess.Process, worker_id: int, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await device_blocks(router, worker_id, TOKENS) != count:  # noqa: ASYNC110 - the state is in another process
            await asyncio.sleep(0.2)


async def until_receiving(router: asyncio.subprocess.Process, worker_id: int, engine: "Engine") -> None:
    """Publish blocks of other prompts until a router has received one of them.

    A released router never recovers an event of an agent that preceded its subscription, with either agent: it logs
    "KV state-agent event gap; continuing advisory ingestion". The first block may have come with its recovery.
    """
    seen = 0
    async with asyncio.timeout(PATIENCE_S):
        for number in itertools.count(100):
            tokens = [number] * 4
            await engine.publish("BlockStored", [number], None, tokens, 4, None)
            await asyncio.sleep(0.2)
            seen += await device_blocks(router, worker_id, tokens)
            if seen > 1:
                return


def descriptor_of(address: str) -> dict[str, Any]:
    """Return what our worker states about its rank, whose engine publishes its events at the address."""
    return {
        "cache_owner_id": f"{DOMAIN}/{3:016x}/{4:032x}",
        "indexer_domain_id": DOMAIN,
        "global_dp_rank": 0,
        "kv_state_endpoint": "dynamo.backend.generate",
        "kv_block_size": 4,
        "raw_zmq_endpoint": address,
    }


class Engine:
    """Events of an engine; its socket receives the agent's subscription, which is not confirmed to the agent."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self._sent = 0

    async def until_subscribed(self, subscribed: bool = True) -> None:
        """Wait until an agent has subscribed, or has left."""
        async with asyncio.timeout(PATIENCE_S):
            assert (await self._socket.recv()).startswith(b"\x01" if subscribed else b"\x00")

    async def publish(self, *event: Any) -> None:
        """Publish one event."""
        body = msgspec.msgpack.encode([0.0, [event], 0])
        await self._socket.send_multipart([b"", struct.pack(">Q", self._sent), body])
        self._sent += 1


@pytest.fixture
async def engine() -> AsyncIterator[tuple[Engine, str]]:
    """Return an engine's events and their address."""
    with zmq.asyncio.Context() as context, context.socket(zmq.XPUB) as socket:
        address = f"tcp://{HOST}:{free_port()}"
        socket.bind(address)
        yield Engine(socket), address
        socket.linger = 0


@pytest.mark.parametrize(
    ("agent", "system"), [("released", "released"), ("released", "ours"), ("ours", "released"), ("ours", "ours")]
)
async def test_router_counts_the_blocks_of_our_worker_that_is_attached_to_an_agent(
    agent: str, system: str, engine: tuple[Engine, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path / "store"))
    monkeypatch.setenv("DYN_EVENT_PLANE", "zmq")
    script = str(Path(__file__).with_name("peer_kv_state_router.py"))
    events, address = engine
    descriptor, peer = descriptor_of(address), require_peer()
    python = peer if system == "released" else sys.executable
    (program,) = Path(peer).parents[1].glob("lib/python*/site-packages/dynamo/kv_state_agent/__main__.py")
    async with (
        process(tmp_path / "agent.log", peer if agent == "released" else sys.executable, str(program)),
        process(tmp_path / "router.log", python, script) as router,
        worker() as runtime,
    ):
        owner = KvStateAttachmentOwner(runtime.endpoint("dynamo.backend.generate"), runtime.instance_id, [descriptor])
        async with asyncio.timeout(PATIENCE_S):
            await owner.start()
        await events.until_subscribed()
        if system == "released":
            await until_receiving(router, runtime.instance_id, events)
        await events.publish("BlockStored", [11, 12], None, TOKENS, 4, None)
        await until_blocks(router, runtime.instance_id, 2)
        await events.publish("BlockRemoved", [12])
        await until_blocks(router, runtime.instance_id, 1)
        await owner.close()
        await until_blocks(router, runtime.instance_id, 0)


EVERYTHING = ("status", None), ("status", 1), ("recovery", None), ("recovery", 1), ("recovery", 2), ("blocks", None)
"""Kinds of queries, and the generation of the attachment that they name."""


async def send_query(runtime: DistributedRuntime, target: InstanceAddress, question: dict[str, Any]) -> Any:
    """Return an agent's answer to a query, as plain values."""
    callee = Target.of(target)
    receiver = OneAnswer("the agent")
    query = Request("query", encode(question, callee.codec), callee.codec, {}, {})
    await runtime.request_plane.connect(callee)
    assert runtime.request_plane.send(callee, query, receiver, lambda *_: None) is not None
    item = await receiver.first
    assert item.data is not None
    return decode(item.data, item.codec)


async def test_agents_answer_the_same_to_every_query(
    engine: tuple[Engine, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    monkeypatch.setenv("DYN_EVENT_PLANE", "zmq")
    events, address = engine
    descriptor, peer = descriptor_of(address), require_peer()
    (program,) = Path(peer).parents[1].glob("lib/python*/site-packages/dynamo/kv_state_agent/__main__.py")
    found: dict[str, dict[str, Any]] = {}
    for number, agent in enumerate((peer, sys.executable)):
        monkeypatch.setenv("DYN_FILE_KV", str(tmp_path / f"store{number}"))
        async with process(tmp_path / f"agent{number}.log", agent, str(program)), worker() as runtime:
            owner = KvStateAttachmentOwner(
                runtime.endpoint("dynamo.backend.generate"), runtime.instance_id, [descriptor]
            )
            async with asyncio.timeout(PATIENCE_S):
                await owner.start()
            await events.until_subscribed()
            await events.publish("BlockStored", [11, 12], None, TOKENS, 4, None)
            found[agent] = await answers(runtime)
            await owner.close()
            await events.until_subscribed(False)
    theirs, ours = found.values()
    assert ours == theirs


async def answers(runtime: DistributedRuntime) -> dict[str, Any]:
    """Return an agent's answers to all queries once it has the blocks, without ids of the run."""
    (source,) = [
        msgspec.json.decode(value)
        for key, value in (await runtime.discovery.snapshot(EVENT_SOURCES)).items()
        if "/kv-state-sources-v2/" in key
    ]
    about = source["metadata"]
    target = msgspec.convert(about["recovery_control_target"], InstanceAddress)
    expected = {name: about[name] for name in ("cache_owner_id", "publisher_id", "protocol_version")}
    found: dict[str, Any] = {}

    async def of(kind: str, generation: int | None, start: int | None, worker_id: int) -> Any:
        named = {"expected": expected, "expected_attachment_generation": generation}
        kinds = {"status": {"status": named}, "recovery": {"state_agent_recovery": named}, "blocks": "recovery"}
        question = {"worker_id": worker_id, "dp_rank": 0, "start_event_id": start, "end_event_id": None}
        return await send_query(runtime, target, {**question, "supports_tree_dump_failed": True, "kind": kinds[kind]})

    async with asyncio.timeout(PATIENCE_S):
        while (await of("status", None, None, 0))["Status"]["outbound_cursor"] < 2:  # noqa: ASYNC110 - the state is in another process
            await asyncio.sleep(0.05)
    for kind, generation in EVERYTHING:
        for start in (None, 1, 2, 9):
            for whose in ("its worker", "another"):
                worker_id = runtime.instance_id if whose == "its worker" else 7
                answer = await of(kind, generation, start, worker_id)
                text = json.dumps({"Error": ""} if "Error" in answer else answer)
                if "TreeDump" in text:  # Its events are numbered from 0 or from 1; the numbers have no meaning.
                    text = re.sub(r'"event_id": \d+', "", text)
                for number, name in ((runtime.instance_id, "WORKER"), (about["publisher_id"], "PUBLISHER")):
                    text = text.replace(str(number), name)
                found[f"{kind} {generation} from {start} of {whose}"] = text
    return found
