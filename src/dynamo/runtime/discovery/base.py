"""Interface of discovery: put, delete, snapshot and watch; and the view of a bucket that every registry keeps.

A record belongs to the process that put it: it is refreshed while the process lives, and removed soon after its death
or immediately by `close`. Watchers get the present records, then `Synced`, then changes; values are compared as a
whole. While the registry cannot be read, the last view remains valid.
"""

import asyncio
import os
import weakref
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct


class Put(Struct, frozen=True):
    """Added or changed record."""

    key: str
    value: bytes


class Delete(Struct, frozen=True):
    """Removed record."""

    key: str


class Synced(Struct, frozen=True):
    """End of the records that existed when the watch began."""


Change = Put | Delete | Synced


class Discovery(Protocol):
    """Registry of records."""

    async def put(self, bucket: str, key: str, value: bytes) -> None:
        """Write a record of this process. Raise `InvalidArgument` for an unsupported key."""

    async def delete(self, bucket: str, key: str) -> None:
        """Remove a record of this process; do nothing if it does not exist."""

    async def snapshot(self, bucket: str) -> dict[str, bytes]:
        """Return the current records of a bucket."""

    def watch(self, bucket: str) -> AsyncIterator[Change]:
        """Yield the records of a bucket, then `Synced`, then changes until `close`."""

    async def close(self) -> None:
        """Remove the records of this process and end every watch."""


@runtime_checkable
class PersistentDiscovery(Discovery, Protocol):
    """Registry that can keep records after the end of the process that wrote them."""

    async def put_persistent(self, bucket: str, key: str, value: bytes) -> None:
        """Write a record without an owner; any process may overwrite it. Raise `DynamoException` if it is not written."""


@runtime_checkable
class SupervisedDiscovery(Discovery, Protocol):
    """Registry with supervised background tasks."""

    @property
    def is_sound(self) -> bool:
        """Return False from a crash of a background task until it is restarted."""


@runtime_checkable
class AssigningDiscovery(Discovery, Protocol):
    """Registry that determines the instance id of its process."""

    @property
    def instance_id(self) -> int:
        """Return the instance id under which this process registers."""


@runtime_checkable
class DescribedDiscovery(Discovery, Protocol):
    """Registry whose records of this process are shown at `/metadata`."""

    def data(self) -> dict[str, Any]:
        """Return the records of this process as JSON data."""


@runtime_checkable
class RemoteDiscovery(Discovery, Protocol):
    """Registry on servers that may be unreachable."""

    async def connect(self) -> None:
        """Wait for the first response. Raise `ConfigError` after the startup timeout."""

    @property
    def is_reachable(self) -> bool:
        """Return False during an outage, while views are stale; it does not affect readiness."""

    @property
    def is_sound(self) -> bool:
        """Return False from a crash of the watcher until it is synchronized again."""


def new_id() -> int:
    """Return a random id of 63 bits, never 0."""
    return (int.from_bytes(os.urandom(8), "big") >> 1) | 1


class View:
    """Last known records of one bucket, and its watches."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.is_synced = False
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()

    def put(self, key: str, value: bytes) -> None:
        if self.records.get(key) == value:
            return
        self.records[key] = value
        for watch in self._watches:
            watch.notify(key)

    def delete(self, key: str) -> None:
        if self.records.pop(key, None) is not None:
            for watch in self._watches:
                watch.notify(key)

    def replace(self, records: Mapping[str, bytes]) -> None:
        """Set the records of the view and mark it as complete."""
        for key in [key for key in self.records if key not in records]:
            self.delete(key)
        for key, value in records.items():
            self.put(key, value)
        self.is_synced = True
        for watch in self._watches:
            watch.wake()

    def watch(self) -> "Watch":
        watch = Watch(self)
        self._watches.add(watch)
        return watch

    def close(self) -> None:
        for watch in self._watches:
            watch.close()


class Watch:
    """Reader of a view. Unread changes are coalesced to the newest one per key."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._changed: dict[str, None] = dict.fromkeys(view.records)
        self._reported: set[str] = set()
        self._has_reported_sync = False
        self._is_closed = False
        self._wake = asyncio.Event()

    def notify(self, key: str) -> None:
        """Record that a key changed."""
        self._changed[key] = None
        self._wake.set()

    def wake(self) -> None:
        self._wake.set()

    def close(self) -> None:
        """End the iteration."""
        self._is_closed = True
        self._wake.set()

    def __aiter__(self) -> "Watch":
        return self

    async def __anext__(self) -> Change:
        while True:
            change = self._take()
            if change is not None:
                return change
            if self._is_closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()

    def _take(self) -> Change | None:
        while self._changed:
            key = next(iter(self._changed))
            del self._changed[key]
            value = self._view.records.get(key)
            if value is not None:
                self._reported.add(key)
                return Put(key, value)
            if key in self._reported:
                self._reported.discard(key)
                return Delete(key)
        if self._view.is_synced and not self._has_reported_sync:
            self._has_reported_sync = True
            return Synced()
        return None


class Roster:
    """One bucket of a remote registry as its watchers see it, including records that are missing after an outage.

    After an outage, a missing record means that its owner died or that the registry lost data. During a grace period
    (`is_patient`) such a record stays in the view, so that its owner can write it again.
    """

    def __init__(self) -> None:
        self.view = View()
        self.revision = 0
        """Registry revision of the view; 0 when the bucket must be listed."""
        self.missing: set[str] = set()
        """Records that the registry no longer has, kept in the view until the grace period ends."""

    def replace(self, records: Mapping[str, bytes], revision: int, *, is_patient: bool) -> None:
        """Apply a listing."""
        known = self.view.records
        self.missing = {key for key in known if key not in records} if is_patient else set()
        self.view.replace({**{key: known[key] for key in self.missing}, **records})
        self.revision = revision

    def put(self, key: str, value: bytes) -> None:
        self.missing.discard(key)
        self.view.put(key, value)

    def delete(self, key: str, *, is_patient: bool) -> None:
        if is_patient and key in self.view.records:
            self.missing.add(key)
        else:
            self.forget(key)

    def forget(self, key: str) -> None:
        """Remove a record that its owner deleted."""
        self.missing.discard(key)
        self.view.delete(key)

    def forget_missing(self) -> int:
        """Remove the missing records at the end of the grace period; return their number."""
        missing, self.missing = self.missing, set()
        for key in missing:
            self.view.delete(key)
        return len(missing)

    def validate(self) -> None:
        """Assert the invariants."""
        assert self.missing <= self.view.records.keys(), "missing records must be in the view"
