"""Contract of discovery registries."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from tests.cluster.etcd import EtcdCluster
from tests.cluster.kubernetes.pods import install_crds, ready_pod
from tests.cluster.kubernetes.released import ReleasedKubernetes, released_assets
from tests.cluster.kubernetes.running import KubernetesServer
from tests.cluster.kubernetes.servers import AnyKubernetes

from dynamo.runtime.discovery.base import Change, Delete, Discovery, Put, Synced, new_id
from dynamo.runtime.discovery.etcd import EtcdDiscovery
from dynamo.runtime.discovery.file import FileDiscovery
from dynamo.runtime.discovery.kubernetes import KubernetesDiscovery
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.discovery.pod_identity import PodIdentity
from dynamo.runtime.transports.etcd.options import etcd_options

BUCKET = "v1/instances"
TIMEOUT_S = 30.0  # For operations that take milliseconds on an idle machine.

Join = Callable[[], Discovery]


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster.wait()


@pytest.fixture(scope="session")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnyKubernetes]:
    """Return an API server: a released one where KUBEBUILDER_ASSETS names its folder."""
    folder, assets = tmp_path_factory.mktemp("kubernetes"), released_assets()
    with ReleasedKubernetes(folder, assets, controllers=True) if assets else KubernetesServer(folder) as server:
        install_crds(server)
        yield server


@pytest.fixture(
    params=[
        "memory",
        "file",
        pytest.param("etcd", marks=pytest.mark.integration),
        pytest.param("kubernetes", marks=pytest.mark.integration),
    ]
)
async def join(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Join]:
    """Return a function that creates further members of one cluster."""
    members: list[Discovery] = []
    make = maker(request, tmp_path)

    def join_one() -> Discovery:
        members.append(make())
        return members[-1]

    yield join_one
    for member in members:
        await member.close()


def pods(server: AnyKubernetes, monkeypatch: pytest.MonkeyPatch) -> Join:
    """Return a function that creates a ready pod in a namespace of this test, and the registry of its process."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    namespace = f"test-{new_id():x}"
    numbers = itertools.count()

    def join_one() -> Discovery:
        pod = ready_pod(server, f"member-{next(numbers)}", namespace)
        return KubernetesDiscovery(PodIdentity.read(pod.variables))

    return join_one


def maker(request: pytest.FixtureRequest, folder: Path) -> Join:
    match request.param:
        case "memory":
            store = MemoryStore()
            return lambda: MemoryDiscovery(store)
        case "file":
            return lambda: FileDiscovery(str(folder))
        case "kubernetes":
            return pods(request.getfixturevalue("kubernetes"), request.getfixturevalue("monkeypatch"))
        case _:
            options = etcd_options({"ETCD_ENDPOINTS": request.getfixturevalue("etcd").endpoints})
            return lambda: EtcdDiscovery(options=options)


async def take(watch: AsyncIterator[Change], count: int) -> list[Change]:
    async with asyncio.timeout(TIMEOUT_S):
        return [await anext(watch) for _ in range(count)]


async def test_watcher_receives_existing_records_then_synced_then_changes(join: Join) -> None:
    owner, watcher = join(), join()
    await owner.put(BUCKET, "a/b/c/1", b"one")
    watch = watcher.watch(BUCKET)
    assert await take(watch, 2) == [Put("a/b/c/1", b"one"), Synced()]
    await owner.put(BUCKET, "a/b/c/2", b"two")
    assert await take(watch, 1) == [Put("a/b/c/2", b"two")]
    await owner.delete(BUCKET, "a/b/c/1")
    assert await take(watch, 1) == [Delete("a/b/c/1")]


async def test_empty_bucket_is_synced_at_once(join: Join) -> None:
    assert await take(join().watch(BUCKET), 1) == [Synced()]


async def test_watch_reports_changed_values_but_not_equal_ones(join: Join) -> None:
    owner = join()
    watch = join().watch(BUCKET)
    await take(watch, 1)
    await owner.put(BUCKET, "k", b"one")
    await owner.put(BUCKET, "k", b"one")
    assert await take(watch, 1) == [Put("k", b"one")]
    await owner.put(BUCKET, "k", b"one")
    await owner.put(BUCKET, "k", b"two")
    assert await take(watch, 1) == [Put("k", b"two")]


async def test_buckets_are_separate(join: Join) -> None:
    owner = join()
    await owner.put("v1/mdc", "k", b"card")
    assert await owner.snapshot(BUCKET) == {}
    assert await owner.snapshot("v1/mdc") == {"k": b"card"}


async def test_snapshot_contains_the_present_records(join: Join) -> None:
    owner, reader = join(), join()
    await take(reader.watch(BUCKET), 1)
    await owner.put(BUCKET, "a", b"1")
    await owner.put(BUCKET, "b-_.%/ü", b"\x00\xff")
    assert await reader.snapshot(BUCKET) == {"a": b"1", "b-_.%/ü": b"\x00\xff"}
    await owner.delete(BUCKET, "a")
    assert await reader.snapshot(BUCKET) == {"b-_.%/ü": b"\x00\xff"}


async def test_deleting_a_missing_record_is_no_error(join: Join) -> None:
    owner = join()
    await owner.delete(BUCKET, "never")
    assert await owner.snapshot(BUCKET) == {}


async def test_records_of_a_member_are_removed_when_it_leaves(join: Join) -> None:
    leaving, staying = join(), join()
    await leaving.put(BUCKET, "leaves", b"1")
    await staying.put(BUCKET, "stays", b"2")
    watch = staying.watch(BUCKET)
    await take(watch, 3)
    await leaving.close()
    assert await take(watch, 1) == [Delete("leaves")]
    assert await staying.snapshot(BUCKET) == {"stays": b"2"}


async def test_closing_ends_the_watches(join: Join) -> None:
    member = join()
    watch = member.watch(BUCKET)
    await take(watch, 1)
    await member.close()
    with pytest.raises(StopAsyncIteration):
        await take(watch, 1)


async def test_every_watcher_receives_every_change(join: Join) -> None:
    owner, reader = join(), join()
    watches = [reader.watch(BUCKET) for _ in range(2)]
    for watch in watches:
        await take(watch, 1)
    await owner.put(BUCKET, "k", b"v")
    for watch in watches:
        assert await take(watch, 1) == [Put("k", b"v")]


async def test_slow_watcher_receives_the_newest_value_of_each_existing_record(join: Join) -> None:
    owner, reader = join(), join()
    watch, quick_watch = reader.watch(BUCKET), reader.watch(BUCKET)
    await take(watch, 1)
    for value in (b"1", b"2", b"3"):
        await owner.put(BUCKET, "k", value)
    await owner.put(BUCKET, "passing", b"x")
    await owner.delete(BUCKET, "passing")
    await owner.put(BUCKET, "last", b"y")
    async for change in quick_watch:  # Both watches read one view; this one shows when all changes have arrived.
        if change == Put("last", b"y"):
            break
    assert await take(watch, 2) == [Put("k", b"3"), Put("last", b"y")]


def test_ids_are_positive_and_fit_in_63_bits() -> None:
    ids = {new_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(0 < number < 2**63 for number in ids)
