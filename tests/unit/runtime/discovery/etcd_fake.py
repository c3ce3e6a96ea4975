"""In-memory etcd: its history, its leases and its watches, and each of its failures."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from tests.settle import turns

from dynamo.runtime.transports.etcd.client import Listing
from dynamo.runtime.transports.etcd.options import Address
from dynamo.runtime.transports.etcd.protocol import (
    FAILED_PRECONDITION,
    NOT_FOUND,
    Compacted,
    EtcdHeader,
    EtcdRefused,
    EtcdUnavailable,
    KeyValue,
    WatchEvent,
    WatchMessage,
)


@dataclass(frozen=True)
class Kept:
    value: bytes
    lease: int


@dataclass(eq=False)
class FakeEtcd:
    """Cluster as a single object."""

    revision: int = 1
    records: dict[bytes, Kept] = field(default_factory=dict)
    leases: set[int] = field(default_factory=set)
    ttl: int = 10
    down: set[int] = field(default_factory=set)
    """Ports of members that do not answer."""
    history: list[WatchEvent] = field(default_factory=list)
    compacted: int = 0
    errors: list[Exception] = field(default_factory=list)
    """Errors of the next requests."""
    calls: list[str] = field(default_factory=list)
    breaks_after_one: bool = False
    """The next message of a watch contains one event, the first of those due, and then the connection breaks."""
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def member(self, address: Address) -> "FakeMember":
        return FakeMember(self, address.port)

    def put(self, key: bytes, value: bytes, lease: int = 0) -> None:
        self.revision += 1
        self.records[key] = Kept(value, lease)
        self._notify(WatchEvent(KeyValue(key, value, self.revision)))

    def put_together(self, records: dict[bytes, bytes]) -> None:
        """In one transaction, so at one revision."""
        self.revision += 1
        for key, value in records.items():
            self.records[key] = Kept(value, 0)
            self.history.append(WatchEvent(KeyValue(key, value, self.revision)))
        self.wake()

    def delete(self, key: bytes) -> None:
        if self.records.pop(key, None) is not None:
            self.revision += 1
            self._notify(WatchEvent(KeyValue(key, b"", self.revision), "DELETE"))

    def expire(self, lease: int) -> None:
        self.leases.discard(lease)
        for key in [key for key, kept in self.records.items() if kept.lease == lease]:
            self.delete(key)

    def wipe(self) -> None:
        """Restarts it without any state."""
        self.revision, self.compacted = 1, 0
        self.records.clear()
        self.leases.clear()
        self.history.clear()

    def compact(self) -> None:
        self.compacted = self.revision
        self.history.clear()

    def fall(self, *ports: int) -> None:
        self.down.update(ports or (1, 2, 3))
        self.wake()

    def rise(self) -> None:
        self.down.clear()

    def wake(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    def _notify(self, event: WatchEvent) -> None:
        self.history.append(event)
        self.wake()


class FakeMember:
    """One session with it."""

    def __init__(self, etcd: FakeEtcd, port: int) -> None:
        self._etcd = etcd
        self._port = port

    async def connect(self) -> None:
        await self._receive("connect")

    def close(self) -> None:
        self._etcd.calls.append("close")

    async def probe(self, prefix: bytes) -> None:
        await self._receive("probe")

    async def put(self, key: bytes, value: bytes, lease_id: int) -> None:
        await self._receive("put")
        if lease_id and lease_id not in self._etcd.leases:
            raise EtcdRefused(NOT_FOUND, "requested lease not found")
        self._etcd.put(key, value, lease_id)

    async def delete(self, key: bytes) -> None:
        await self._receive("delete")
        self._etcd.delete(key)

    async def list(self, prefix: bytes) -> Listing:
        await self._receive("list")
        found = {key: kept.value for key, kept in self._etcd.records.items() if key.startswith(prefix)}
        return Listing(found, self._etcd.revision)

    async def grant(self, lease_id: int, ttl_s: int) -> int:
        await self._receive("grant")
        if lease_id in self._etcd.leases:
            raise EtcdRefused(FAILED_PRECONDITION, "lease already exists")
        self._etcd.leases.add(lease_id)
        return self._etcd.ttl

    async def renew(self, lease_id: int) -> int:
        await self._receive("renew")
        return self._etcd.ttl if lease_id in self._etcd.leases else 0

    async def revoke(self, lease_id: int) -> None:
        await self._receive("revoke")
        self._etcd.expire(lease_id)

    async def held_by(self, lease_id: int) -> set[bytes]:
        await self._receive("held_by")
        return {key for key, kept in self._etcd.records.items() if kept.lease == lease_id}

    async def watch(self, prefix: bytes, start_revision: int) -> AsyncIterator[WatchMessage]:
        await self._receive("watch")
        etcd = self._etcd
        if start_revision <= etcd.compacted or etcd.revision < start_revision - 1:
            raise Compacted
        yield WatchMessage(EtcdHeader(etcd.revision), created=True)
        next_revision = start_revision
        while True:
            news = etcd.news
            if self._port in etcd.down:
                raise EtcdUnavailable("the connection was closed")
            due = [event for event in etcd.history if event.kv.mod_revision >= next_revision]
            if due and etcd.breaks_after_one:
                etcd.breaks_after_one = False
                is_cut = len(due) > 1 and due[1].kv.mod_revision == due[0].kv.mod_revision
                yield WatchMessage(EtcdHeader(etcd.revision), events=due[:1], fragment=is_cut)
                raise EtcdUnavailable("the connection was closed")
            if due:
                next_revision = due[-1].kv.mod_revision + 1
                yield WatchMessage(
                    EtcdHeader(etcd.revision), events=[event for event in due if event.kv.key.startswith(prefix)]
                )
            else:
                await news.wait()

    async def _receive(self, what: str) -> None:
        self._etcd.calls.append(what)
        await turns()  # Other events occur meanwhile.
        if self._port in self._etcd.down:
            raise EtcdUnavailable("no answer")
        if self._etcd.errors:
            raise self._etcd.errors.pop(0)
