"""ReplicaPeers: services that count load tell each other what they count, over ZMQ (serving-plane.md §4.12).

    add · prefill complete · free ──PUB──▶ every peer's SUB ──▶ its own books

    session ─▶ rank ──PUB──▶ every peer's SUB ──▶ its sessions, where it keeps some

Messages are upstream's: topic, then a msgpack map of model, group, block size and one `ActiveSequenceEvent`, or, on a topic of
its own, of one session's binding. They are a best effort: what a slow peer misses is not told again, and a fresh one begins
with nothing.
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

TOPIC = "dynamo.slot-tracker.v1"  # Slot trackers and selection services hear each other.
AFFINITY_TOPIC = "dynamo.session-affinity.v1"
UNSENT_MAX = 10_000  # Messages that wait for a slow peer; more are dropped, the newest first.
PEERS_MAX = 256

Rank = tuple[int, int]
Place = tuple[str, str]
"""Model and routing group."""


@dataclass(frozen=True, kw_only=True)  # No slots: it is mixed into the options of those who count.
class ReplicaOptions:
    """Who else counts the same."""

    replica_sync_port: int | None = option(
        None, "--replica-sync-port", None, "ZMQ port where peers hear what is counted here; 0 lets the system choose"
    )
    replica_sync_peers: list[str] = option(
        [], "--replica-sync-peers", None, "ZMQ addresses of peers, separated by commas: tcp://host:port"
    )

    def __post_init__(self) -> None:
        if self.replica_sync_peers and self.replica_sync_port is None:
            raise ConfigError("--replica-sync-peers needs --replica-sync-port: peers tell each other")
        for peer in self.replica_sync_peers:
            try:
                check_endpoint(peer)
            except InvalidArgument as error:
                raise ConfigError(f"--replica-sync-peers {peer}: {error}") from None


class ReplicaMessage(msgspec.Struct):
    """What one service tells the others."""

    model_name: str
    routing_group: str
    block_size: int
    event: ActiveSequenceEvent


class AffinityMessage(msgspec.Struct):
    """Where one of its sessions goes."""

    model_name: str
    routing_group: str
    session_id: str
    worker_id: int
    dp_rank: int | None
    sequence: int
    writer_id: int


class Bindings(Protocol):
    """Who keeps sessions."""

    def replica_bound(self, session: str, rank: Rank, place: Place, version: Version) -> None:
        """A peer gave a session to a rank."""


class Books(Protocol):
    """Who counts."""

    def block_size(self, place: Place) -> int:
        """That of a model's workers; 0 for an unknown model."""

    def replica_added(self, request_id: str, rank: Rank, place: Place, added: AddedSequence) -> None:
        """A peer gave a request to a rank."""

    def replica_prefilled(self, request_id: str, place: Place) -> None:
        """A peer's request has its first token."""

    def replica_freed(self, request_id: str, place: Place) -> None:
        """A peer's request ended."""


class PeerBody(msgspec.Struct):
    """A peer."""

    endpoint: str


decode_message = msgpack_decoder(ReplicaMessage).decode
decode_binding = msgpack_decoder(AffinityMessage).decode


class ReplicaPeers:
    """Tells peers what is counted here, and hears what they count."""

    def __init__(
        self, books: Books, peers: Sequence[str] = (), topic: str = TOPIC, bindings: Bindings | None = None
    ) -> None:
        """`bindings`: who wants to hear of sessions."""
        self.router_id = random.getrandbits(64)
        """Our own events are known by it, should they come back."""
        self.port = 0
        """Where peers hear us, once it has started."""
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
        """Whom we hear, in order."""
        return list(self._peers)

    async def start(self, port: int) -> None:
        """Binds, and connects to the peers. Raises `ConfigError` for a port that cannot be had."""
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
        """Ends."""
        await self._tasks.cancel_and_wait()
        for socket in (self._out, self._in):
            if socket is not None:
                socket.close()
        if self._context is not None:
            self._context.term()

    def add_peer(self, endpoint: str) -> bool:
        """Hears one more; False where it is heard already. Raises `HttpError` for what is no address."""
        try:
            check_endpoint(endpoint)
        except InvalidArgument as error:
            raise HttpError(400, str(error)) from None
        if endpoint in self._peers:
            return False
        if len(self._peers) >= PEERS_MAX:
            raise HttpError(409, f"there are {PEERS_MAX} peers already")
        if self._in is not None:
            self._in.connect(endpoint)
        self._peers = sorted([*self._peers, endpoint])
        return True

    def remove_peer(self, endpoint: str) -> bool:
        """Hears it no more; False where it was not heard."""
        if endpoint not in self._peers:
            return False
        self._peers.remove(endpoint)
        if self._in is not None:
            self._in.disconnect(endpoint)
        return True

    # What is counted here.

    def added(
        self, request_id: str, rank: Rank, place: Place, sequence_hashes: Sequence[int], prefill_tokens: int
    ) -> None:
        """A request was given to a rank."""
        hint = PrefillLoadHint(prefill_tokens) if prefill_tokens else None
        hashes = [one & U64 for one in sequence_hashes]
        self._tell(request_id, rank, place, AddRequest(AddedSequence(hashes, prefill_tokens > 0, None, hint)))

    def prefilled(self, request_id: str, rank: Rank, place: Place) -> None:
        """It has its first token."""
        self._tell(request_id, rank, place, MARK_PREFILL_COMPLETED)

    def freed(self, request_id: str, rank: Rank, place: Place) -> None:
        """It ended."""
        self._tell(request_id, rank, place, "Free")

    def bound(self, session: str, rank: Rank, place: Place, version: Version) -> None:
        """A session was given to a rank."""
        if self._out is not None:
            message = AffinityMessage(*place, session, *rank, *version)
            self._out.send_multipart([AFFINITY_TOPIC.encode(), msgpack_encode(message)])

    def _tell(self, request_id: str, rank: Rank, place: Place, data: Any) -> None:
        event = ActiveSequenceEvent(request_id, SequenceWorker(*rank), data, self.router_id)
        message = ReplicaMessage(*place, self._books.block_size(place), event)
        if self._out is not None:
            self._out.send_multipart([self._topic, msgpack_encode(message)])  # A PUB socket never waits.

    # What is heard.

    async def _listen(self) -> None:
        while True:
            self.hear(await self._in.recv_multipart())

    def hear(self, frames: Sequence[bytes]) -> None:
        """One message of a peer; one that cannot be read is counted and left out."""
        try:
            if frames[0] == AFFINITY_TOPIC.encode():
                self._hear_binding(decode_binding(frames[-1]))
                return
            message = decode_message(frames[-1])
        except UNREADABLE as error:
            self.unreadable += 1
            logger.warning("a message of a peer cannot be read: %s", error)
            return
        event, place = message.event, (message.model_name, message.routing_group)
        if event.router_id == self.router_id or self._books.block_size(place) not in (0, message.block_size):
            return
        request_id = f"{event.router_id:x}/{event.request_id}"  # Two services may name theirs alike.
        if isinstance(event.data, AddRequest):
            rank = (event.worker.worker_id, event.worker.dp_rank)
            self._books.replica_added(request_id, rank, place, event.data.added)
        elif event.data == MARK_PREFILL_COMPLETED:
            self._books.replica_prefilled(request_id, place)
        else:
            self._books.replica_freed(request_id, place)

    def _hear_binding(self, message: AffinityMessage) -> None:
        if message.writer_id != self.router_id and self._bindings is not None:
            place = (message.model_name, message.routing_group)
            rank, version = (message.worker_id, message.dp_rank or 0), (message.sequence, message.writer_id)
            self._bindings.replica_bound(message.session_id, rank, place, version)


def add_peer_routes(routes: JsonRoutes, peers: ReplicaPeers | None) -> None:
    """`/replica_sync/…`; without peers they say that nothing is told."""

    def some() -> ReplicaPeers:
        if peers is None:
            raise HttpError(409, "replica sync is disabled")
        return peers

    async def register(call: HttpCall[PeerBody]) -> tuple[int, Any]:
        return (201 if some().add_peer(call.body.endpoint) else 200), {"status": "ok"}

    async def deregister(call: HttpCall[PeerBody]) -> tuple[int, Any]:
        if not some().remove_peer(call.body.endpoint):
            raise HttpError(404, "peer not found")
        return 200, {"status": "ok"}

    async def shown(call: HttpCall[None]) -> tuple[int, Any]:
        return 200, [] if peers is None else peers.peers

    routes.add("GET", "/replica_sync/peers", shown)
    routes.add("POST", "/replica_sync/register_peer", register, PeerBody)
    routes.add("POST", "/replica_sync/deregister_peer", deregister, PeerBody)
