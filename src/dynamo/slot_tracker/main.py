"""Standalone slot tracker: `python -m dynamo.slot_tracker`, its options and HTTP API."""

import logging
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from dynamo.core.clock import SystemClock
from dynamo.core.config import load, option
from dynamo.core.errors import HttpError
from dynamo.routing.sync.replica_peers import ReplicaOptions, ReplicaPeers, add_peer_routes
from dynamo.runtime.json_service import HttpCall, JsonRoutes
from dynamo.runtime.run_service import run_service
from dynamo.slot_tracker.tracker import DEFAULT_GROUP, SlotTracker, TrackedWorker

logger = logging.getLogger(__name__)

OK = {"status": "ok"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTrackerOptions(ReplicaOptions):
    """Standalone slot tracker: reports the load of every rank."""

    port: int = option(8091, "--port", None, "HTTP port")


U64 = Annotated[int, msgspec.Meta(ge=0)]


class RegisterBody(msgspec.Struct):
    """A worker to register."""

    worker_id: U64
    model_name: str
    block_size: U64
    dp_start: U64
    dp_size: U64
    routing_group: str = DEFAULT_GROUP


class UnregisterBody(msgspec.Struct):
    """A worker to remove."""

    worker_id: U64
    model_name: str
    routing_group: str = DEFAULT_GROUP


class AddBody(msgspec.Struct):
    """A request that was routed to a rank."""

    request_id: str
    worker_id: U64
    dp_rank: U64
    model_name: str
    sequence_hashes: list[int]
    new_isl_tokens: U64 = 0
    routing_group: str = DEFAULT_GROUP


class RequestBody(msgspec.Struct):
    """The id of a tracked request."""

    request_id: str
    model_name: str
    routing_group: str = DEFAULT_GROUP


class PotentialBody(msgspec.Struct):
    """A prospective request."""

    model_name: str
    sequence_hashes: list[int] = msgspec.field(default_factory=list)
    new_isl_tokens: U64 = 0
    routing_group: str = DEFAULT_GROUP


class SlotRoutes:
    """Handlers of one tracker, which also notify its peers."""

    def __init__(self, tracker: SlotTracker, peers: ReplicaPeers | None = None) -> None:
        self._tracker = tracker
        self._peers = peers
        self.routes = JsonRoutes()
        add = self.routes.add
        add("GET", "/health", self.health)
        add("GET", "/workers", self.workers)
        add("POST", "/register", self.register, RegisterBody)
        add("POST", "/unregister", self.unregister, UnregisterBody)
        add("POST", "/add", self.add, AddBody)
        add("POST", "/prefill_complete", self.prefill_complete, RequestBody)
        add("POST", "/free", self.free, RequestBody)
        add("GET", "/loads", self.loads)
        add("POST", "/potential_loads", self.potential_loads, PotentialBody)
        add_peer_routes(self.routes, peers)

    async def health(self, call: HttpCall[None]) -> tuple[int, Any]:
        return 200, None

    async def workers(self, call: HttpCall[None]) -> tuple[int, Any]:
        return 200, self._tracker.workers(call.query.get("model_name"), call.query.get("routing_group"))

    async def register(self, call: HttpCall[RegisterBody]) -> tuple[int, Any]:
        body = call.body
        self._tracker.register(
            TrackedWorker(
                body.worker_id, body.model_name, body.routing_group, body.block_size, body.dp_start, body.dp_size
            )
        )
        return 201, OK

    async def unregister(self, call: HttpCall[UnregisterBody]) -> tuple[int, Any]:
        self._tracker.unregister(call.body.worker_id, call.body.model_name, call.body.routing_group)
        return 200, OK

    async def add(self, call: HttpCall[AddBody]) -> tuple[int, Any]:
        body = call.body
        rank, place = (body.worker_id, body.dp_rank), (body.model_name, body.routing_group)
        self._tracker.add(body.request_id, rank, place, body.sequence_hashes, body.new_isl_tokens)
        if self._peers is not None:
            self._peers.added(body.request_id, rank, place, body.sequence_hashes, body.new_isl_tokens)
        return 201, OK

    async def prefill_complete(self, call: HttpCall[RequestBody]) -> tuple[int, Any]:
        place = (call.body.model_name, call.body.routing_group)
        if not self._tracker.prefill_complete(call.body.request_id, place):
            raise HttpError(404, f"Request {call.body.request_id} not found")
        if self._peers is not None:
            rank = self._tracker.rank_of(call.body.request_id, place)
            assert rank is not None, "the tracker has just updated this request"
            self._peers.prefilled(call.body.request_id, rank, place)
        return 200, OK

    async def free(self, call: HttpCall[RequestBody]) -> tuple[int, Any]:
        place = (call.body.model_name, call.body.routing_group)
        rank = self._tracker.rank_of(call.body.request_id, place)
        if self._tracker.free(call.body.request_id, place) and self._peers is not None and rank is not None:
            self._peers.freed(call.body.request_id, rank, place)
        return 200, OK

    async def loads(self, call: HttpCall[None]) -> tuple[int, Any]:
        return 200, self._tracker.loads(call.query.get("model_name"), call.query.get("routing_group"))

    async def potential_loads(self, call: HttpCall[PotentialBody]) -> tuple[int, Any]:
        body = call.body
        place = (body.model_name, body.routing_group)
        return 200, self._tracker.potential_loads(place, body.sequence_hashes, body.new_isl_tokens)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the slot tracker until it is stopped; `argv` defaults to the command line. Raises `ConfigError`."""
    options = load(SlotTrackerOptions, sys.argv[1:] if argv is None else argv, prog="python -m dynamo.slot_tracker")
    return run_service("slot-tracker", serve(options))


@asynccontextmanager
async def serve(options: SlotTrackerOptions) -> AsyncIterator[None]:
    """Connect the peers and listen; close both at the end of the block."""
    tracker = SlotTracker(SystemClock())
    peers = None
    if options.replica_sync_port is not None:
        peers = ReplicaPeers(tracker, options.replica_sync_peers)
        await peers.start(options.replica_sync_port)
    try:
        async with SlotRoutes(tracker, peers).routes.serve(options.port) as url:
            logger.info("slot tracker ready: %s", url)
            yield
    finally:
        if peers is not None:
            await peers.close()
