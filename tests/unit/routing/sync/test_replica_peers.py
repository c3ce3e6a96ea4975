"""Services that count load exchange it with each other."""

import msgspec
import pytest
from tests.asgi import request_json

from dynamo.core.config import load
from dynamo.core.errors import ConfigError, HttpError
from dynamo.protocols.active_sequences import AddedSequence
from dynamo.routing.sync.replica_peers import AFFINITY_TOPIC, ReplicaOptions, ReplicaPeers, add_peer_routes
from dynamo.runtime.json_service import JsonRoutes

PLACE = ("m", "default")


class Books:
    """The messages received."""

    def __init__(self, block_size: int = 4) -> None:
        self.received: list[tuple[object, ...]] = []
        self.size = block_size

    def block_size(self, place: tuple[str, str]) -> int:
        return self.size

    def replica_added(
        self, request_id: str, rank: tuple[int, int], place: tuple[str, str], added: AddedSequence
    ) -> None:
        self.received.append(("added", request_id, rank, place, added.token_sequence))

    def replica_prefilled(self, request_id: str, place: tuple[str, str]) -> None:
        self.received.append(("prefilled", request_id, place))

    def replica_freed(self, request_id: str, place: tuple[str, str]) -> None:
        self.received.append(("freed", request_id, place))


def message_frames(data: object, router_id: int = 5, block_size: int = 4) -> list[bytes]:
    """A message as the released service writes it."""
    event = {"request_id": "a", "worker": {"worker_id": 1, "dp_rank": 0}, "data": data, "router_id": router_id}
    message = {"model_name": "m", "routing_group": "default", "block_size": block_size, "event": event}
    return [b"t", msgspec.msgpack.encode(message)]


ADDED = {
    "AddRequest": {
        "token_sequence": [1, (1 << 64) - 3],
        "track_prefill_tokens": True,
        "expected_output_tokens": None,
        "prefill_load_hint": {"initial_effective_prefill_tokens": 12, "expected_prefill_duration": None},
    }
}


def test_replica_peers_apply_events_under_the_peers_id() -> None:
    books = Books()
    peers = ReplicaPeers(books)
    for data in (ADDED, "MarkPrefillCompleted", "Free"):
        peers.apply(message_frames(data))
    assert books.received == [
        ("added", "5/a", (1, 0), PLACE, [1, (1 << 64) - 3]),
        ("prefilled", "5/a", PLACE),
        ("freed", "5/a", PLACE),
    ]


def test_replica_peers_ignore_own_events_other_block_sizes_and_malformed_messages() -> None:
    books = Books()
    peers = ReplicaPeers(books)
    peers.apply(message_frames(ADDED, peers.router_id))
    peers.apply(message_frames(ADDED, block_size=8))
    peers.apply([b"t", b"\xc1"])
    assert books.received == []
    assert peers.unreadable == 1


async def test_replica_peers_are_added_and_removed_over_http() -> None:
    routes, peers = JsonRoutes(), ReplicaPeers(Books(), ["tcp://b:2"])
    add_peer_routes(routes, peers)

    async def send_request(path: str, body: bytes = b"", method: str = "POST") -> tuple[int, object]:
        headers = {"content-type": "application/json"}
        return await request_json(routes.application(), method, "/replica_sync/" + path, body, headers)

    peer = b'{"endpoint": "tcp://a:1"}'
    assert await send_request("register_peer", peer) == (201, {"status": "ok"})
    assert await send_request("register_peer", peer) == (200, {"status": "ok"})
    assert await send_request("peers", method="GET") == (200, ["tcp://a:1", "tcp://b:2"])
    assert await send_request("deregister_peer", peer) == (200, {"status": "ok"})
    assert (await send_request("deregister_peer", peer))[0] == 404
    assert (await send_request("register_peer", b'{"endpoint": "bogus"}'))[0] == 400


async def test_replica_peers_without_port_publish_no_events() -> None:
    routes = JsonRoutes()
    add_peer_routes(routes, None)
    headers = {"content-type": "application/json"}
    application, peer = routes.application(), b'{"endpoint": "tcp://a:1"}'
    assert await request_json(application, "GET", "/replica_sync/peers") == (200, [])
    status, _ = await request_json(application, "POST", "/replica_sync/register_peer", peer, headers)
    assert status == 409


def test_replica_peers_error_names_contradictory_options() -> None:
    with pytest.raises(ConfigError, match="--replica-sync-port"):
        load(ReplicaOptions, ["--replica-sync-peers", "tcp://a:1"], {})
    with pytest.raises(ConfigError, match="bogus"):
        load(ReplicaOptions, ["--replica-sync-port", "0", "--replica-sync-peers", "bogus"], {})


def test_replica_peers_are_bounded() -> None:
    peers = ReplicaPeers(Books(), [f"tcp://a:{port}" for port in range(1, 257)])
    with pytest.raises(HttpError, match="maximum of 256"):
        peers.add_peer("tcp://b:1")


class Sessions:
    """The session messages received."""

    def __init__(self) -> None:
        self.received: list[tuple[object, ...]] = []

    def replica_bound(
        self, session: str, rank: tuple[int, int], place: tuple[str, str], version: tuple[int, int]
    ) -> None:
        self.received.append((session, rank, place, version))


def binding(writer_id: int = 7, dp_rank: int | None = 1) -> list[bytes]:
    """A binding as the released service writes it."""
    message = {
        "model_name": "m", "routing_group": "default", "session_id": "s", "worker_id": 3, "dp_rank": dp_rank,
        "sequence": 9, "writer_id": writer_id,
    }  # fmt: skip
    return [AFFINITY_TOPIC.encode(), msgspec.msgpack.encode(message)]


def test_replica_peers_deliver_session_bindings_to_their_handler() -> None:
    books, sessions = Books(), Sessions()
    peers = ReplicaPeers(books, bindings=sessions)

    peers.apply(binding())
    peers.apply(binding(dp_rank=None))
    peers.apply(binding(writer_id=peers.router_id))
    peers.apply([AFFINITY_TOPIC.encode(), b"\xc1"])
    ReplicaPeers(books).apply(binding())

    assert sessions.received == [("s", (3, 1), PLACE, (9, 7)), ("s", (3, 0), PLACE, (9, 7))]
    assert books.received == [] and peers.unreadable == 1
