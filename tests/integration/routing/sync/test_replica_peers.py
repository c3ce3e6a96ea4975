"""Replica peers over ZMQ sockets."""

from tests.settle import repeat
from tests.unit.routing.sync.test_replica_peers import PLACE, Books, Sessions

from dynamo.routing.sync.replica_peers import ReplicaPeers


async def test_replica_peers_send_sessions_and_requests_over_one_socket() -> None:
    first = ReplicaPeers(Books(), bindings=Sessions())
    await first.start(0)
    sessions, books = Sessions(), Books()
    second = ReplicaPeers(books, [f"tcp://127.0.0.1:{first.port}"], bindings=sessions)
    await second.start(0)
    try:

        def publish() -> None:
            first.bound("s", (3, 1), PLACE, (4, first.router_id))
            first.freed("a", (3, 1), PLACE)

        await repeat(publish, lambda: sessions.received and books.received)
    finally:
        await first.close()
        await second.close()
    assert sessions.received[0] == ("s", (3, 1), PLACE, (4, first.router_id))
