"""A worker copies blocks from another one, and computes them where that fails; loopback and threads, no other process."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.settle import until_blocking

from dynamo.kvbm import peers
from dynamo.kvbm.config import KvbmConfig
from dynamo.kvbm.logical.blocks import BlockIdentity, Tier
from dynamo.kvbm.manager import BlockManager
from dynamo.kvbm.orders import LoadTicket, Outgoing, Peer
from dynamo.kvbm.physical.layout import BlockLayout
from dynamo.kvbm.transfer.base import SourceUnreachable
from dynamo.kvbm.transfer.tcp import TcpPuller

LAYOUT = BlockLayout((2, 300), "float32", "model")
PATIENCE_S = 20.0
Make = Callable[..., BlockManager]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[BlockManager] = []

    def begin(layout: BlockLayout = LAYOUT, **options: Any) -> BlockManager:
        given = {"cpu_blocks": 16, "has_peers": True, "peer_host": "127.0.0.1", "onboard_timeout_s": PATIENCE_S}
        manager = BlockManager(KvbmConfig(**(given | options)), layout)
        made.append(manager)
        manager.start()
        return manager

    yield begin
    for manager in made:
        manager.close()
        manager.validate()
    for manager in made:
        assert manager.book.host.held() == 0, "a block is held without a live holder"


def block(key: int) -> BlockIdentity:
    return BlockIdentity(key, key + 1000, key - 1 if key > 1 else None)


def offload(manager: BlockManager, *keys: int) -> None:
    manager.offload([Outgoing(block(key), partial(np.copyto, src=np.float32(key))) for key in keys])


def fetched(manager: BlockManager, address: str, *keys: int) -> list[int]:
    """Return how much of a prefix arrived, checked byte by byte."""
    ticket: LoadTicket | None = manager.begin([block(key) for key in keys], Peer(address, len(keys)))
    assert ticket is not None
    until_blocking(lambda: manager.is_over(ticket), "the ticket never ended")
    slots = manager.find(keys)
    manager.end(ticket)
    for slot, key in zip(slots, keys, strict=False):
        np.testing.assert_array_equal(manager.array(slot), np.full(LAYOUT.shape, key, np.float32))
    manager.release(slots)
    return list(keys[: len(slots)])


def address_of(manager: BlockManager) -> str:
    assert manager.peer_address is not None
    return manager.peer_address


@pytest.mark.parametrize("is_shared", [True, False])
def test_kv_peer_prefix_is_copied_from_the_peer_that_caches_it(
    make: Make, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    one, other = make(), make()
    if not is_shared:
        assert other._io.peers is not None
        members = other._io.peers._puller._members
        for transport in [one for one, member in members.items() if not isinstance(member, TcpPuller)]:
            monkeypatch.delitem(members, transport)
    offload(one, 1, 2, 3)
    assert fetched(other, address_of(one), 1, 2, 3) == [1, 2, 3]
    assert other.book.counts.onboarded[Tier.PEER] == 3
    assert fetched_again(other)


def fetched_again(manager: BlockManager) -> bool:
    """Return whether copied blocks now belong to the worker's own cache."""
    return manager.begin([block(1), block(2)], None) is None


def test_kv_peer_with_fewer_blocks_sends_those_it_has(make: Make) -> None:
    one, other = make(), make()
    offload(one, 1, 2)
    assert fetched(other, address_of(one), 1, 2, 3, 4) == [1, 2]


def test_kv_peer_does_not_send_blocks_cached_locally(make: Make) -> None:
    one, other = make(), make()
    offload(one, 1, 2, 3)
    offload(other, 1, 2)
    assert fetched(other, address_of(one), 1, 2, 3) == [1, 2, 3]
    assert other.book.counts.onboarded[Tier.PEER] == 1


def test_kv_peer_of_another_model_sends_nothing(make: Make) -> None:
    one, other = make(BlockLayout((2, 300), "float32", "another model")), make()
    offload(one, 1)
    assert fetched(other, address_of(one), 1) == []


def test_kv_peer_sends_only_to_workers_with_equal_weights(make: Make) -> None:
    one, other, third = make(), make(), make(BlockLayout((2, 300), "float32", "new"))
    offload(one, 1)
    one.reidentify("new")
    offload(one, 1)
    assert fetched(other, address_of(one), 1) == []
    assert fetched(third, address_of(one), 1) == [1]
    offload(other, 2)
    other.reidentify("new")
    assert fetched(other, address_of(one), 1) == [1]


def test_kv_peer_that_left_sends_nothing(make: Make) -> None:
    one, other = make(), make()
    offload(one, 1)
    address = address_of(one)
    one.close()
    assert fetched(other, address, 1) == []
    assert other.traffic.peer_failures == 1


def test_kv_peer_that_is_silent_sends_nothing(make: Make) -> None:
    other = make(onboard_timeout_s=0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert fetched(other, f"127.0.0.1:{silent.getsockname()[1]}", 1) == []


@pytest.mark.parametrize("message", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x02xx", b"\xff\xff\xff\xff"])
def test_kv_peer_survives_malformed_requests(make: Make, message: bytes) -> None:
    one, other = make(), make()
    offload(one, 1)
    host, port = address_of(one).split(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as link:
        link.settimeout(PATIENCE_S)
        with contextlib.suppress(OSError):  # The message was not read to its end.
            link.sendall(message)
            link.shutdown(socket.SHUT_WR)
            assert link.recv(10) == b""
    assert fetched(other, address_of(one), 1) == [1]


def test_kv_peer_address_is_absent_when_disabled(make: Make) -> None:
    alone = make(has_peers=False)
    assert alone.peer_address is None
    assert alone.begin([block(1)], Peer("127.0.0.1:1", 1)) is None


def test_peer_server_closes_connections_beyond_its_bound(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PENDING_MAX", 2)
    one, other = make(), make()
    offload(one, 1)
    host, port = address_of(one).split(":")
    with contextlib.ExitStack() as links:
        waiting = [links.enter_context(socket.create_connection((host, int(port)), PATIENCE_S)) for _ in range(2)]
        refused = links.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
        assert refused.recv(1) == b""
        for link in waiting:
            link.close()
    deadline = time.monotonic() + PATIENCE_S
    while fetched(other, address_of(one), 1) != [1]:
        assert time.monotonic() < deadline, "no connection is served any more"


def test_peer_server_listens_on_loopback_unless_clients_are_verified(make: Make) -> None:
    assert address_of(make(peer_host="")).startswith("127.0.0.1:")


def test_peer_whose_lease_cannot_be_released_still_gives_its_blocks(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = make(), make()
    offload(one, 1)
    assert other._io.peers is not None

    def fail(descriptor: object) -> None:
        raise SourceUnreachable("gone")

    with monkeypatch.context() as broken:
        broken.setattr(other._io.peers._puller, "release", fail)
        assert fetched(other, address_of(one), 1) == [1]
