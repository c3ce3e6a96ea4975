"""The responses of a real etcd in the cases that discovery depends on."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.cluster.etcd import EtcdCluster

from dynamo.runtime.transports.etcd import protocol
from dynamo.runtime.transports.etcd.client import EtcdMember
from dynamo.runtime.transports.etcd.options import etcd_options
from dynamo.runtime.transports.etcd.protocol import FAILED_PRECONDITION, NOT_FOUND, Compacted, EtcdRefused, WatchMessage

pytestmark = pytest.mark.integration

LEASE = 2**63 - 1
TIMEOUT_S = 60.0  # For operations that take milliseconds on an idle machine.


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster.wait()


@pytest.fixture
async def member(etcd: EtcdCluster) -> AsyncIterator[EtcdMember]:
    options = etcd_options({"ETCD_ENDPOINTS": etcd.endpoints})
    made = EtcdMember(options.addresses[0], options, None, TIMEOUT_S)
    await made.connect()
    await made.grant(LEASE, 60)
    yield made
    with contextlib.suppress(EtcdRefused):
        await made.revoke(LEASE)
    made.close()


async def test_lease_id_is_arbitrary_and_unique(member: EtcdMember) -> None:
    with pytest.raises(EtcdRefused, match="lease already exists") as caught:
        await member.grant(LEASE, 60)
    assert caught.value.code == FAILED_PRECONDITION
    assert await member.renew(LEASE) == 60
    await member.put(b"t/k", b"v", LEASE)
    assert await member.held_by(LEASE) == {b"t/k"}
    await member.revoke(LEASE)
    assert await member.renew(LEASE) == 0
    with pytest.raises(EtcdRefused, match="requested lease not found") as caught:
        await member.put(b"t/k", b"v", LEASE)
    assert caught.value.code == NOT_FOUND


async def test_long_listing_is_complete(member: EtcdMember, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "PAGE_RECORDS", 7)
    records = {b"long/%03d\xff" % number: b"\x00" * number for number in range(50)}
    for key, value in records.items():
        await member.put(key, value, LEASE)
    await member.put(b"long0", b"a neighbour", LEASE)
    assert (await member.list(b"long/")).records == records


async def test_watch_is_resumable_until_its_revision_is_compacted(member: EtcdMember, etcd: EtcdCluster) -> None:
    await member.put(b"w/a", b"1", LEASE)
    listing = await member.list(b"w/")
    await member.put(b"w/b", b"2", LEASE)
    await member.delete(b"w/a")

    watch = member.watch(b"w/", listing.revision + 1)
    events = [event for message in await first(watch, 2) for event in message.events]
    assert [(event.type, event.kv.key, event.kv.value) for event in events] == [
        ("PUT", b"w/b", b"2"),
        ("DELETE", b"w/a", b""),
    ]
    assert events[-1].kv.mod_revision == listing.revision + 2

    etcd.control("compact", str(listing.revision + 2))
    with pytest.raises(Compacted):
        await first(member.watch(b"w/", listing.revision + 1), 2)


async def test_future_revision_is_refused(member: EtcdMember) -> None:
    revision = (await member.list(b"w/")).revision
    assert [message.created for message in await first(member.watch(b"w/", revision + 1), 0)] == [True]
    with pytest.raises(Compacted):
        await first(member.watch(b"w/", revision + 1000), 0)


async def first(watch: AsyncIterator[WatchMessage], events: int) -> list[WatchMessage]:
    """Return the messages until that many events have arrived, and at least the first message."""
    received: list[WatchMessage] = []
    async with asyncio.timeout(TIMEOUT_S), contextlib.aclosing(watch):  # type: ignore[type-var]
        async for message in watch:
            received.append(message)
            if sum(len(one.events) for one in received) >= events:
                break
    return received
