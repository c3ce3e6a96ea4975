"""Objects, their revisions and the history that watches and pages read; no I/O."""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tests.cluster.kubernetes.errors import Object, expired
from tests.cluster.kubernetes.resources import GroupPlural

HISTORY = 50_000
"""Events that are kept for watches that start in the past; older ones are compacted."""
MAX_BACKLOG = 20_000
"""Undelivered events after which a watch is closed."""
Name = tuple[str, str]
"""Namespace and name; the namespace is empty for objects of the cluster."""


@dataclass(slots=True)
class Event:
    """One write: the object after it and before it."""

    revision: int
    key: GroupPlural
    name: Name
    kind: str
    """ADDED, MODIFIED or DELETED."""
    after: Object
    before: Object | None
    encoded: dict[Any, bytes] = field(default_factory=dict)
    """Serialized forms of the event, shared by the watches that send it."""


class Subscription:
    """Events of one resource for one watch; closed when the reader falls behind or a fault drops the watch."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self.is_closed = False
        self._wake = asyncio.Event()

    def publish(self, event: Event) -> None:
        self.events.append(event)
        if len(self.events) > MAX_BACKLOG:
            self.is_closed = True
        self._wake.set()

    def close(self) -> None:
        self.is_closed = True
        self._wake.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait for an event or the end, at most `timeout_s`."""
        try:
            await asyncio.wait_for(self._wake.wait(), timeout_s)
        except TimeoutError:
            return
        self._wake.clear()


class Storage:
    """Objects by resource and name under one global revision. Stored objects are never changed in place."""

    def __init__(self, history: int = HISTORY) -> None:
        self.revision = 1
        self.compacted = 0
        self.history: deque[Event] = deque()
        self._limit = history
        self._objects: dict[GroupPlural, dict[Name, Object]] = {}
        self._by_uid: dict[str, tuple[GroupPlural, Name]] = {}
        self._dependents: dict[str, set[tuple[GroupPlural, Name]]] = {}
        self.subscriptions: dict[GroupPlural | None, set[Subscription]] = {}
        """Readers by resource; those of None receive every event."""
        self.writes = 0

    def get(self, key: GroupPlural, name: Name) -> Object | None:
        return self._objects.get(key, {}).get(name)

    def items(self, key: GroupPlural, namespace: str = "") -> list[Object]:
        """Return the objects of a resource, sorted by namespace and name."""
        found = self._objects.get(key, {})
        return [found[name] for name in sorted(found) if not namespace or name[0] == namespace]

    def items_at(self, key: GroupPlural, namespace: str, revision: int) -> list[Object]:
        """Return the objects as they were at a revision. Raises 410 where it is compacted."""
        if revision < self.compacted:
            raise expired(f"The provided continue parameter is too old: revision {revision} has been compacted")
        found = dict(self._objects.get(key, {}))
        for event in reversed(self.history):
            if event.revision <= revision:
                break
            if event.key == key:
                if event.before is None:
                    found.pop(event.name, None)
                else:
                    found[event.name] = event.before
        return [found[name] for name in sorted(found) if not namespace or name[0] == namespace]

    def by_uid(self, uid: str) -> tuple[GroupPlural, Name] | None:
        return self._by_uid.get(uid)

    def dependents(self, uid: str) -> list[tuple[GroupPlural, Name]]:
        """Return the objects that name the UID as an owner."""
        return sorted(self._dependents.get(uid, ()))

    def namespaced(self, namespace: str) -> Iterator[tuple[GroupPlural, Name]]:
        """Yield everything in a namespace."""
        for key, found in list(self._objects.items()):
            for name in list(found):
                if name[0] == namespace:
                    yield key, name

    def put(self, key: GroupPlural, item: Object) -> Object:
        """Store an object under the next revision and return it as stored."""
        name = item["metadata"].get("namespace", ""), item["metadata"]["name"]
        before = self.get(key, name)
        return self._write(key, name, "MODIFIED" if before else "ADDED", item, before)

    def remove(self, key: GroupPlural, name: Name) -> Object:
        """Delete an object; the final state carries the revision of the deletion."""
        before = self._objects[key][name]
        return self._write(key, name, "DELETED", before, before)

    def _write(self, key: GroupPlural, name: Name, kind: str, item: Object, before: Object | None) -> Object:
        self.revision += 1
        self.writes += 1
        stored = {**item, "metadata": {**item["metadata"], "resourceVersion": str(self.revision)}}
        found = self._objects.setdefault(key, {})
        if before is not None:
            self._unindex(key, name, before)
        if kind == "DELETED":
            del found[name]
        else:
            found[name] = stored
            self._index(key, name, stored)
        event = Event(self.revision, key, name, kind, stored, before)
        self.history.append(event)
        while len(self.history) > self._limit:
            self.compacted = self.history.popleft().revision
        for reader in (*self.subscriptions.get(key, ()), *self.subscriptions.get(None, ())):
            reader.publish(event)
        return stored

    def _index(self, key: GroupPlural, name: Name, item: Object) -> None:
        self._by_uid[item["metadata"]["uid"]] = key, name
        for owner in item["metadata"].get("ownerReferences") or ():
            self._dependents.setdefault(owner["uid"], set()).add((key, name))

    def _unindex(self, key: GroupPlural, name: Name, item: Object) -> None:
        self._by_uid.pop(item["metadata"]["uid"], None)
        for owner in item["metadata"].get("ownerReferences") or ():
            found = self._dependents.get(owner["uid"], set())
            found.discard((key, name))
            if not found:
                self._dependents.pop(owner["uid"], None)

    def compact(self, revision: int | None = None) -> None:
        """Forget the events up to a revision, by default all of them."""
        self.compacted = self.revision if revision is None else revision
        while self.history and self.history[0].revision <= self.compacted:
            self.history.popleft()

    def since(self, revision: int) -> list[Event]:
        """Return the events after a revision. Raises 410 where some of them are compacted."""
        if revision < self.compacted:
            raise expired(f"too old resource version: {revision} ({self.compacted + 1})")
        found: list[Event] = []
        for event in reversed(self.history):
            if event.revision <= revision:
                break
            found.append(event)
        return found[::-1]

    def subscribe(self, key: GroupPlural | None) -> Subscription:
        """Return a subscription to the writes from now on; end it with `unsubscribe`."""
        made = Subscription()
        self.subscriptions.setdefault(key, set()).add(made)
        return made

    def unsubscribe(self, key: GroupPlural | None, subscription: Subscription) -> None:
        self.subscriptions[key].discard(subscription)


def encode(value: Any) -> bytes:
    return msgspec.json.encode(value)
