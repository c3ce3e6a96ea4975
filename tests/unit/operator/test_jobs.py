"""Controllers of requests and checkpoints over a cluster in memory: their reads, watches, and remaining objects."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.settle import turns
from tests.unit.operator.kube_store import KubeStore
from tests.unit.operator.reconcile.requests.request_cluster import HARDWARE, RESULT, SPEC

from dynamo.k8s.client import KubeListing, KubeRefused
from dynamo.k8s.kinds import CHECKPOINTS, CONFIG_MAPS, GRAPH_REQUESTS, GRAPHS, JOBS, NODES, PODS, ObjectKind
from dynamo.operator.applier import Applier
from dynamo.operator.controllers import Reconciler
from dynamo.operator.jobs import (
    SELECTIONS,
    CheckpointController,
    RequestController,
    owner_of_job,
    requests_of_graph,
)
from dynamo.operator.reconcile.requests.job import RequestSettings
from dynamo.operator.reconcile.requests.phases import LOOK_S
from dynamo.operator.view import ClusterView
from dynamo.protocols.kubernetes.common import KubeObject

KEY = ("space", "chat")
GPUS = {"nvidia.com/gpu.product": "NVIDIA-H200", "nvidia.com/gpu.count": "8", "nvidia.com/gpu.memory": "143771"}
IDENTITY = {"model": "m", "backendFramework": "vllm"}
TEMPLATE = {"spec": {"containers": [{"name": "main", "image": "i"}]}}


class NodelessStore(KubeStore):
    """Cluster whose nodes may not be read."""

    async def list(self, kind: ObjectKind, namespace: str | None = None, labels: str = "") -> KubeListing:
        if kind == NODES:
            raise KubeRefused(403, "Forbidden", "nodes is forbidden")
        return await super().list(kind, namespace, labels)


class Subject:
    """The controllers with their view."""

    def __init__(self, store: KubeStore) -> None:
        self.store = store
        self.view = ClusterView(store)
        for kind in (GRAPH_REQUESTS, CHECKPOINTS, GRAPHS):
            self.view.watch(kind)
        for kind, labels in SELECTIONS:
            self.view.watch(kind, labels)
        applier = Applier(store, self.view, store)
        requests = RequestController(self.view, store, RequestSettings())
        self.requests = Reconciler(requests, self.view, applier, store)
        self.checkpoints = Reconciler(CheckpointController(self.view), self.view, applier, store)

    async def put(self, kind: ObjectKind, name: str, **fields: Any) -> KubeObject:
        """Write an object as another client."""
        metadata = {"name": name, "namespace": "space", **fields.pop("metadata", {})}
        stored = self.store.put(
            kind, {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, **fields}
        )
        await turns(20)
        return stored

    async def request(self, **spec: Any) -> KubeObject:
        """Write a request and reconcile it; return its status."""
        await self.put(GRAPH_REQUESTS, "chat", spec=SPEC | spec)
        return await self.reconcile()

    async def reconcile(self) -> KubeObject:
        """Reconcile the request; return its status."""
        await self.requests.reconcile(KEY)
        await turns(20)
        status: KubeObject = self.store.objects[GRAPH_REQUESTS.plural, *KEY]["status"]
        return status

    async def publish(self, **data: str) -> None:
        """Write the output of the job as its sidecar does."""
        uid = self.store.objects[GRAPH_REQUESTS.plural, *KEY]["metadata"]["uid"]
        owner = {"kind": GRAPH_REQUESTS.kind, "name": "chat", "uid": uid, "controller": True}
        metadata = {"labels": {"dgdr.nvidia.com/name": "chat"}, "ownerReferences": [owner]}
        await self.put(CONFIG_MAPS, "dgdr-output-chat", metadata=metadata, data=data)

    async def end_job(self) -> None:
        """Complete the job."""
        job = next(one for place, one in self.store.objects.items() if place[0] == JOBS.plural)
        one = {"type": "Complete", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        self.store.put(JOBS, {**job, "status": {"conditions": [one]}})
        await turns(20)


@pytest.fixture
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    made = Subject(getattr(request, "param", KubeStore)())
    made.view.start()
    await turns(20)
    yield made
    await made.view.close()


async def test_request_creates_a_job_and_then_an_unowned_graph(subject: Subject) -> None:
    status = await subject.request()
    assert (status["phase"], status["profilingJobName"]) == ("Profiling", "profile-chat")
    job = subject.store.objects[JOBS.plural, "space", "profile-chat"]
    assert [one["kind"] for one in job["metadata"]["ownerReferences"]] == [GRAPH_REQUESTS.kind]
    await subject.publish(phase="SweepingDecode", message="2 of 5")
    assert (await subject.reconcile())["profilingPhase"] == "SweepingDecode"
    await subject.publish(phase="Done", message="", **{"final_config.yaml": RESULT})
    await subject.end_job()
    assert (await subject.reconcile())["phase"] == "Deploying"
    graph = subject.store.objects[GRAPHS.plural, "space", "chat-dgd"]
    assert "ownerReferences" not in graph["metadata"]
    subject.store.put(GRAPHS, {**graph, "status": {"state": "successful"}})
    await turns(20)
    assert (await subject.reconcile())["phase"] == "Deployed"
    subject.store.calls.clear()
    await subject.reconcile()
    assert subject.store.calls == []


@pytest.mark.parametrize("subject", [KubeStore, NodelessStore], indirect=True)
async def test_nodes_are_read_only_when_hardware_is_not_specified(subject: Subject) -> None:
    subject.store.lists.clear()
    await subject.request(hardware=HARDWARE)
    await subject.reconcile()
    assert subject.store.lists == []
    assert (JOBS.plural, "space", "profile-chat") in subject.store.objects


async def test_hardware_is_discovered_from_the_labels_of_nodes(subject: Subject) -> None:
    await subject.put(NODES, "n", metadata={"namespace": "", "labels": GPUS})
    subject.store.lists.clear()
    assert (await subject.request(hardware={}))["phase"] == "Profiling"
    await subject.reconcile()
    assert subject.store.lists == ["Node"]
    job = subject.store.objects[JOBS.plural, "space", "profile-chat"]
    assert '"gpuSku":"h200_sxm"' in job["spec"]["template"]["spec"]["containers"][0]["args"][1]


@pytest.mark.parametrize("subject", [NodelessStore], indirect=True)
async def test_operator_without_node_access_names_the_fields_to_set(subject: Subject) -> None:
    status = await subject.request(hardware={})
    assert status["phase"] == "Failed"
    [validation] = [one for one in status["conditions"] if one["type"] == "Validation"]
    assert "nodes cannot be read: set spec.hardware.gpuSku" in validation["message"]


async def test_missing_volume_claim_fails_the_request(subject: Subject) -> None:
    assert (await subject.request(modelCache={"pvcName": "weights"}))["phase"] == "Failed"
    assert (JOBS.plural, "space", "profile-chat") not in subject.store.objects


async def test_changes_of_graphs_jobs_and_pods_trigger_their_request(subject: Subject) -> None:
    await subject.request()
    job = subject.store.objects[JOBS.plural, "space", "profile-chat"]
    assert owner_of_job(subject.view, ("space", "profile-chat")) == KEY
    assert owner_of_job(subject.view, ("space", "other")) is None
    seen: list[Any] = []
    subject.view.listen(JOBS, seen.append)
    owner = {"kind": "Job", "name": "profile-chat", "uid": job["metadata"]["uid"], "controller": True}
    await subject.put(PODS, "p", metadata={"labels": {"app": "dynamo-profiler"}, "ownerReferences": [owner]})
    assert seen == [("space", "profile-chat")]
    await subject.put(GRAPHS, "g", metadata={"labels": {"dgdr.nvidia.com/name": "chat"}})
    assert list(requests_of_graph(subject.view, ("space", "g"))) == [KEY]
    request = subject.store.objects[GRAPH_REQUESTS.plural, *KEY]
    subject.store.put(GRAPH_REQUESTS, {**request, "status": {"dgdName": "gone"}})
    await turns(20)
    assert list(requests_of_graph(subject.view, ("space", "gone"))) == [KEY]
    assert list(requests_of_graph(subject.view, ("space", "none"))) == []


async def test_checkpoint_runs_its_job_and_a_duplicate_fails(subject: Subject) -> None:
    spec = {"identity": IDENTITY, "job": {"podTemplateSpec": TEMPLATE}}
    old = {"creationTimestamp": "2026-01-01T00:00:00Z"}
    await subject.put(CHECKPOINTS, "a", metadata=old, spec=spec)
    await subject.put(CHECKPOINTS, "b", metadata={"creationTimestamp": "2026-01-02T00:00:00Z"}, spec=spec)
    await subject.put(CHECKPOINTS, "malformed", metadata=old, spec={"identity": 1})
    phases = []
    for step in (None, None, subject.end_job):
        if step:
            await step()
        for name in ("a", "b"):
            await subject.checkpoints.reconcile(("space", name))
            await turns(20)
            phases.append(subject.store.objects[CHECKPOINTS.plural, "space", name]["status"]["phase"])
    assert phases == ["Pending", "Failed", "Creating", "Failed", "Ready", "Failed"]
    [job] = [one for place, one in subject.store.objects.items() if place[0] == JOBS.plural]
    assert job["spec"]["ttlSecondsAfterFinished"] == 300
    subject.store.remove(JOBS, "space", job["metadata"]["name"])  # After its time to live.
    await turns(20)
    subject.store.calls.clear()
    await subject.checkpoints.reconcile(("space", "a"))
    assert subject.store.calls == []


async def deploy(subject: Subject) -> KubeObject:
    """Bring the request to the phase Deploying; return its status."""
    await subject.request()
    await subject.publish(phase="Done", message="", **{"final_config.yaml": RESULT})
    await subject.end_job()
    return await subject.reconcile()


async def test_profiler_config_maps_are_deleted_with_the_graph(subject: Subject) -> None:
    await deploy(subject)
    place = (CONFIG_MAPS.plural, "space", "planner-config-1a2b")
    assert "ownerReferences" not in subject.store.objects[place]["metadata"]
    await subject.reconcile()
    [owner] = subject.store.objects[place]["metadata"]["ownerReferences"]
    graph = subject.store.objects[GRAPHS.plural, "space", "chat-dgd"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == (GRAPHS.kind, graph["metadata"]["uid"], True)
    subject.store.calls.clear()
    await subject.reconcile()
    assert subject.store.calls == []


async def test_image_pull_failures_of_the_graph_are_events(subject: Subject) -> None:
    await deploy(subject)
    waiting = {"name": "main", "image": "i:1", "state": {"waiting": {"reason": "ErrImagePull"}}}
    labels = {"nvidia.com/dynamo-graph-deployment-name": "chat-dgd"}
    await subject.put(PODS, "p", metadata={"labels": labels}, status={"containerStatuses": [waiting]})
    assert await subject.requests.reconcile(KEY) == LOOK_S
    assert ("ImagePullFailed", "pod p: image i:1 cannot be pulled: ErrImagePull") in subject.store.events


@pytest.mark.parametrize(
    ("rejected", "condition", "reason", "event"),
    [
        (GRAPHS, "DeploymentReady", "DeploymentRejected", "DeploymentCreationFailed"),
        (JOBS, "Profiling", "JobCreationFailed", "ProfilingJobFailed"),
    ],
)
async def test_object_rejected_by_admission_fails_the_request(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, rejected: ObjectKind, condition: str, reason: str, event: str
) -> None:
    def refusing(write: Any) -> Any:
        async def written(kind: ObjectKind, *args: Any, **named: Any) -> KubeObject:
            if kind == rejected:
                raise KubeRefused(422, "Invalid", "admission webhook denied the request")
            value: KubeObject = await write(kind, *args, **named)
            return value

        return written

    for name in ("create", "apply"):
        monkeypatch.setattr(subject.store, name, refusing(getattr(subject.store, name)))
    await subject.request()
    if rejected == GRAPHS:
        await subject.publish(phase="Done", message="", **{"final_config.yaml": RESULT})
        await subject.end_job()
        await subject.reconcile()
    status = subject.store.objects[GRAPH_REQUESTS.plural, *KEY]["status"]
    [found] = [one for one in status["conditions"] if one["type"] == condition]
    assert (status["phase"], found["status"], found["reason"]) == ("Failed", "False", reason)
    assert "admission webhook denied the request" in found["message"]
    assert event in [one for one, _ in subject.store.events]


async def test_failed_output_without_labels_is_found_after_the_job_ended(subject: Subject) -> None:
    await subject.request()
    data = {"phase": "SweepingDecode", "profiler_status": "failed", "profiler_error": "no configuration"}
    await subject.put(CONFIG_MAPS, "dgdr-output-chat", data=data)
    await subject.end_job()
    status = await subject.reconcile()
    [profiling] = [one for one in status["conditions"] if one["type"] == "Profiling"]
    assert (status["phase"], profiling["reason"]) == ("Failed", "SweepingDecodeFailed")
    assert profiling["message"] == "profiling failed: no configuration"
    [succeeded] = [one for one in status["conditions"] if one["type"] == "Succeeded"]
    assert succeeded["message"] == "Profiling failed: profiling failed: no configuration"
