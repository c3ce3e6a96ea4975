"""Discovery in Kubernetes: records, readiness and writes. The contract suite runs it against an API server."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.settle import turns, until

from dynamo.core.clock import ManualClock
from dynamo.core.codec import json_encode
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.k8s.client import KubeListing, KubeRefused, KubeUnavailable, WatchChange
from dynamo.k8s.kinds import ObjectKind
from dynamo.protocols.discovery import EVENT_CHANNELS, INSTANCES, METRICS_SOURCES, MODEL_CARDS
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.runtime.discovery.base import Delete, Put, Synced
from dynamo.runtime.discovery.kubernetes import (
    KubernetesDiscovery,
    ReadyRecords,
    data_of,
    ready_containers,
    ready_pods,
    records_of,
)
from dynamo.runtime.discovery.pod_identity import PodIdentity

IDENTITY = PodIdentity(pod="worker-0", uid="u-1", namespace="prod", record="worker-0")
KEY = ("prod", "worker-0")
SLICE = ("prod", "slice")


def published(uid: str = "u-1", **endpoints: Any) -> KubeObject:
    return {
        "metadata": {"name": "worker-0", "ownerReferences": [{"kind": "Pod", "uid": uid}]},
        "spec": {"data": {"endpoints": endpoints}},
    }


class FakeApi:
    """Collections without content, and writes that fail as the test demands."""

    address = "http://api"

    def __init__(self) -> None:
        self.written: list[dict[str, Any]] = []
        self.failure: Exception | None = None
        self.away: Exception | None = None
        self.closed = False

    async def list(self, kind: ObjectKind, namespace: str | None = None, labels: str = "") -> KubeListing:
        if self.away:
            raise self.away
        return KubeListing([], "1")

    async def watch(
        self, kind: ObjectKind, revision: str, namespace: str | None = None, labels: str = ""
    ) -> AsyncIterator[WatchChange]:
        await asyncio.Event().wait()
        for change in ():
            yield change

    async def apply(
        self, kind: ObjectKind, value: KubeObject, namespace: str | None = None, *, manager: str
    ) -> KubeObject:
        if self.failure:
            raise self.failure
        self.written.append(value)
        return value

    async def close(self) -> None:
        self.closed = True


def made(api: FakeApi, clock: ManualClock | None = None) -> KubernetesDiscovery:
    return KubernetesDiscovery(IDENTITY, make_client=lambda: api, clock=clock or ManualClock())


# Records


json_objects = st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=3).map(json_encode)
buckets = st.sampled_from([INSTANCES, MODEL_CARDS, METRICS_SOURCES, "v1/other"])
values = st.one_of(json_objects, st.binary(max_size=8))


@given(st.dictionaries(buckets, st.dictionaries(st.text(min_size=1, max_size=4), values, min_size=1), max_size=4))
def test_records_round_trip_through_a_metadata_object(own: dict[str, dict[str, bytes]]) -> None:
    assert records_of(data_of(own)) == own


def test_metadata_object_without_records_has_all_upstream_fields() -> None:
    assert data_of({}) == {"endpoints": {}, "model_cards": {}, "event_channels": {}, "event_sources": {}}


def test_event_channels_repeat_the_namespace_and_component_of_their_scope() -> None:
    channel = {"scope": {"kind": "endpoint", "endpoint": {"namespace": "ns", "component": "c", "name": "e"}}}
    written = data_of({EVENT_CHANNELS: {"k": json_encode(channel)}})["event_channels"]["k"]
    assert written == {**channel, "namespace": "ns", "component": "c"}


def test_only_ready_addresses_with_a_uid_are_ready_pods() -> None:
    target = {"name": "a", "uid": "u"}
    endpoints = [
        {"conditions": {"ready": True}, "targetRef": target},
        {"conditions": {"ready": False}, "targetRef": {"name": "b", "uid": "u"}},
        {"targetRef": {"name": "c", "uid": "u"}},
        {"conditions": {"ready": True}, "targetRef": {"name": "d"}},
        {"conditions": {"ready": True}},
    ]
    assert ready_pods({"endpoints": endpoints}) == {"a": "u"}
    assert ready_pods({"endpoints": None}) == {}


def test_ready_containers_other_than_main_have_separate_records() -> None:
    statuses = [{"name": "main", "ready": True}, {"name": "e-1", "ready": True}, {"name": "e-2", "ready": False}]
    pod = {"metadata": {"name": "p", "uid": "u"}, "status": {"containerStatuses": statuses}}
    assert ready_containers(pod) == {"p": "u", "p-e-1": "u"}
    assert ready_containers({"metadata": {"name": "p", "uid": "u"}}) == {}


# Readiness


def test_records_are_visible_while_their_pod_is_ready() -> None:
    records = ReadyRecords()
    view = records.view(INSTANCES)
    records.publish(KEY, published(k={"a": 1}))
    assert view.records == {}
    records.ready(SLICE, {"worker-0": "u-1"})
    assert view.records == {"k": b'{"a":1}'}
    records.publish(KEY, published(k={"a": 2}, other={}))
    assert view.records == {"k": b'{"a":2}', "other": b"{}"}
    records.ready(SLICE, {})
    assert view.records == {}


def test_pod_in_two_slices_is_ready_while_one_slice_contains_it() -> None:
    records = ReadyRecords()
    view = records.view(INSTANCES)
    records.publish(KEY, published(k={}))
    records.ready(SLICE, {"worker-0": "u-1"})
    records.ready(("prod", "second"), {"worker-0": "u-1"})
    records.ready(SLICE, {})
    assert view.records == {"k": b"{}"}


def test_records_of_an_earlier_pod_of_the_same_name_are_not_visible() -> None:
    records = ReadyRecords()
    records.publish(KEY, published(uid="old", k={}))
    records.ready(SLICE, {"worker-0": "u-1"})
    assert records.view(INSTANCES).records == {}


@pytest.mark.parametrize(
    "spec", [{}, {"data": None}, {"data": {"endpoints": 3}}, {"data": {"records": {"b": {"k": "?"}}}}]
)
def test_invalid_metadata_object_does_not_change_the_records(spec: dict[str, Any]) -> None:
    records = ReadyRecords()
    view = records.view(INSTANCES)
    records.ready(SLICE, {"worker-0": "u-1"})
    records.publish(KEY, published(k={}))
    records.publish(KEY, {**published(), "spec": spec})
    assert view.records == {"k": b"{}"}
    records.publish(KEY, None)
    assert view.records == {}


# The registry of one process


async def test_watch_of_an_empty_collection_is_synced() -> None:
    discovery = made(FakeApi())
    watch = discovery.watch(INSTANCES)
    assert await anext(watch) == Synced()
    await discovery.close()


async def test_metadata_object_is_owned_by_the_pod_and_emptied_on_close() -> None:
    api = FakeApi()
    discovery = made(api)
    await discovery.put(INSTANCES, "k", b'{"a": 1}')
    await discovery.close()
    first, last = api.written
    assert first["metadata"]["name"] == "worker-0"
    assert first["metadata"]["ownerReferences"][0] == {
        "apiVersion": "v1", "kind": "Pod", "name": "worker-0", "uid": "u-1",
        "controller": True, "blockOwnerDeletion": False,
    }  # fmt: skip
    assert first["spec"]["data"]["endpoints"] == {"k": {"a": 1}}
    assert last["spec"]["data"]["endpoints"] == {}
    assert api.closed


async def test_record_put_during_an_outage_is_written_afterwards() -> None:
    api, clock = FakeApi(), ManualClock()
    discovery = made(api, clock)
    await discovery.connect()
    api.failure = KubeUnavailable("gone")
    await discovery.put(INSTANCES, "k", b"{}")
    assert api.written == []
    api.failure = None
    await until(lambda: clock.advance(1.0) or api.written)
    assert api.written[0]["spec"]["data"]["endpoints"] == {"k": {}}
    await discovery.close()


@pytest.mark.parametrize(("code", "error"), [(403, ConfigError), (422, InvalidArgument)])
async def test_refused_record_raises_and_is_not_kept(code: int, error: type[Exception]) -> None:
    api = FakeApi()
    discovery = made(api)
    api.failure = KubeRefused(code, "Reason", "why")
    with pytest.raises(error, match=r"DynamoWorkerMetadata prod/worker-0: .*why"):
        await discovery.put(INSTANCES, "k", b"{}")
    assert discovery.data()["endpoints"] == {}
    api.failure = None
    await discovery.close()


async def test_records_beyond_the_limit_of_an_object_are_refused() -> None:
    discovery = made(FakeApi())
    with pytest.raises(InvalidArgument, match="all records may have 1048576 bytes"):
        await discovery.put(INSTANCES, "k", json_encode({"a": "x" * (1 << 20)}))
    await discovery.close()


async def test_snapshot_uses_the_view_during_an_api_outage() -> None:
    api = FakeApi()
    discovery = made(api)
    await discovery.connect()
    api.away = KubeUnavailable("gone")
    assert await discovery.snapshot(INSTANCES) == {}
    await discovery.close()


async def test_close_ends_watches() -> None:
    discovery = made(FakeApi())
    watch = discovery.watch(INSTANCES)
    seen: list[Put | Delete | Synced] = []

    async def read() -> None:
        async for change in watch:
            seen.append(change)  # noqa: PERF401 - the iteration ends with the watch

    task = asyncio.ensure_future(read())
    await turns(20)
    await discovery.close()
    await asyncio.wait_for(task, 5)
    assert seen == [Synced()]
