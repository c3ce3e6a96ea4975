"""Controllers, leader election and event recording on an API server, with faults."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.cluster.kubernetes.running import KubernetesServer
from tests.cluster.kubernetes.servers import AnyKubernetes
from tests.settle import until

from dynamo.k8s.client import KubeClient, KubeRefused
from dynamo.k8s.controller import Controller, ReconcileResult
from dynamo.k8s.events import EventRecorder
from dynamo.k8s.informer import Informer, ObjectKey
from dynamo.k8s.kinds import CONFIG_MAPS, EVENTS, LEASES, NODES
from dynamo.k8s.leader import LeaderElection, LeaseName, LeaseTimings
from dynamo.k8s.workqueue import RetryLimits, WorkQueue
from dynamo.protocols.kubernetes.common import KubeObject

pytestmark = pytest.mark.integration

MANAGER = "test-controller"
SOURCE = "app=source"
AT = LeaseName("default", "test-operator")
FAST = LeaseTimings(duration_s=6, renew_deadline_s=3.0, retry_s=0.1)
PATIENT = LeaseTimings(duration_s=60, renew_deadline_s=40.0, retry_s=0.1)
"""Timings of candidates that release the lease: a busy machine does not end the leadership of one."""
DEADLINE_S = 60.0


class CopyController:
    """Keeps a copy of each ConfigMap with the label of sources."""

    def __init__(self, client: KubeClient, workers: int = 4) -> None:
        self.client = client
        self.queue = WorkQueue[ObjectKey](RetryLimits(first_s=0.01, max_s=0.2, per_s=1000.0, burst=1000))
        self.results: list[ReconcileResult[ObjectKey]] = []
        self.controller = Controller("copies", self._reconcile, self.queue, workers, on_result=self.results.append)
        self.sources = Informer(client, CONFIG_MAPS, "default", SOURCE, on_change=self._on_source)
        self.copies = Informer(client, CONFIG_MAPS, "default", "app=copy", on_change=self._on_copy)

    def _on_source(self, key: ObjectKey, _: KubeObject | None) -> None:
        self.queue.add(key)

    def _on_copy(self, key: ObjectKey, _: KubeObject | None) -> None:
        self.queue.add((key[0], key[1].removeprefix("copy-")))

    async def _reconcile(self, key: ObjectKey) -> float | None:
        namespace, name = key
        copy = (namespace, f"copy-{name}")
        source, existing = self.sources.objects.get(key), self.copies.objects.get(copy)
        if source is None:
            if existing is not None:
                await self.client.delete(CONFIG_MAPS, copy[1], namespace)
        elif existing is None or existing.get("data") != source.get("data"):
            metadata = {"name": copy[1], "labels": {"app": "copy"}}
            await self.client.apply(
                CONFIG_MAPS, {"metadata": metadata, "data": source.get("data")}, namespace, manager=MANAGER
            )
        return None

    @property
    def data(self) -> dict[str, object]:
        """Data of the copies by the names of their sources."""
        return {key[1].removeprefix("copy-"): one.get("data") for key, one in self.copies.objects.items()}

    async def run(self) -> None:
        self.controller.start()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.sources.run())
                group.create_task(self.copies.run())
        finally:
            await self.controller.stop(5.0)


@pytest.fixture
async def client(kubernetes_api: AnyKubernetes, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubeClient]:
    monkeypatch.setenv("KUBECONFIG", str(kubernetes_api.kubeconfig))
    made = KubeClient()
    yield made
    await made.close()


@pytest.fixture
async def faulty(own_kubernetes: KubernetesServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubeClient]:
    """Return a client of a server of its own, in which faults are injected."""
    monkeypatch.setenv("KUBECONFIG", str(own_kubernetes.kubeconfig))
    made = KubeClient()
    yield made
    await made.close()


def source(name: str, text: str) -> KubeObject:
    return {"metadata": {"name": name, "labels": {"app": "source"}}, "data": {"text": text}}


async def test_copies_converge_through_faults_and_nothing_is_written_at_rest(
    faulty: KubeClient, own_kubernetes: KubernetesServer
) -> None:
    copies = CopyController(faulty)
    running = asyncio.create_task(copies.run())
    for index in range(30):
        await faulty.create(CONFIG_MAPS, source(f"s{index}", "old"), "default")
    await until(lambda: len(copies.data) == 30)
    own_kubernetes.act(method="PATCH", path=".*copy-.*", status=500, count=10)
    own_kubernetes.act(method="PATCH", path=".*copy-.*", status=429, count=10)
    own_kubernetes.act(action="drop_watches")
    for index in range(30):
        await faulty.apply(CONFIG_MAPS, source(f"s{index}", "new"), "default", manager="user")
    for index in range(20, 30):
        await faulty.delete(CONFIG_MAPS, f"s{index}", "default")
    await faulty.delete(CONFIG_MAPS, "copy-s0", "default")
    wanted = {f"s{index}": {"text": "new"} for index in range(20)}
    await until(lambda: copies.data == wanted and not copies.queue.delayed and not copies.queue.processing)
    assert {one.outcome for one in copies.results} == {"success", "error"}
    writes = own_kubernetes.act(action="clear")["writes"]
    own_kubernetes.act(action="drop_watches")
    await asyncio.sleep(0.5)
    assert own_kubernetes.act(action="clear")["writes"] == writes
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_update_with_an_old_version_is_refused(client: KubeClient) -> None:
    made = await client.create(CONFIG_MAPS, source("versioned", "a"), "default")
    changed = await client.replace(CONFIG_MAPS, {**made, "data": {"text": "b"}}, "default")
    assert changed["data"] == {"text": "b"}
    with pytest.raises(KubeRefused, match="409 Conflict"):
        await client.replace(CONFIG_MAPS, {**made, "data": {"text": "c"}}, "default")


async def sole_leader(elections: dict[str, LeaderElection]) -> str:
    """Return the name of the leader as soon as there is one; there are never two."""

    def leaders() -> list[str]:
        found = [name for name, one in elections.items() if one.is_leader]
        assert len(found) <= 1
        return found

    await until(leaders)
    return leaders()[0]


async def test_one_of_three_candidates_leads_and_another_follows_when_it_releases_the_lease(client: KubeClient) -> None:
    elections = {name: LeaderElection(client, AT, name, timings=PATIENT) for name in "abc"}
    for one in elections.values():
        one.start()
    for transitions in range(3):
        leader = await sole_leader(elections)
        lease = await client.get(LEASES, AT.name, AT.namespace)
        assert lease is not None
        spec = lease["spec"]
        assert (spec["holderIdentity"], spec["leaseDurationSeconds"]) == (leader, 60)
        assert spec["leaseTransitions"] == transitions
        await elections.pop(leader).close()
    lease = await client.get(LEASES, AT.name, AT.namespace)
    assert lease is not None
    assert not lease["spec"].get("holderIdentity")
    await client.delete(LEASES, AT.name, AT.namespace)


async def test_leader_that_cannot_renew_stops_and_leads_again_afterwards(
    faulty: KubeClient, own_kubernetes: KubernetesServer
) -> None:
    lost: list[bool] = []
    election = LeaderElection(faulty, AT, "a", timings=FAST, on_lost=lambda: lost.append(election.is_leader))
    election.start()
    await asyncio.wait_for(election.wait_until_leader(), DEADLINE_S)
    own_kubernetes.act(path=".*/leases.*", status=503, count=-1)
    await until(lambda: lost)
    assert (lost, election.is_leader) == ([False], False)
    own_kubernetes.act(action="clear")
    await asyncio.wait_for(election.wait_until_leader(), DEADLINE_S)
    await election.close()


async def test_server_that_hangs_ends_the_leadership_in_time(
    faulty: KubeClient, own_kubernetes: KubernetesServer
) -> None:
    lost: list[float] = []
    loop = asyncio.get_running_loop()
    election = LeaderElection(faulty, AT, "a", timings=FAST, on_lost=lambda: lost.append(loop.time()))
    election.start()
    await asyncio.wait_for(election.wait_until_leader(), DEADLINE_S)
    own_kubernetes.act(path=".*/leases.*", delay_s=8.0, count=1)
    began = loop.time()
    await until(lambda: lost)
    assert lost[0] - began < 7.5, "the leadership lasts until the response"
    await election.close()
    await until(lambda: loop.time() > began + 8.5)  # The server ends without a request in process.


async def test_events_are_listed_with_their_object_and_count(client: KubeClient) -> None:
    about = await client.create(CONFIG_MAPS, source("observed", "a"), "default")
    recorder = EventRecorder(client, "dynamo-operator", instance="pod-0")
    recorder.start()
    for _ in range(3):
        recorder.record(CONFIG_MAPS, about, "Warning", "TestReason", "the message")
        await until(lambda: not recorder.pending)
    recorder.record(NODES, {"metadata": {"name": "node-0"}}, "Normal", "TestReason", "about a node")
    await recorder.close()
    assert recorder.counts.lost == 0
    listed = await client.list(EVENTS, "default")
    found = {one["message"]: one for one in listed.items if one["reason"] == "TestReason"}
    event = found["the message"]
    assert (event["involvedObject"]["uid"], event["type"]) == (about["metadata"]["uid"], "Warning")
    assert (event["source"], event["reportingComponent"]) == ({"component": "dynamo-operator"}, "dynamo-operator")
    assert event["count"] >= 1
    assert found["about a node"]["involvedObject"]["kind"] == "Node"
