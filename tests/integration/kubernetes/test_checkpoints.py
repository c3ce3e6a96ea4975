"""Components that start from DynamoCheckpoints, on an API server: waiting, restored, and started without."""

import asyncio
import time
from collections.abc import Callable

import pytest
from tests.cluster.kubernetes.operated import (
    COLLECTED_S,
    SPACE,
    Case,
    Object,
    OperatedCluster,
    component,
    graph,
    is_successful,
    run_on,
)
from tests.cluster.kubernetes.servers import AnyKubernetes

from dynamo.k8s.kinds import CHECKPOINTS, DAEMON_SETS, DEPLOYMENTS, GRAPHS, JOBS, ObjectKind
from dynamo.operator.reconcile.restores import IS_TARGET
from dynamo.protocols.kubernetes.common import V1ALPHA1

pytestmark = pytest.mark.integration

CHECKPOINT: Object = {
    "apiVersion": V1ALPHA1,
    "kind": CHECKPOINTS.kind,
    "metadata": {"name": "weights", "namespace": SPACE},
    "spec": {
        "identity": {"model": "m", "backendFramework": "vllm"},
        "job": {"podTemplateSpec": {"spec": {"containers": [{"name": "main", "image": "i"}]}}},
    },
}
LABELS = {"app.kubernetes.io/component": "snapshot-agent"}
AGENT: Object = {
    "apiVersion": "apps/v1",
    "kind": "DaemonSet",
    "metadata": {"name": "snapshot-agent", "namespace": SPACE, "labels": LABELS},
    "spec": {
        "selector": {"matchLabels": LABELS},
        "template": {
            "metadata": {"labels": LABELS},
            "spec": {
                "containers": [
                    {
                        "name": "agent",
                        "image": "a",
                        "volumeMounts": [{"name": "checkpoints", "mountPath": "/checkpoints"}],
                    }
                ],
                "volumes": [{"name": "checkpoints", "persistentVolumeClaim": {"claimName": "snapshots"}}],
            },
        },
    },
}


@pytest.fixture
def run(kubernetes_api: AnyKubernetes, monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], None]:
    return run_on(kubernetes_api, monkeypatch)


def with_checkpoint(policy: str) -> Object:
    """Return a graph whose worker starts from the checkpoint."""
    worker = component("decode", "decode", 2, "image:1")
    checkpoint = {"enabled": True, "checkpointRef": "weights", "startupPolicy": policy}
    value = graph()
    value["spec"]["components"][1] = {**worker, "experimental": {"checkpoint": checkpoint}}
    return value


async def worker_of(cluster: OperatedCluster) -> Object:
    """Return the Deployment of the worker."""
    (name,) = [one for one in await cluster.names(DEPLOYMENTS) if "decode" in one]
    found = await cluster.client.get(DEPLOYMENTS, name, SPACE)
    assert found is not None
    return found


async def set_phase(cluster: OperatedCluster, phase: str) -> None:
    """Set the phase of the checkpoint, as its reconcile does when the job has ended."""
    await cluster.client.patch(CHECKPOINTS, "weights", {"status": {"phase": phase}}, SPACE, subresource="status")


def checkpoint_state(status: Object) -> bool | None:
    state: bool | None = ((status.get("checkpoints") or {}).get("decode") or {}).get("ready")
    return state


def test_component_waits_for_its_checkpoint_and_is_restored_from_it(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        await cluster.client.create(DAEMON_SETS, AGENT, SPACE)
        async with cluster.operator() as operator:
            await cluster.apply(with_checkpoint("WaitForCheckpoint"))
            status = await cluster.until(lambda status: checkpoint_state(status) is False)
            assert status["state"] != "successful"
            await cluster.until_at_rest(operator)
            assert (await worker_of(cluster))["spec"]["replicas"] == 0
            await cluster.client.create(CHECKPOINTS, CHECKPOINT, SPACE)
            await cluster.until_at_rest(operator)
            await set_phase(cluster, "Ready")
            status = await cluster.until(lambda status: is_successful(1)(status) and bool(checkpoint_state(status)))
            assert status["checkpoints"]["decode"]["checkpointName"] == "weights"
            template = (await worker_of(cluster))["spec"]["template"]
            assert template["metadata"]["labels"][IS_TARGET] == "true"
            claims = [one.get("persistentVolumeClaim") for one in template["spec"]["volumes"]]
            assert {"claimName": "snapshots"} in claims
            await cluster.until_at_rest(operator)

    run(case)


def test_component_gets_a_checkpoint_of_its_own_whose_job_runs_its_container(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        value = with_checkpoint("WaitForCheckpoint")
        value["spec"]["backendFramework"] = "vllm"
        wanted = value["spec"]["components"][1]["experimental"]["checkpoint"]
        del wanted["checkpointRef"]
        saver = {"containers": [{"name": "saver", "image": "saver:1"}]}
        wanted["job"] = {"podTemplate": {"metadata": {"labels": {"part": "capture"}}, "spec": saver}}
        async with cluster.operator() as operator:
            await cluster.apply(value)
            status = await cluster.until(lambda status: is_successful(1)(status) and bool(checkpoint_state(status)))
            (name,) = await cluster.names(CHECKPOINTS)
            assert status["checkpoints"]["decode"]["checkpointName"] == name
            made = await cluster.client.get(CHECKPOINTS, name, SPACE)
            assert made is not None and made["status"]["phase"] == "Ready"
            job = await cluster.client.get(JOBS, made["status"]["jobName"], SPACE)
            assert job is not None
            template = job["spec"]["template"]
            assert template["metadata"]["labels"]["part"] == "capture"
            assert [one["image"] for one in template["spec"]["containers"]] == ["image:1", "saver:1"]
            worker = await worker_of(cluster)
            assert worker["spec"]["template"]["metadata"]["labels"][IS_TARGET] == "true"
            assert worker["status"]["readyReplicas"] == 2
            await cluster.until_at_rest(operator)
            await cluster.client.delete(GRAPHS, "chat", SPACE)
            await until_none(cluster, CHECKPOINTS)

    run(case)


async def until_none(cluster: OperatedCluster, kind: ObjectKind) -> None:
    """Wait until the objects of a kind are collected with their owner."""
    deadline = time.monotonic() + COLLECTED_S
    while found := await cluster.names(kind):
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.1)


def test_component_starts_without_a_checkpoint_that_failed(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        async with cluster.operator() as operator:
            await cluster.client.create(CHECKPOINTS, CHECKPOINT, SPACE)
            await cluster.until_at_rest(operator)
            await set_phase(cluster, "Failed")
            await cluster.apply(with_checkpoint("WaitForCheckpoint"))
            status = await cluster.until(is_successful(1))
            assert checkpoint_state(status) is False
            assert IS_TARGET not in (await worker_of(cluster))["spec"]["template"]["metadata"]["labels"]

    run(case)
