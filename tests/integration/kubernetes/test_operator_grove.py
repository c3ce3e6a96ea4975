"""The operator in a cluster with Grove: graphs become ready, scale, update in place, restart, and cost nothing at rest."""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest
from benchmarks.ports import free_port
from tests.cluster.kubernetes.operated import (
    DEADLINE_S,
    SPACE,
    Case,
    Object,
    OperatedCluster,
    graph,
    is_successful,
    run_on,
)
from tests.cluster.kubernetes.running import KubernetesServer
from tests.cluster.kubernetes.servers import CRDS
from tests.cluster.kubernetes.workloads import workload_definitions
from tests.cluster.processes import ProcessGroup

from dynamo.cli.deploy import deploy
from dynamo.k8s.kinds import (
    COMPONENTS,
    EVENTS,
    GRAPHS,
    POD_CLIQUE_SCALING_GROUPS,
    POD_CLIQUE_SETS,
    POD_CLIQUES,
    PODS,
    SCALING_ADAPTERS,
    SERVICES,
)
from dynamo.operator.reconcile.names import RESTART_AT, WORKER_HASH
from dynamo.operator.validation.facts import WORKLOAD_PROVIDER

pytestmark = pytest.mark.integration
SET = "chat"


def several_nodes(image: str = "image:1", **more: object) -> Object:
    """Return a graph whose decode worker has two nodes."""
    value = graph(image=image, **more)
    decode = value["spec"]["components"][1]
    main = decode["podTemplate"]["spec"]["containers"][0]
    main["command"] = ["python3", "-m", "dynamo.vllm", "--model", "m", "--tensor-parallel-size", "8"]
    main["resources"] = {"limits": {"nvidia.com/gpu": "4"}}
    decode["multinode"] = {"nodeCount": 2}
    return value


@pytest.fixture
def run(own_kubernetes: KubernetesServer, monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], None]:
    return run_on(own_kubernetes, monkeypatch, workload_definitions())


def test_graph_becomes_a_pod_clique_set_and_no_writes_follow(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        async with cluster.operator() as operator:
            await cluster.apply(several_nodes())
            status = await cluster.until(is_successful(1))
            found = status["components"]
            assert (found["Frontend"]["componentKind"], found["Frontend"]["readyReplicas"]) == ("PodClique", 1)
            assert (found["decode"]["componentKind"], found["decode"]["availableReplicas"]) == (
                "PodCliqueScalingGroup",
                2,
            )
            assert found["decode"]["scheduledReplicas"] == 2
            assert await cluster.names(COMPONENTS) == []
            assert await cluster.names(POD_CLIQUE_SETS) == [SET]
            assert await cluster.names(SERVICES) == ["chat-decode", "chat-frontend"]
            assert len(await cluster.names(PODS)) == 5
            stored = await cluster.client.get(GRAPHS, "chat", SPACE)
            assert stored is not None and stored["metadata"]["annotations"][WORKLOAD_PROVIDER] == "grove"
            await cluster.until_at_rest(operator)
            before = operator.applier.counts.total
            await asyncio.sleep(1.0)
            assert operator.applier.counts.total == before

    run(case)


def test_group_of_an_ended_engine_starts_again_and_the_others_continue(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        value = several_nodes(backendFramework="vllm")
        decode = value["spec"]["components"][1]
        mode = {"mode": "InterPod"}
        decode |= {"replicas": 1, "experimental": {"gpuMemoryService": mode, "failover": mode}}

        async def pods() -> dict[str, str]:
            listed = (await cluster.client.list(PODS, SPACE)).items
            return {
                one["metadata"]["name"].removeprefix("chat-0-decode-0-decode-"): one["metadata"]["uid"]
                for one in listed
            }

        async with cluster.operator():
            await cluster.apply(value)
            status = await cluster.until(is_successful(1))
            assert status["components"]["decode"]["gpusPerReplica"] == 8
            before = await pods()
            engines = {f"{clique}-{index}" for clique in ("ldr", "wkr-1") for index in (0, 1)}
            assert {*engines, "gms-0-0", "gms-1-0"} <= before.keys()
            ended = {"status": {"phase": "Failed", "conditions": [{"type": "Ready", "status": "False"}]}}
            await cluster.client.patch(PODS, "chat-0-decode-0-decode-ldr-1", ended, SPACE, subresource="status")
            deadline = time.monotonic() + DEADLINE_S
            while {name for name, uid in (await pods()).items() if before[name] != uid} != {"ldr-1", "wkr-1-1"}:
                assert time.monotonic() < deadline, await pods()
                await asyncio.sleep(0.05)
        # The operator writes the last ones when it ends.
        assert "FailoverCascade" in {one["reason"] for one in await events(cluster)}

    run(case)


def test_replicas_and_adapters_scale_cliques_and_groups(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        value = several_nodes()
        value["spec"]["components"][1]["scalingAdapter"] = {}
        async with cluster.operator():
            await cluster.apply(value)
            await cluster.until(is_successful(1))
            body = {"spec": {"replicas": 3}}
            await cluster.client.patch(SCALING_ADAPTERS, "chat-decode", body, SPACE, subresource="scale")
            status = await cluster.until(is_successful(2))
            assert status["components"]["decode"]["availableReplicas"] == 3
            group = await cluster.client.get(POD_CLIQUE_SCALING_GROUPS, "chat-0-decode", SPACE)
            assert group is not None and group["spec"]["replicas"] == 3
            [set_] = (await cluster.client.list(POD_CLIQUE_SETS, SPACE)).items
            assert set_["spec"]["template"]["podCliqueScalingGroups"][0]["replicas"] == 2
            value["spec"]["components"][0]["replicas"] = 2
            del value["spec"]["components"][1]["replicas"]
            await cluster.apply(value)
            status = await cluster.until(is_successful(3))
            assert status["components"]["Frontend"]["readyReplicas"] == 2

    run(case)


def test_a_new_image_is_rolled_in_place_and_a_restart_reaches_every_pod(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        async with cluster.operator():
            await cluster.apply(several_nodes())
            await cluster.until(is_successful(1))
            cliques, pods = await cluster.names(POD_CLIQUES), await generations(cluster)
            await cluster.apply(several_nodes("image:2"))
            status = await cluster.until(is_successful(2))
            assert "rollingUpdate" not in status
            assert await cluster.names(POD_CLIQUES) == cliques
            after = await generations(cluster)
            assert len(pods) == len(after) == 1 and pods != after
            deadline = time.monotonic() + DEADLINE_S  # Events are written after statuses.
            while "RollingUpdateNotSupported" not in {one["reason"] for one in await events(cluster)}:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            await cluster.apply(several_nodes("image:2", restart={"id": "r1"}))
            await cluster.until(lambda found: (found.get("restart") or {}).get("phase") == "Completed")
            for pod in (await cluster.client.list(PODS, SPACE)).items:
                assert pod["metadata"]["annotations"][RESTART_AT] == "r1"

    run(case)


async def events(cluster: OperatedCluster) -> Sequence[Object]:
    """Return the events of the namespace."""
    return (await cluster.client.list(EVENTS, SPACE)).items


async def generations(cluster: OperatedCluster) -> set[str]:
    """Return the generations of the workers' pods."""
    pods: Sequence[Object] = (await cluster.client.list(PODS, SPACE)).items
    return {one["metadata"]["labels"][WORKER_HASH] for one in pods if WORKER_HASH in one["metadata"]["labels"]}


def test_pods_of_the_strategy_on_delete_stay_until_they_are_deleted(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        value = several_nodes()
        value["metadata"]["annotations"] = {"nvidia.com/grove-update-strategy": "OnDelete"}
        async with cluster.operator():
            await cluster.apply(value)
            await cluster.until(is_successful(1))
            before = await generations(cluster)
            changed = several_nodes("image:2")
            changed["metadata"]["annotations"] = value["metadata"]["annotations"]
            await cluster.apply(changed)
            status = await cluster.until(lambda found: "Updating" in str(found.get("conditions")))
            assert status["state"] == "pending"
            assert await generations(cluster) == before
            for name in await cluster.names(PODS):
                await cluster.client.delete(PODS, name, SPACE)
            await cluster.until(is_successful(2))
            assert await generations(cluster) != before

    run(case)


def test_deleted_graph_removes_its_set_and_a_deleted_set_is_restored(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        async with cluster.operator() as operator:
            await cluster.apply(several_nodes())
            await cluster.until(is_successful(1))
            before = set(await cluster.names(PODS))
            await cluster.client.delete(POD_CLIQUE_SETS, SET, SPACE)
            deadline = time.monotonic() + DEADLINE_S
            while not await cluster.names(POD_CLIQUE_SETS):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            await cluster.until(is_successful(1))
            assert set(await cluster.names(PODS)) == before
            await cluster.client.delete(GRAPHS, "chat", SPACE)
            while await cluster.names(PODS) or await cluster.names(SERVICES) or len(operator.applier):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)

    run(case)


def test_added_and_removed_kinds_are_detected_without_a_restart(
    own_kubernetes: KubernetesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(cluster: OperatedCluster) -> None:
        headers = {"Authorization": f"Bearer {own_kubernetes.token}"}
        async with cluster.operator() as operator:
            await cluster.apply(several_nodes())
            status = await cluster.until(lambda found: found.get("state") == "failed")
            assert "several nodes require Grove or LeaderWorkerSet" in status["conditions"][0]["message"]
            async with httpx.AsyncClient(base_url=own_kubernetes.url, headers=headers, timeout=30) as api:
                # Those of Grove first: an operator that looks in between takes what it finds.
                for crd in sorted(workload_definitions(), key=lambda one: bool(one["spec"]["group"] != "grove.io")):
                    assert (await api.post(CRDS, json=crd)).status_code == 201
                status = await cluster.until(is_successful(1))
                assert status["components"]["decode"]["componentKind"] == "PodCliqueScalingGroup"
                for crd in workload_definitions():
                    assert (await api.delete(f"{CRDS}/{crd['metadata']['name']}")).status_code == 200
            status = await cluster.until(lambda found: found.get("state") == "failed")
            assert "grove requires Grove" in str(status["conditions"])
            assert operator.is_ready

    run_on(own_kubernetes, monkeypatch)(case)


GRAPH_FILE = """\
apiVersion: nvidia.com/v1beta1
kind: DynamoGraphDeployment
metadata: {name: chat}
spec:
  components:
  - name: Frontend
    type: frontend
    podTemplate: {spec: {containers: [{name: main, image: "front:1.6.1"}]}}
  - name: decode
    type: decode
    replicas: 2
    multinode: {nodeCount: 2}
    podTemplate:
      spec:
        containers:
        - name: main
          image: worker:1.6.1
          command: [python3, -m, dynamo.sglang]
          args: [--model-path, m, --tp, "8"]
          resources: {limits: {nvidia.com/gpu: "4"}}
"""


def test_operator_process_runs_a_graph_with_grove(
    own_kubernetes: KubernetesServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(own_kubernetes.kubeconfig))
    headers = {"Authorization": f"Bearer {own_kubernetes.token}"}
    with httpx.Client(base_url=own_kubernetes.url, headers=headers) as api:
        for crd in workload_definitions():
            assert api.post(CRDS, json=crd).status_code == 201
    file = tmp_path / "graph.yaml"
    file.write_text(GRAPH_FILE)
    port = free_port()
    arguments = ["--port", str(port), "--no-webhooks", "--upgrade-crds"]
    processes = ProcessGroup(tmp_path)
    processes.start("operator", [sys.executable, "-m", "dynamo.operator", *arguments])
    try:
        processes.wait_until(lambda: is_ready(port), "the operator is not ready")
        if deploy(["apply", str(file)]) != 0:
            raise AssertionError(capsys.readouterr().err + processes.logs())
        processes.wait_until(lambda: deploy(["status", "chat"]) == 0, "the graph is not ready")
        shown = capsys.readouterr().out
        assert "decode     2/2    Ready" in shown
        ready = f'resource_type="{GRAPHS.kind}",namespace="default",status="ready"'
        counted = f"dynamo_operator_resources_total{{{ready}}} 1"
        processes.wait_until(lambda: counted in metrics(port), "the operator does not see its own status")
    finally:
        processes.stop()


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def metrics(port: int) -> str:
    return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text
