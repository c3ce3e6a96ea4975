"""Contract of KV transfer transports."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.certificates import Certificates

from dynamo.kvbm.transfer import nixl, wire
from dynamo.kvbm.transfer.base import (
    Deadline,
    Descriptor,
    Layout,
    LayoutMismatch,
    NotHeld,
    PullMember,
    Region,
    SourceUnreachable,
    TransferAborted,
    TransferError,
    TransferTimeout,
)
from dynamo.kvbm.transfer.local import LocalPuller, LocalSource
from dynamo.kvbm.transfer.nixl import NixlAgent, NixlPuller
from dynamo.kvbm.transfer.puller import Puller
from dynamo.kvbm.transfer.shared import SharedMemoryPages, SharedMemoryPuller
from dynamo.kvbm.transfer.source import SourceOptions, TransferSource
from dynamo.kvbm.transfer.tcp import TcpPuller
from dynamo.runtime.request_plane.tcp.tls import TcpTls, TcpTlsFiles

WAIT_S = 20.0
LAYOUT = Layout(model="m-1", dtype="float32", item_bytes=4, block_tokens=4, layers=3, kv_heads=2, head_dim=8)
BLOCKS = 12
MEMBERS = ["local", "shm", "tcp", "tcp+tls", "tcp+digest", "nixl"]


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


class Ends:
    """A source with random blocks, and a puller with an empty region."""

    def __init__(self, kind: str, folder: Path, *, blocks_max: int = 100, ttl_s: float = 60.0) -> None:
        rng = np.random.default_rng(3)
        size = BLOCKS * LAYOUT.block_bytes
        pages = SharedMemoryPages(size) if kind == "shm" else None
        memory = np.zeros(size, np.uint8) if pages is None else pages.array
        memory[:] = rng.integers(0, 256, size, dtype=np.uint8)
        self.there = Region(LAYOUT, memory)
        self.here = Region(LAYOUT, np.zeros(2 * size, np.uint8))
        self.freed: list[list[int]] = []
        self.guard = threading.Lock()
        self.closers: list[Callable[[], None]] = []
        members: list[PullMember]
        if kind == "local":
            local = LocalSource(self.there, self._free, blocks_max=blocks_max, ttl_s=ttl_s)
            self.source: Any = local
            members = [LocalPuller(self.here, local)]
        else:
            tls = _tls(folder) if kind == "tcp+tls" else TcpTls()
            options = SourceOptions(host="127.0.0.1", blocks_max=blocks_max, ttl_s=ttl_s, tls=tls)
            agent = NixlAgent(self.there) if kind == "nixl" else None
            self.source = TransferSource(
                self.there, self._free, options, pages=pages, agent=agent, is_tcp_offered=kind.startswith("tcp")
            )
            tcp = TcpPuller(self.here, tls, is_checked=kind == "tcp+digest")
            members = [tcp]
            if kind == "shm":
                members = [SharedMemoryPuller(self.here)]
            elif kind == "nixl":
                mine = NixlAgent(self.here)
                members = [NixlPuller(mine, tcp)]
                self.closers.append(mine.close)
            self.closers.append(tcp.close)
        self.member = members[0]
        self.puller = Puller(self.here, members)
        self.source.start()

    def _free(self, blocks: Any) -> None:
        with self.guard:
            self.freed.append(list(blocks))

    def pull(self, descriptor: Descriptor, pairs: list[tuple[int, int]], seconds: float = WAIT_S) -> Any:
        return self.puller.pull(descriptor, pairs, Deadline.after(seconds, stall_s=WAIT_S))

    def close(self) -> None:
        self.puller.close()
        self.source.close()
        for close in self.closers:
            close()


def _tls(folder: Path) -> TcpTls:
    files = Certificates(folder)
    return TcpTls.load(
        TcpTlsFiles(
            cert_path=files.cert,
            key_path=files.key,
            ca_cert_path=files.ca,
            client_cert_path=files.client_cert,
            client_key_path=files.client_key,
            client_ca_cert_path=files.ca,
        )
    )


@pytest.fixture
def open_ends(tmp_path: Path) -> Iterator[Callable[..., Ends]]:
    opened: list[Ends] = []

    def make(kind: str, **options: Any) -> Ends:
        if kind == "nixl" and not nixl.is_available():
            pytest.skip("nixl is not installed")
        ends = Ends(kind, tmp_path, **options)
        opened.append(ends)
        return ends

    yield make
    for ends in opened:
        ends.close()


@pytest.fixture(params=MEMBERS)
def ends(request: pytest.FixtureRequest, open_ends: Callable[..., Ends]) -> Ends:
    return open_ends(request.param)


@pytest.fixture(params=["shm", "tcp"])
def small(request: pytest.FixtureRequest, open_ends: Callable[..., Ends]) -> Ends:
    """Return a source that holds at most four blocks."""
    return open_ends(request.param, blocks_max=4)


def test_pulled_blocks_are_equal_in_any_destination_slots(ends: Ends) -> None:
    blocks = [3, 4, 5, 11, 0, 7]
    descriptor = ends.source.publish(blocks)
    into = [20, 21, 1, 2, 9, 8]
    pulled = ends.pull(descriptor, list(enumerate(into)))
    assert pulled.bytes == len(blocks) * LAYOUT.block_bytes
    assert (ends.here.pages[:, into] == ends.there.pages[:, blocks]).all()
    untouched = [block for block in range(ends.here.blocks) if block not in into]
    assert not ends.here.pages[:, untouched].any()


def test_subset_of_the_blocks_can_be_pulled(ends: Ends) -> None:
    descriptor = ends.source.publish([1, 2, 3, 4])
    ends.pull(descriptor, [(2, 0), (3, 5)])
    assert (ends.here.pages[:, [0, 5]] == ends.there.pages[:, [3, 4]]).all()


def test_descriptor_round_trips_through_plain_values(ends: Ends) -> None:
    descriptor = ends.source.publish([8, 9])
    for codec in (msgspec.json, msgspec.msgpack):
        read = Descriptor.read(codec.decode(codec.encode(descriptor.to_builtins())))
        assert read == descriptor
    ends.pull(read, [(0, 0), (1, 1)])
    assert (ends.here.pages[:, :2] == ends.there.pages[:, 8:10]).all()


def test_released_blocks_are_freed_once_and_cannot_be_pulled(ends: Ends) -> None:
    descriptor = ends.source.publish([1, 2])
    ends.pull(descriptor, [(0, 0), (1, 1)])
    ends.puller.release(descriptor)
    until(lambda: ends.freed == [[1, 2]], "the blocks were not freed")
    assert ends.source.held == 0
    assert ends.source.pulled == 1
    with pytest.raises(NotHeld):
        ends.pull(descriptor, [(0, 0)])
    ends.puller.release(descriptor)
    assert ends.freed == [[1, 2]]


def test_concurrent_pulls_succeed(ends: Ends) -> None:
    descriptors = [ends.source.publish([first, first + 1]) for first in range(0, BLOCKS, 2)]
    failures: list[BaseException] = []

    def pull(place: int, descriptor: Descriptor) -> None:
        try:
            ends.pull(descriptor, [(0, 2 * place), (1, 2 * place + 1)])
            ends.puller.release(descriptor)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=pull, args=one) for one in enumerate(descriptors)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert failures == []
    assert (ends.here.pages[:, :BLOCKS] == ends.there.pages).all()
    until(lambda: ends.source.held == 0, "blocks are still held")


@pytest.mark.parametrize("field", ["model", "dtype", "block_tokens", "layers"])
def test_different_layout_is_refused_with_its_name(ends: Ends, field: str) -> None:
    descriptor = ends.source.publish([1])
    other: Any = {"model": "m-2", "dtype": "bfloat16", "block_tokens": 8, "layers": 4}
    wrong = msgspec.structs.replace(descriptor, layout=msgspec.structs.replace(LAYOUT, **{field: other[field]}))
    with pytest.raises(LayoutMismatch, match=f"{field} is {other[field]!r} at the source"):
        ends.pull(wrong, [(0, 0)])


def test_guessed_transfer_id_is_refused(ends: Ends) -> None:
    descriptor = ends.source.publish([1, 2])
    guessed = msgspec.structs.replace(descriptor, transfer_id="0" * 32)
    with pytest.raises(NotHeld):
        ends.pull(guessed, [(0, 0)])
    assert ends.source.held == 2


def test_aborted_pull_ends_at_once(ends: Ends) -> None:
    descriptor = ends.source.publish([1, 2])
    deadline = Deadline.after(WAIT_S)
    deadline.aborted.set()
    with pytest.raises(TransferAborted):
        ends.puller.pull(descriptor, [(0, 0)], deadline)


def test_passed_deadline_is_a_timeout(ends: Ends) -> None:
    descriptor = ends.source.publish([1, 2])
    with pytest.raises(TransferTimeout):
        ends.pull(descriptor, [(0, 0)], 0.0)


def test_closed_source_frees_all_blocks(ends: Ends) -> None:
    descriptor = ends.source.publish([1, 2])
    ends.source.close()
    assert ends.freed == [[1, 2]]
    with pytest.raises(TransferError):
        ends.pull(descriptor, [(0, 0)])


def test_unpulled_blocks_are_freed_at_their_deadline(open_ends: Callable[..., Ends]) -> None:
    for kind in ("shm", "tcp"):
        ends = open_ends(kind, ttl_s=0.05)
        descriptor = ends.source.publish([1, 2])
        until(lambda ends=ends: ends.freed == [[1, 2]], "the blocks were never freed")  # type: ignore[misc]
        assert ends.source.expired == 1
        with pytest.raises(NotHeld):
            ends.pull(descriptor, [(0, 0)])


def test_source_frees_the_oldest_blocks_when_the_limit_is_exceeded(small: Ends) -> None:
    first, second = small.source.publish([1, 2]), small.source.publish([3, 4])
    third = small.source.publish([5, 6])
    assert small.freed == [[1, 2]]
    with pytest.raises(NotHeld):
        small.pull(first, [(0, 0)])
    small.pull(second, [(0, 0)])
    small.pull(third, [(0, 1)])
    assert (small.here.pages[:, :2] == small.there.pages[:, [3, 5]]).all()
    assert small.source.publish([1, 2, 3, 4, 5]) is None


def test_shared_memory_transfer_refuses_a_source_on_another_machine(open_ends: Callable[..., Ends]) -> None:
    ends = open_ends("shm")
    descriptor = ends.source.publish([1])
    (offer,) = descriptor.offers
    other_machine = msgspec.structs.replace(offer, address="dynamo-kv-of-another-machine")
    with pytest.raises(SourceUnreachable):
        ends.pull(msgspec.structs.replace(descriptor, offers=[other_machine]), [(0, 0)])


def test_shared_memory_is_refused_to_other_users(
    open_ends: Callable[..., Ends], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The descriptor opens the whole cache, not only the blocks of the lease."""
    ends = open_ends("shm")
    descriptor = ends.source.publish([1])
    (offer,) = descriptor.offers
    monkeypatch.setattr("dynamo.kvbm.transfer.accepting.user_id", lambda: os.geteuid() + 1)
    with pytest.raises(SourceUnreachable, match="another user"):
        ends.pull(descriptor, [(0, 0)])
    with socket.socket(socket.AF_UNIX) as link:  # The puller does not check; the source does.
        link.settimeout(WAIT_S)
        link.connect(f"\0{offer.address}")
        with pytest.raises(SourceUnreachable):
            wire.request(link, wire.Map(descriptor.transfer_id), Deadline.after(WAIT_S, stall_s=WAIT_S))
    assert ends.source.held == 1


def test_tcp_lease_grants_its_own_blocks_alone(open_ends: Callable[..., Ends]) -> None:
    ends = open_ends("tcp")
    descriptor = ends.source.publish([1, 2])
    (offer,) = descriptor.offers
    host, port = offer.address.rsplit(":", 1)
    for places in ([2], [-1], [0, BLOCKS]):
        with (
            socket.create_connection((host, int(port)), WAIT_S) as link,
            pytest.raises(TransferError, match="outside the transfer"),
        ):
            wire.request(link, wire.Pull(descriptor.transfer_id, places, 1), Deadline.after(WAIT_S, stall_s=WAIT_S))
    for question in (wire.Map(descriptor.transfer_id), wire.Agent(descriptor.transfer_id)):
        with socket.create_connection((host, int(port)), WAIT_S) as link, pytest.raises(TransferError, match="offer"):
            wire.request(link, question, Deadline.after(WAIT_S, stall_s=WAIT_S))


def test_lease_is_released_by_the_next_transport_when_the_first_fails(open_ends: Callable[..., Ends]) -> None:
    ends = open_ends("tcp")
    descriptor = ends.source.publish([1])
    (offer,) = descriptor.offers
    closed = msgspec.structs.replace(offer, transport="shm", address="dynamo-kv-of-another-machine", slot=0)
    puller = Puller(ends.here, [SharedMemoryPuller(ends.here), TcpPuller(ends.here)])
    puller.release(msgspec.structs.replace(descriptor, offers=[closed, offer]))
    until(lambda: ends.source.held == 0, "the lease was not released")
    puller.close()


def test_next_transport_is_tried_when_one_is_closed(open_ends: Callable[..., Ends]) -> None:
    ends = open_ends("tcp")
    descriptor = ends.source.publish([1])
    (offer,) = descriptor.offers
    closed = msgspec.structs.replace(offer, transport="shm", address="dynamo-kv-of-another-machine", slot=0)
    puller = Puller(ends.here, [SharedMemoryPuller(ends.here), TcpPuller(ends.here)])
    pulled = puller.pull(
        msgspec.structs.replace(descriptor, offers=[closed, offer]), [(0, 0)], Deadline.after(WAIT_S, stall_s=WAIT_S)
    )
    assert pulled.transport.value == "tcp"
    assert (ends.here.pages[:, 0] == ends.there.pages[:, 1]).all()
    puller.close()


def test_unresponsive_source_delays_only_the_first_pull(
    open_ends: Callable[..., Ends], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.kvbm.transfer.puller.SUSPECT_S", WAIT_S)
    ends = open_ends("tcp")
    descriptor = ends.source.publish([1])
    silent = socket.create_server(("127.0.0.1", 0))
    offer = msgspec.structs.replace(descriptor.offers[0], address=f"127.0.0.1:{silent.getsockname()[1]}")
    stalled = msgspec.structs.replace(descriptor, offers=[offer])
    with pytest.raises(TransferTimeout):
        ends.puller.pull(stalled, [(0, 0)], Deadline.after(WAIT_S, stall_s=0.1))
    with pytest.raises(SourceUnreachable, match="stalled recently"):
        ends.puller.pull(stalled, [(0, 0)], Deadline.after(WAIT_S, stall_s=0.1))
    silent.close()


def test_corrupt_block_is_detected(open_ends: Callable[..., Ends], monkeypatch: pytest.MonkeyPatch) -> None:
    ends = open_ends("tcp+digest")
    descriptor = ends.source.publish([1])
    honest = Region.pieces

    def damaged(region: Region, blocks: Any) -> list[memoryview]:
        if region is not ends.there:
            return honest(region, blocks)
        wrong = Region(LAYOUT, ends.there.flat.copy())
        wrong.flat[:] ^= 1
        calls.append(1)
        return honest(wrong if len(calls) == 1 else region, blocks)

    calls: list[int] = []
    monkeypatch.setattr(
        "dynamo.kvbm.transfer.wire._send", lambda link, pieces: [link.sendall(bytes(len(p))) for p in pieces]
    )
    monkeypatch.setattr(Region, "pieces", damaged)
    with pytest.raises(TransferError, match="digest"):
        ends.pull(descriptor, [(0, 0)])


def test_source_closes_connections_with_a_wrong_protocol(open_ends: Callable[..., Ends]) -> None:
    ends = open_ends("tcp")
    descriptor = ends.source.publish([1])
    host, _, port = descriptor.offers[0].address.rpartition(":")
    with socket.create_connection((host, int(port)), WAIT_S) as unknown_client:
        unknown_client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert unknown_client.recv(100) == b""
    assert ends.source.held == 1


def test_memory_is_unmapped_when_its_source_ends(open_ends: Callable[..., Ends]) -> None:
    ends = open_ends("shm")
    member: Any = ends.member
    ends.pull(ends.source.publish([1]), [(0, 0)])
    assert member.mapped == 1
    ends.source.close()
    until(lambda: member.mapped == 0, "the memory is still mapped")


def test_shared_memory_cannot_be_written_by_its_readers() -> None:
    pages = SharedMemoryPages(1000)
    file = pages.readable()
    with pytest.raises(OSError):
        os.write(file, b"x")
    os.close(file)
    pages.close()


@pytest.mark.parametrize("how", ["it stalls", "it dies"])
def test_source_that_ends_during_a_pull_is_detected(
    open_ends: Callable[..., Ends], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    ends = open_ends("tcp")
    descriptor = ends.source.publish([1, 2, 3])
    over = threading.Event()

    def half(link: socket.socket, region: Region, blocks: Any, batch: int, *, is_checked: bool) -> None:
        for piece in region.pieces(blocks)[:3]:
            link.sendall(piece)
        if how == "it stalls":
            over.wait(WAIT_S)
        raise OSError("the source died")

    monkeypatch.setattr("dynamo.kvbm.transfer.wire.send_blocks", half)
    error, stall_s = (TransferTimeout, 0.2) if how == "it stalls" else (SourceUnreachable, WAIT_S)
    with pytest.raises(error):
        ends.puller.pull(descriptor, [(0, 0), (1, 1), (2, 2)], Deadline.after(WAIT_S, stall_s=stall_s))
    over.set()
    until(lambda: not ends.source._leases.find(descriptor.transfer_id).readers, "the source still sends")
    assert ends.source.release(descriptor.transfer_id)


def test_blocks_are_not_freed_while_they_are_sent(
    open_ends: Callable[..., Ends], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = open_ends("tcp")
    descriptor = ends.source.publish([1, 2])
    honest = wire.send_blocks

    def released_meanwhile(*arguments: Any, **options: Any) -> None:
        ends.source.release(descriptor.transfer_id)
        assert ends.freed == []
        honest(*arguments, **options)

    monkeypatch.setattr("dynamo.kvbm.transfer.wire.send_blocks", released_meanwhile)
    ends.pull(descriptor, [(0, 0), (1, 1)])
    assert (ends.here.pages[:, :2] == ends.there.pages[:, 1:3]).all()
    until(lambda: ends.freed == [[1, 2]], "the blocks were never freed")


def test_pullers_beyond_the_limit_are_refused(open_ends: Callable[..., Ends], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.kvbm.transfer.source.CONNECTIONS_MAX", 2)
    ends = open_ends("tcp")
    descriptor = ends.source.publish([1])
    host, _, port = descriptor.offers[0].address.rpartition(":")
    unknown_clients = [socket.create_connection((host, int(port)), WAIT_S) for _ in range(2)]
    until(lambda: len(ends.source._links) == 2, "the strangers were not taken")
    with pytest.raises(SourceUnreachable):
        ends.pull(descriptor, [(0, 0)])
    for unknown_client in unknown_clients:
        unknown_client.close()
    until(lambda: not ends.source._links, "the strangers' places were not freed")
    Puller(ends.here, [ends.member]).pull(descriptor, [(0, 0)], Deadline.after(WAIT_S, stall_s=WAIT_S))
