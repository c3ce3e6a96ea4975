"""Informers: views that outlive failures of the API server."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.settle import turns

from dynamo.core.clock import ManualClock
from dynamo.k8s.client import KubeListing, KubeRefused, KubeUnavailable, WatchChange
from dynamo.k8s.informer import RETRY_MAX_S, Informer, ObjectKey, ObjectTexts
from dynamo.k8s.kinds import PODS, ObjectKind
from dynamo.protocols.kubernetes.common import KubeObject


def pod(name: str, revision: int) -> KubeObject:
    return {"metadata": {"namespace": "ns", "name": name, "resourceVersion": str(revision)}}


class FakeServer:
    """Collection with a history, of which `compact` removes the old part."""

    def __init__(self) -> None:
        self.revision = 0
        self.objects: dict[str, KubeObject] = {}
        self.history: list[tuple[int, WatchChange]] = []
        self.oldest = 0
        self.failure: Exception | None = None
        self.lists = 0
        self.watches: list[str] = []
        self._changed = asyncio.Event()

    def put(self, name: str) -> None:
        self.revision += 1
        kind = "MODIFIED" if name in self.objects else "ADDED"
        self.objects[name] = pod(name, self.revision)
        self._record(WatchChange(kind, self.objects[name]))

    def delete(self, name: str) -> None:
        if self.objects.pop(name, None) is not None:
            self.revision += 1
            self._record(WatchChange("DELETED", pod(name, self.revision)))

    def bookmark(self) -> None:
        self.revision += 1
        self._record(WatchChange("BOOKMARK", {"metadata": {"resourceVersion": str(self.revision)}}))

    def compact(self) -> None:
        self.oldest = self.revision
        self.history.clear()

    def fail(self, error: Exception | None) -> None:
        """Fail every request and watch with an error, or serve them again."""
        self.failure = error
        self._changed.set()

    def _record(self, change: WatchChange) -> None:
        self.history.append((self.revision, change))
        self._changed.set()

    async def list(self, kind: ObjectKind, namespace: str | None = None, labels: str = "") -> KubeListing:
        self.lists += 1
        if self.failure:
            raise self.failure
        return KubeListing(list(self.objects.values()), str(self.revision))

    async def watch(
        self, kind: ObjectKind, revision: str, namespace: str | None = None, labels: str = ""
    ) -> AsyncIterator[WatchChange]:
        self.watches.append(revision)
        at = int(revision)
        while True:
            if self.failure:
                raise self.failure
            if at < self.oldest:
                raise KubeRefused(410, "Expired", "too old")
            for number, change in [one for one in self.history if one[0] > at]:
                at = number
                yield change
            self._changed.clear()
            await self._changed.wait()


class Followed:
    """An informer and what it reported."""

    def __init__(self, server: FakeServer, objects: MutableMapping[ObjectKey, KubeObject] | None = None) -> None:
        self.server = server
        self.clock = ManualClock()
        self.changes: list[tuple[str, bool]] = []
        self.syncs = 0
        self.informer = Informer(
            server, PODS, "ns", on_change=self._on_change, on_sync=self._on_sync, objects=objects, clock=self.clock
        )

    def _on_change(self, key: ObjectKey, value: KubeObject | None) -> None:
        self.changes.append((key[1], value is not None))

    def _on_sync(self) -> None:
        self.syncs += 1

    @property
    def names(self) -> set[str]:
        return {name for _, name in self.informer.objects}

    async def settle(self, seconds: float = 0.0) -> None:
        self.clock.advance(seconds)
        await turns(20)


@asynccontextmanager
async def following(
    server: FakeServer, objects: MutableMapping[ObjectKey, KubeObject] | None = None
) -> AsyncIterator[Followed]:
    followed = Followed(server, objects)
    task = asyncio.ensure_future(followed.informer.run())
    try:
        await followed.settle()
        yield followed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_view_contains_existing_objects_and_each_change() -> None:
    server = FakeServer()
    server.put("a")
    async with following(server) as followed:
        assert (followed.changes, followed.syncs, followed.informer.is_synced) == ([("a", True)], 1, True)
        server.put("b")
        server.delete("a")
        await followed.settle()
        assert followed.changes == [("a", True), ("b", True), ("a", False)]
        assert followed.names == {"b"}


async def test_view_is_kept_during_an_outage_and_the_watch_resumes_at_its_revision(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    server = FakeServer()
    server.put("a")
    async with following(server) as followed:
        server.bookmark()
        await followed.settle()
        server.fail(KubeUnavailable("gone"))
        for _ in range(10):
            await followed.settle(RETRY_MAX_S)
        assert (followed.names, followed.informer.is_connected) == ({"a"}, False)
        server.fail(None)
        server.put("b")
        await followed.settle(RETRY_MAX_S)
        assert (followed.names, followed.informer.is_connected, server.lists) == ({"a", "b"}, True, 1)
        assert server.watches[-1] == "2"
    assert [one.levelno for one in caplog.records] == [logging.WARNING, logging.INFO]


async def test_objects_are_listed_again_when_the_revision_is_too_old() -> None:
    server = FakeServer()
    server.put("a")
    server.put("b")
    async with following(server) as followed:
        server.fail(KubeUnavailable("gone"))
        await followed.settle()
        server.delete("a")
        server.put("c")
        server.compact()
        server.fail(None)
        for _ in range(3):
            await followed.settle(RETRY_MAX_S)
        assert followed.names == {"b", "c"}
        assert followed.changes[2:] == [("a", False), ("c", True)]
        assert followed.syncs == 2


async def test_server_that_ends_each_watch_at_once_is_not_flooded() -> None:
    class Ending(FakeServer):
        async def watch(self, *arguments: Any, **named: Any) -> AsyncIterator[WatchChange]:
            self.watches.append("")
            for change in ():
                yield change

    server = Ending()
    async with following(server) as followed:
        for _ in range(10):
            await followed.settle(0.05)
        assert len(server.watches) <= 7


def steps() -> Iterator[Any]:
    names = st.sampled_from("abc")
    yield st.tuples(st.just("put"), names)
    yield st.tuples(st.just("delete"), names)
    yield st.tuples(st.sampled_from(["fail", "refuse", "serve", "compact", "bookmark", "settle"]), st.just(""))


async def test_reader_of_a_view_of_texts_cannot_change_it() -> None:
    server = FakeServer()
    server.put("a")
    texts = ObjectTexts()
    async with following(server, texts) as followed:
        read = followed.informer.objects["ns", "a"]
        read["metadata"]["name"] = "other"
        assert followed.informer.objects["ns", "a"]["metadata"]["name"] == "a"


async def test_store_says_whether_the_view_has_the_object() -> None:
    server = FakeServer()
    server.put("a")
    async with following(server, ObjectTexts()) as followed:
        newest = followed.informer.objects["ns", "a"]
        version = int(newest["metadata"]["resourceVersion"])
        older, newer = ({"metadata": {**newest["metadata"], "resourceVersion": str(version + n)}} for n in (-1, 1))
        assert (followed.informer.store(older), followed.informer.store(newer)) == (False, True)
        assert followed.informer.objects["ns", "a"] == newer


@given(st.lists(st.one_of(*steps()), max_size=30), st.sampled_from([dict, ObjectTexts]))
def test_view_equals_the_collection_after_any_faults(
    taken: list[tuple[str, str]], kept: type[MutableMapping[ObjectKey, KubeObject]]
) -> None:
    async def run() -> None:
        server = FakeServer()
        async with following(server, kept()) as followed:
            for action, name in taken:
                match action:
                    case "fail":
                        server.fail(KubeUnavailable("gone"))
                    case "refuse":
                        server.fail(KubeRefused(403, "Forbidden", "no"))
                    case "serve":
                        server.fail(None)
                    case "settle":
                        await followed.settle(RETRY_MAX_S)
                    case "compact" | "bookmark":
                        getattr(server, action)()
                    case _:
                        getattr(server, action)(name)
            server.fail(None)
            for _ in range(4):
                await followed.settle(RETRY_MAX_S)
            assert followed.names == set(server.objects)
            shown: dict[str, bool] = dict(followed.changes)
            assert {name for name, exists in shown.items() if exists} == set(server.objects)

    asyncio.run(run())
