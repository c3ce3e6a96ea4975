"""Discovery in memory: for tests and for graphs in one process (`--discovery-backend mem`)."""

import weakref
from collections import defaultdict

from dynamo.runtime.discovery.base import View, Watch


class MemoryStore:
    """Records shared by the members of an in-memory cluster."""

    def __init__(self) -> None:
        self.views: defaultdict[str, View] = defaultdict(_synced_view)


class MemoryDiscovery:
    """Registry of one member with its records in a shared store."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self._store = store if store is not None else PROCESS_STORE
        self._own: set[tuple[str, str]] = set()
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()

    async def put(self, bucket: str, key: str, value: bytes) -> None:
        self._own.add((bucket, key))
        self._store.views[bucket].put(key, value)

    async def put_persistent(self, bucket: str, key: str, value: bytes) -> None:
        self._store.views[bucket].put(key, value)

    async def delete(self, bucket: str, key: str) -> None:
        self._own.discard((bucket, key))
        self._store.views[bucket].delete(key)

    async def snapshot(self, bucket: str) -> dict[str, bytes]:
        return dict(self._store.views[bucket].records)

    def watch(self, bucket: str) -> Watch:
        watch = self._store.views[bucket].watch()
        self._watches.add(watch)
        return watch

    async def close(self) -> None:
        for bucket, key in list(self._own):
            await self.delete(bucket, key)
        for watch in self._watches:
            watch.close()


def _synced_view() -> View:
    view = View()
    view.is_synced = True
    return view


PROCESS_STORE = MemoryStore()
"""Default store of the registries in this process."""
