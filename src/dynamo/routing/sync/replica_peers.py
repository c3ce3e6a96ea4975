"""ReplicaPeers: exchange of active requests and session bindings between load-tracking services, over ZMQ.

    add · prefill complete · free ──PUB──▶ every peer's SUB ──▶ its load state

    session ─▶ rank ──PUB──▶ every peer's SUB ──▶ its sessions, if it keeps any

Messages are upstream's: topic, then a msgpack map of model, group, block size and one `ActiveSequenceEvent`, or, on a
separate topic, of one session's binding. Delivery is best effort: a message that a slow peer misses is not sent again,
and a new peer starts empty.
"""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from dynamo.core.codec import UNREADABLE, msgpack_decoder, msgpack_encode
from dynamo.core.config import option
from dynamo.core.errors import ConfigError, HttpError, InvalidArgument
from dynamo.core.listening import listen_error
from dynamo.core.tasks import TaskOwner
from dynamo.kv_events.engine_subscriber import check_endpoint
from dynamo.kv_router.affinity import Version
from dynamo.protocols.active_sequences import (
    MARK_PREFILL_COMPLETED,
    ActiveSequenceEvent,
    AddedSequence,
    AddRequest,
    PrefillLoadHint,
    SequenceWorker,
)
from dynamo.runtime.json_service import HttpCall, JsonRoutes
from dynamo.tokens.hashing import U64

logger = logging.getLogger(__name__)

TOPIC = "dynamo.slot-tracker.v1"  # Slot trackers and selection services share it.
AFFINITY_TOPIC = "dynamo.session-affinity.v1"
UNSENT_MAX = 10_000  # Send queue length per peer, in messages; beyond it new messages are dropped.
PEERS_MAX = 256

Rank = tuple[int, int]
Place = tuple[str, str]
"""Model name and routing group."""


@dataclass(frozen=True, kw_only=True)  # No slots: it is mixed into the options of the services.
class ReplicaOptions:
    """Replica synchronization."""

    replica_sync_port: int | None = option(
        None, "--replica-sync-port", None, "ZMQ port of the event publisher for peers; 0 selects a free port"
    )
    replica_sync_peers: list[str] = option(
        [], "--replica-sync-peers", None, "ZMQ addresses of peers, separated by commas: tcp://host:port"
    )

    def __post_init__(self) -> None:
        if self.replica_sync_peers and self.replica_sync_port is None:
            raise ConfigError("--replica-sync-peers requires --replica-sync-port")
        for peer in self.replica_sync_peers:
            try:
                check_endpoint(peer)
            except InvalidArgument as error:
                raise ConfigError(f"--replica-sync-peers {peer}: {error}") from None


class ReplicaMessage(msgspec.Struct):
    """Event of one active request."""

    model_name: str
    routing_group: str
    block_size: int
    event: ActiveSequenceEvent


class AffinityMessage(msgspec.Struct):
    """Binding of one session."""

    model_name: str
    routing_group: str
    session_id: str
    worker_id: int
    dp_rank: int | None
    sequence: int
    writer_id: int


class Bindings(Protocol):
    """Store of session bindings."""

    def replica_bound(self, session: str, rank: Rank, place: Place, version: Version) -> None:
        """Apply a peer's session binding."""


class Books(Protocol):
    """Store of active requests."""

    def block_size(self, place: Place) -> int:
        """Return the block size of a model's workers; 0 for an unknown model."""

    def replica_added(self, request_id: str, rank: Rank, place: Place, added: AddedSequence) -> None:
        """Count a request that a peer placed on a rank."""

    def replica_prefilled(self, request_id: str, place: Place) -> None:
        """Record the first token of a peer's request."""

    def replica_freed(self, request_id: str, place: Place) -> None:
        """Record the end of a peer's request."""


class ReplicaPeerBody(msgspec.Struct):
    """Address of a peer."""

    endpoint: str


decode_message = msgpack_decoder(ReplicaMessage).decode
decode_binding = msgpack_decoder(AffinityMessage).decode


class ReplicaPeers:
    """Publisher of local events and subscriber to the events of peers."""

    def __init__(
        self, books: Books, peers: Sequence[str] = (), topic: str = TOPIC, bindings: Bindings | None = None
    ) -> None:
        """Store the arguments; `bindings` receives the session bindings of peers."""
        self.router_id = random.getrandbits(64)
        """Id in every published event, by which own events that return are recognized."""
        self.port = 0
        """Port of the publisher, available after `start`."""
        self._topic = topic.encode()
        self._books = books
        self._bindings = bindings
        self._peers = sorted({check_endpoint(peer) for peer in peers})
        self._tasks = TaskOwner("replica sync")
        self._context: Any = None
        self._out: Any = None
        self._in: Any = None
        self.unreadable = 0

    @property
    def peers(self) -> list[str]:
        """Return the addresses of the peers in order."""
        return list(self._peers)

    async def start(self, port: int) -> None:
        """Bind the publisher and connect to the peers. Raises `ConfigError` if the port is not available."""
        import zmq
        import zmq.asyncio

        self._context = zmq.asyncio.Context()
        self._out = self._context.socket(zmq.PUB)
        self._in = self._context.socket(zmq.SUB)
        for socket in (self._out, self._in):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, UNSENT_MAX)
            socket.setsockopt(zmq.RCVHWM, UNSENT_MAX)
        try:
            self._out.bind(f"tcp://0.0.0.0:{port}" if port else "tcp://0.0.0.0:*")
        except zmq.ZMQError as error:
            await self.close()
            raise listen_error(f"--replica-sync-port {port}", "0.0.0.0", error) from None  # noqa: S104 - a message
        self.port = int(self._out.getsockopt(zmq.LAST_ENDPOINT).decode().rpartition(":")[2].rstrip("\0"))
        self._in.subscribe(self._topic)
        if self._bindings is not None:
            self._in.subscribe(AFFINITY_TOPIC.encode())
        for peer in self._peers:
            self._in.connect(peer)
        self._tasks.supervise(self._listen, "peers")

    async def close(self) -> None:
        """Stop."""
        await self._tasks.cancel_and_wait()
        for socket in (self._out, self._in):
            if socket is not None:
                socket.close()
        if self._context is not None:
            self._context.term()

    def add_peer(self, endpoint: str) -> bool:
        """Subscribe to a peer; False if already subscribed. Raises `HttpError` for an invalid address."""
        try:
            check_endpoint(endpoint)
        except InvalidArgument as error:
            raise HttpError(400, str(error)) from None
        if endpoint in self._peers:
            return False
        if len(self._peers) >= PEERS_MAX:
            raise HttpError(409, f"cannot add a peer: the maximum of {PEERS_MAX} is reached")
        if self._in is not None:
            self._in.connect(endpoint)
        self._peers = sorted([*self._peers, endpoint])
        return True

    def remove_peer(self, endpoint: str) -> bool:
        """Unsubscribe from a peer; False if not subscribed."""
        if endpoint not in self._peers:
            return False
        self._peers.remove(endpoint)
        if self._in is not None:
            self._in.disconnect(endpoint)
        return True

    # Published events.

    def added(
        self, request_id: str, rank: Rank, place: Place, sequence_hashes: Sequence[int], prefill_tokens: int
    ) -> None:
        """Publish a request placed on a rank."""
        hint = PrefillLoadHint(prefill_tokens) if prefill_tokens else None
        hashes = [one & U64 for one in sequence_hashes]
        self._publish(request_id, rank, place, AddRequest(AddedSequence(hashes, prefill_tokens > 0, None, hint)))

    def prefilled(self, request_id: str, rank: Rank, place: Place) -> None:
        """Publish the first token of a request."""
        self._publish(request_id, rank, place, MARK_PREFILL_COMPLETED)

    def freed(self, request_id: str, rank: Rank, place: Place) -> None:
        """Publish the end of a request."""
        self._publish(request_id, rank, place, "Free")

    def bound(self, session: str, rank: Rank, place: Place, version: Version) -> None:
        """Publish a session's binding to a rank."""
        if self._out is not None:
            message = AffinityMessage(*place, session, *rank, *version)
            self._out.send_multipart([AFFINITY_TOPIC.encode(), msgpack_encode(message)])

    def _publish(self, request_id: str, rank: Rank, place: Place, data: Any) -> None:
        event = ActiveSequenceEvent(request_id, SequenceWorker(*rank), data, self.router_id)
        message = ReplicaMessage(*place, self._books.block_size(place), event)
        if self._out is not None:
            self._out.send_multipart([self._topic, msgpack_encode(message)])  # A PUB socket never blocks.

    # Received events.

    async def _listen(self) -> None:
        while True:
            self.apply(await self._in.recv_multipart())

    def apply(self, frames: Sequence[bytes]) -> None:
        """Apply one message of a peer; an unreadable one is dropped and counted."""
        try:
            if frames[0] == AFFINITY_TOPIC.encode():
                self._apply_binding(decode_binding(frames[-1]))
                return
            message = decode_message(frames[-1])
        except UNREADABLE as error:
            self.unreadable += 1
            logger.warning("unreadable message from a peer: %s", error)
            return
        event, place = message.event, (message.model_name, message.routing_group)
        if event.router_id == self.router_id or self._books.block_size(place) not in (0, message.block_size):
            return
        request_id = f"{event.router_id:x}/{event.request_id}"  # Request ids are unique per service only.
        if isinstance(event.data, AddRequest):
            rank = (event.worker.worker_id, event.worker.dp_rank)
            self._books.replica_added(request_id, rank, place, event.data.added)
        elif event.data == MARK_PREFILL_COMPLETED:
            self._books.replica_prefilled(request_id, place)
        else:
            self._books.replica_freed(request_id, place)

    def _apply_binding(self, message: AffinityMessage) -> None:
        if message.writer_id != self.router_id and self._bindings is not None:
            place = (message.model_name, message.routing_group)
            rank, version = (message.worker_id, message.dp_rank or 0), (message.sequence, message.writer_id)
            self._bindings.replica_bound(message.session_id, rank, place, version)


def add_peer_routes(routes: JsonRoutes, peers: ReplicaPeers | None) -> None:
    """Add the routes `/replica_sync/…`; without `peers` they report that replica sync is disabled."""

    def some() -> ReplicaPeers:
        if peers is None:
            raise HttpError(409, "replica sync is disabled")
        return peers

    async def register(call: HttpCall[ReplicaPeerBody]) -> tuple[int, Any]:
        return (201 if some().add_peer(call.body.endpoint) else 200), {"status": "ok"}

    async def deregister(call: HttpCall[ReplicaPeerBody]) -> tuple[int, Any]:
        if not some().remove_peer(call.body.endpoint):
            raise HttpError(404, "peer not found")
        return 200, {"status": "ok"}

    async def shown(call: HttpCall[None]) -> tuple[int, Any]:
        return 200, [] if peers is None else peers.peers

    routes.add("GET", "/replica_sync/peers", shown)
    routes.add("POST", "/replica_sync/register_peer", register, ReplicaPeerBody)
    routes.add("POST", "/replica_sync/deregister_peer", deregister, ReplicaPeerBody)
