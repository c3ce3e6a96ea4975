"""RemoteIndexer: queries to the index of another router (`--serve-indexer`, `--use-remote-indexer`).

    request   {model_name, block_hashes, device_only} ──▶ <namespace>.<component>.kv_indexer_query
    response  {"TieredScores": {device: {scores: [[rank, blocks]]}, lower_tier: [[tier, {hits: [[rank, more]]}]]}}

Without KV events there is one index, of routed prompts, and its users add theirs:

    request   {model_name, worker, local_hashes, sequence_hashes} ──▶ <namespace>.<component>.kv_indexer_record_routing_decision
    response  "Recorded" or {"Error": text}

The format is upstream's: releases of Dynamo and this package can query each other. If the indexer is unavailable, the
request is routed by load alone.
"""

import asyncio
import logging
import random
import struct
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import msgspec

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.codec import MSGPACK, UNREADABLE, decode, encode
from dynamo.core.errors import DynamoException, InvalidArgument, StreamIncomplete
from dynamo.core.metrics import MetricsRegistry
from dynamo.kv_router.router import Rank, Router
from dynamo.kv_router.runs import TIERS, pack, unpack
from dynamo.protocols.discovery import EndpointId
from dynamo.runtime.client import Client
from dynamo.runtime.component import Endpoint, Serving
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.request_plane.base import Bare, Reply, Request
from dynamo.runtime.single_response import OneAnswer
from dynamo.tokens.hashing import sequence_hashes

logger = logging.getLogger(__name__)

NAME = "kv_indexer_query"
RECORD_NAME = "kv_indexer_record_routing_decision"
RECORDED = "Recorded"
QUERY_TIMEOUT_S = 1.0  # A response takes a millisecond; a longer wait would cost more than a cache miss.

Answered = TypeVar("Answered")

Tiers = tuple[int, int, int]
"""Blocks on a rank's device, then additional ones in host memory, then on disk."""


class IndexerQuery(msgspec.Struct):
    """Query for the ranks that cache these blocks."""

    model_name: str
    block_hashes: list[int]
    device_only: bool = False


class RankName(msgspec.Struct, frozen=True):
    """Rank in the wire format."""

    worker_id: int
    dp_rank: int = 0


class DeviceScores(msgspec.Struct):
    """Number of leading blocks cached on each rank's device."""

    scores: list[tuple[RankName, int]]
    frequencies: list[int] = msgspec.field(default_factory=list)


class TierHits(msgspec.Struct):
    """Blocks beyond those of the faster tiers."""

    hits: list[tuple[RankName, int]]


class TieredScores(msgspec.Struct):
    """Cached blocks by tier and rank."""

    device: DeviceScores
    lower_tier: list[tuple[str, TierHits]] = msgspec.field(default_factory=list)


class RoutedPrompt(msgspec.Struct):
    """Prompt that a router sent to a rank."""

    model_name: str
    worker: RankName
    local_hashes: list[int]
    sequence_hashes: list[int] = msgspec.field(default_factory=list)


class IndexerAnswer(msgspec.Struct, omit_defaults=True):
    """Response of an indexer; exactly one field is set."""

    scores: TieredScores | None = msgspec.field(default=None, name="TieredScores")
    error: str | None = msgspec.field(default=None, name="Error")


def answer_of(held: Mapping[Rank, Tiers], *, device_only: bool = False) -> IndexerAnswer:
    """Return the response for cached blocks by rank."""
    device = [(RankName(*rank), tiers[0]) for rank, tiers in sorted(held.items()) if tiers[0]]
    lower = []
    for tier in () if device_only else (1, 2):
        hits = [(RankName(*rank), tiers[tier]) for rank, tiers in sorted(held.items()) if tiers[tier]]
        if hits:
            lower.append((TIERS[tier], TierHits(hits)))
    return IndexerAnswer(TieredScores(DeviceScores(device), lower))


def held_of(scores: TieredScores) -> dict[Rank, Tiers]:
    """Return the cached blocks of a response by rank."""
    found: dict[Rank, list[int]] = {}
    for tier, hits in [(TIERS[0], scores.device.scores), *((name, one.hits) for name, one in scores.lower_tier)]:
        if tier in TIERS:
            for rank, blocks in hits:
                found.setdefault((rank.worker_id, rank.dp_rank), [0, 0, 0])[TIERS.index(tier)] = blocks
    return {rank: (tiers[0], tiers[1], tiers[2]) for rank, tiers in found.items()}


class IndexerServer:
    """Endpoint that serves queries from one router's index."""

    def __init__(
        self, endpoint: Endpoint, machine: Router, models: Callable[[], Collection[str]], clock: Clock | None = None
    ) -> None:
        """Store the arguments; `models` returns the names that the workers currently serve."""
        place = endpoint.id
        self._endpoint = endpoint.runtime.endpoint(f"{place.namespace}.{place.component}.{NAME}")
        self._record = endpoint.runtime.endpoint(f"{place.namespace}.{place.component}.{RECORD_NAME}")
        self._machine = machine
        self._models = models
        self._clock = clock or SystemClock()
        self._serving: list[Serving] = []

    async def start(self) -> None:
        """Register the endpoints for other routers."""
        self._serving.append(await self._endpoint.serve(self.handle))
        if not self._machine.config.use_kv_events:
            self._serving.append(await self._record.serve(self.handle_record))

    async def close(self) -> None:
        """Unregister the endpoints."""
        while self._serving:
            await self._serving.pop().close(0.0)

    def handle(self, request: Request, reply: Reply) -> None:
        """Handle a query. Raises `InvalidArgument` for an unreadable one."""
        try:
            query = decode(request.body, request.codec, IndexerQuery)
            blocks = pack(query.block_hashes)
        except (*UNREADABLE, struct.error) as error:
            raise InvalidArgument(f"invalid indexer query: {error}") from None
        reply.item(Bare(self.answer(query, blocks)))
        reply.finish()

    def handle_record(self, request: Request, reply: Reply) -> None:
        """Handle a routed prompt. Raises `InvalidArgument` for an unreadable one."""
        try:
            prompt = decode(request.body, request.codec, RoutedPrompt)
            blocks = pack(prompt.local_hashes)
        except (*UNREADABLE, struct.error) as error:
            raise InvalidArgument(f"invalid routed prompt: {error}") from None
        reply.item(Bare(self.record(prompt, blocks)))
        reply.finish()

    def record(self, prompt: RoutedPrompt, blocks: bytes) -> str | dict[str, str]:
        """Predict a routed prompt as cached and return the response."""
        if prompt.model_name not in self._models():
            return {"Error": f"served indexer model {prompt.model_name} is not registered"}
        rank = (prompt.worker.worker_id, prompt.worker.dp_rank)
        if not self._machine.note_sent(rank, blocks, self._clock.now()):
            return {"Error": f"worker {rank[0]} rank {rank[1]} is not known"}
        return RECORDED

    def answer(self, query: IndexerQuery, blocks: bytes) -> IndexerAnswer:
        """Return the cached blocks of a query."""
        if query.model_name not in self._models():
            return IndexerAnswer(error=f"served indexer model {query.model_name} is not registered")
        return answer_of(self._machine.overlaps(blocks, self._clock.now()), device_only=query.device_only)


class RemoteIndexer:
    """Client of the index of another process."""

    def __init__(self, runtime: DistributedRuntime, endpoint: EndpointId, *, records: bool = False) -> None:
        """`records`: whether routed prompts are added to the index, which then follows no KV events."""
        self._path = f"{endpoint.namespace}.{endpoint.component}.{NAME}"
        self._record_path = f"{endpoint.namespace}.{endpoint.component}.{RECORD_NAME}"
        self._records = records
        self._runtime = runtime
        self._client: Client | None = None
        self._recorder: Client | None = None
        self._metrics = RemoteMetrics(runtime.metrics)

    async def start(self) -> None:
        """Start watching the indexer's instances."""
        self._client = await self._runtime.endpoint(self._path).client()
        if self._records:
            self._recorder = await self._runtime.endpoint(self._record_path).client()

    async def close(self) -> None:
        """Stop."""
        for client in (self._client, self._recorder):
            if client is not None:
                await client.close()

    async def record(self, model_name: str, rank: Rank, blocks: bytes) -> None:
        """Add a routed prompt to the index; a failure is counted."""
        if not blocks or self._recorder is None:
            return
        hashes = list(unpack(blocks))
        prompt = RoutedPrompt(model_name, RankName(*rank), hashes, sequence_hashes(hashes))
        try:
            answer = await self._query(self._recorder, encode(prompt, MSGPACK), object)
            if answer != RECORDED:
                raise StreamIncomplete(f"the indexer answered {answer!r}")
        except (DynamoException, TimeoutError, *UNREADABLE) as error:
            self._metrics.failed(self._record_path, error)

    async def find(self, model_name: str, blocks: bytes) -> dict[Rank, Tiers]:
        """Return the cached blocks of a prompt by rank, given its packed token hashes; empty on failure or timeout."""
        if not blocks or self._client is None:
            return {}
        query = encode(IndexerQuery(model_name, list(unpack(blocks))), MSGPACK)
        try:
            answer = await self._query(self._client, query, IndexerAnswer)
            if answer.scores is None:
                raise StreamIncomplete(answer.error or "the indexer sent an empty response")
        except (DynamoException, TimeoutError, *UNREADABLE) as error:
            self._metrics.failed(self._path, error)
            return {}
        return held_of(answer.scores)

    @staticmethod
    async def _query(client: Client, body: bytes, kind: type[Answered]) -> Answered:
        receiver = OneAnswer("the indexer")
        async with asyncio.timeout(QUERY_TIMEOUT_S):
            await client.send(body, receiver, request_id=f"kv-indexer-{uuid.UUID(int=random.getrandbits(128))}")
            item = await receiver.first
        answer: Answered = decode(item.data or b"", item.codec, kind)
        return answer


class RemoteMetrics:
    """Metrics of failed queries."""

    def __init__(self, registry: MetricsRegistry) -> None:
        name = "dynamo_router_remote_indexer_failures_total"
        self._failures = registry.counter(name, "Failed queries to the remote indexer").labels()

    def failed(self, path: str, error: Exception) -> None:
        """Record a failed query."""
        self._failures.inc()
        logger.warning("query to %s failed: %s; routing by load", path, str(error) or "timeout")


class ServedIndexers:
    """Indexer servers of a frontend's KV routers (`--serve-indexer`).

    There is one per endpoint, because models of one endpoint, such as adapters, share workers and thus cached blocks.
    """

    def __init__(self, runtime: DistributedRuntime) -> None:
        self._runtime = runtime
        self._servers: dict[str, tuple[Router, IndexerServer]] = {}
        self._names: dict[str, Collection[str]] = {}

    async def follow(self, path: str, machines: Mapping[str, Router]) -> None:
        """Replace the models of an endpoint and their routers; the index of the first one is served."""
        self._names[path] = list(machines)
        machine = next(iter(machines.values()), None)
        known = self._servers.get(path)
        if known is not None and known[0] not in machines.values():
            del self._servers[path]
            await known[1].close()
            known = None
        if machine is None:
            del self._names[path]
        elif known is None:
            server = IndexerServer(self._runtime.endpoint(path), machine, lambda: self._names.get(path, ()))
            self._servers[path] = machine, server
            await server.start()

    async def close(self) -> None:
        """Unregister all indexers."""
        servers, self._servers = self._servers, {}
        for _, server in servers.values():
            await server.close()
